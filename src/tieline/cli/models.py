"""Loading the models that commands name."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["BatchSize", "Device", "ModelName", "Revision", "TextFile", "TrustRemoteCode", "load"]

ModelName = Annotated[
    str | None,
    typer.Argument(help="Folder or hub id; without it, the model in the box.", metavar="MODEL"),
]
TextFile = Annotated[
    Path | None, typer.Option(help="Text to run, UTF-8; by default one in the box.")
]
BatchSize = Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Let code that comes with MODEL run.")
]


def load(name: str | None, revision: str | None, dtype: str, device: str, trust: bool) -> Any:
    """The model; heavy imports wait until here, so that help and refusals come at once."""
    from transformers.utils import logging

    from tieline.hf.loading import load_model

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return load_model(name, revision=revision, dtype=dtype, device=device, trust_remote_code=trust)
