"""Loading the models that commands name."""

import sys
from typing import Any

__all__ = ["load"]


def load(name: str | None, revision: str | None, dtype: str, device: str, trust: bool) -> Any:
    """The model; heavy imports wait until here, so that help and refusals come at once."""
    from transformers.utils import logging

    from tieline.hf.loading import load_model

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return load_model(name, revision=revision, dtype=dtype, device=device, trust_remote_code=trust)
