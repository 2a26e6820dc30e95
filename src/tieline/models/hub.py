"""The hub: whether it can be asked for the files of a model, and files that come when needed.

The libraries of the hub try again and again to reach it, for each file that is not in the cache. It
is asked once here instead, and without an answer only files in the cache are used.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

from tieline.core.errors import UnsupportedModelError, first_line, require
from tieline.core.files import out_of_space
from tieline.core.untrusted_input import INDEX
from tieline.models.shards import (
    Shards,
    StoredTensor,
    parse_header,
    read_shard_header,
    shard_names,
)

CONFIG = "config.json"
"""The file that is asked for."""

SECONDS = 10
"""Time in which the hub must answer."""


def hub_options(name: str, revision: str | None = None) -> dict[str, Any]:
    """Return options of `from_pretrained` for a hub id; refuses one that is nowhere to be had.

    Args:
        name: the id.
        revision: branch, tag or commit.
    """
    where = {"revision": revision}
    if hub_answers(name, revision):
        return where
    cached = isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str)
    require(
        cached,
        f"{name!r} is no local folder, and the hub ({constants.ENDPOINT}) is not reachable: give "
        "the folder of a model",
        UnsupportedModelError,
    )
    return {**where, "local_files_only": True}


def hub_answers(name: str, revision: str | None = None) -> bool:
    """Whether the hub answers a question about a model, be it with a refusal."""
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_hf_file_metadata(hf_hub_url(name, CONFIG, revision=revision), timeout=SECONDS)
    except Exception as problem:  # a library of many authors: any class may come
        return getattr(problem, "response", None) is not None
    return True


def hub_shards(name: str, folder: Path, revision: str | None = None, keep: bool = True) -> Shards:
    """The files of a hub id, of which only headers are fetched now.

    Args:
        name: the hub id.
        folder: with its configuration and index.
        revision: branch, tag or commit.
        keep: whether a file stays once it was used.
    """
    require(
        (folder / INDEX).is_file(),
        f"{name!r} has no {INDEX}: a model in one file is loaded, not streamed",
        UnsupportedModelError,
    )
    client, headers = huggingface_hub.HfApi(endpoint=_hub_location()["endpoint"]), {}
    for file in shard_names(folder):
        metadata = client.parse_safetensors_file_metadata(name, file, revision=revision)
        facts = {
            key: {"dtype": t.dtype, "shape": t.shape, "data_offsets": t.data_offsets}
            for key, t in metadata.tensors.items()
        }
        headers[file] = parse_header(file, facts, 0)  # places are known once the file is here

    def fetch_shard(file: str) -> Path:
        return Path(
            huggingface_hub.hf_hub_download(name, file, revision=revision, **_hub_location())
        )

    def remove_from_cache(path: Path) -> None:
        content = path.resolve()
        path.unlink(missing_ok=True)  # the link
        content.unlink(missing_ok=True)

    return FetchedShards(folder, headers, fetch_shard, remove_from_cache, keep)


def _hub_location() -> dict[str, Any]:
    """Where the hub and its cache are, as the environment says now."""
    return {"endpoint": os.environ.get("HF_ENDPOINT"), "cache_dir": os.environ.get("HF_HUB_CACHE")}


Fetch = Callable[[str], Path]
"""Brings a file of a checkpoint onto this machine and returns its path."""


class FetchedShards(Shards):
    """Tensors of files that are fetched when they are first needed.

    With `keep=False` a file is removed once all its tensors are released, so that a checkpoint
    needs the room of the files in use alone.
    """

    def __init__(
        self,
        folder: Path,
        headers: Mapping[str, Mapping[str, StoredTensor]],
        fetch: Fetch,
        drop: Callable[[Path], None],
        keep: bool = True,
    ) -> None:
        """Fetch files by `fetch`; remove them by `drop` unless they are to be kept."""
        super().__init__(folder, headers)
        self._fetch, self._drop, self.keep = fetch, drop, keep
        self._here: dict[str, Path] = {}
        self._left = {file: set(header) for file, header in headers.items()}

    def path(self, file: str) -> Path:
        """The file, fetched if it is not here."""
        if file not in self._here:
            try:
                path = self._fetch(file)
            except Exception as problem:  # of the network, the hub or the disk
                if out_of_space(problem):
                    raise
                why = f"cannot fetch {file!r}: {first_line(problem)}"
                raise UnsupportedModelError(why) from problem
            header = read_shard_header(path)
            promised = {n: s[1:3] for n, s in self.tensors.items() if s.file == file}
            same = {name: stored[1:3] for name, stored in header.items()} == promised
            require(same, f"{file!r} is not the file that was promised", UnsupportedModelError)
            self.tensors |= {name: s._replace(file=file) for name, s in header.items()}
            self._here[file] = path
        return self._here[file]

    def prefetch(self, names: Iterable[str]) -> None:
        """Read ahead what is here already."""
        super().prefetch(name for name in names if self.tensors[name].file in self._here)

    def release(self, names: Iterable[str]) -> None:
        """Drop files of which every tensor was released."""
        for name in names:
            self._left[self.tensors[name].file].discard(name)
        done = [file for file in self._here if not self._left[file]]
        for file in () if self.keep else done:
            self._drop(self._here.pop(file))
