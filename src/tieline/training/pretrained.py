"""Pretrained models that a paper starts from: found on this machine, or fetched before a run.

local_checkpoint    folder of a model that is here already; never uses the network
fetch_checkpoint    the same, fetched from the hub if need be: safetensors and JSON only
"""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from tieline.training.fetch import DataError

__all__ = ["fetch_checkpoint", "local_checkpoint"]

WANTED = ["*.json", "*.safetensors", "*.txt"]


def local_checkpoint(name: str) -> Path | None:
    """The folder of a model by its path or its name on the hub; None if it is not here."""
    if Path(name).is_dir():
        return Path(name)
    try:
        found = snapshot_download(name, allow_patterns=WANTED, local_files_only=True)
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    return Path(found) if (Path(found) / "config.json").is_file() else None


def fetch_checkpoint(name: str) -> Path:
    """The folder of a model, fetched if it is not here."""
    found = local_checkpoint(name)
    if found is not None:
        return found
    try:
        return Path(snapshot_download(name, allow_patterns=WANTED))
    except (HfHubHTTPError, OSError, ValueError) as problem:
        raise DataError(
            f"the pretrained model {name!r} is not here and cannot be fetched ({problem!s:.120}); "
            f"`hf download {name}` elsewhere, or name a folder"
        ) from problem
