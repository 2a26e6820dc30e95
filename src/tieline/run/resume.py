"""What is kept of a run from disk, so that a killed one goes on where it was.

    streams/<digest>/<unit>-<observer>/    what an observer found in a unit, written once
    streams/<digest>/last/                 what the passes need to go on after the last layer

The digest is that of everything the numbers depend on: the files of the model, the text, batches,
settings, threads and versions. Every folder is whole or absent. A run that ends removes its own.
"""

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tieline.core.errors import NoSpaceError
from tieline.core.files import cache_folder, space_on, whole_folder
from tieline.core.records import LONGEST_RESULT, canonical, parse_json
from tieline.models.shards import Shards
from tieline.models.stream_resume import Journal, Replay
from tieline.models.stream_weights import Weights
from tieline.run.observers import Observer


class RunState:
    """The state of one run on disk; keeps `Observer.state` of every unit."""

    def __init__(
        self,
        facts: dict[str, Any],
        shards: Shards,
        observers: Sequence[Observer],
        resume: bool,
    ) -> None:
        """Keep the run that these facts tell apart from all others.

        Args:
            facts: all that its numbers depend on, as JSON values.
            shards: the files of its model.
            observers: what looks at the run; their states are tensors and JSON values.
            resume: whether to go on with what is there; else that is removed.
        """
        stamps = [[name, *map(str, stored)] for name, stored in sorted(shards.tensors.items())]
        files = sorted({stored.file for stored in shards.tensors.values()})
        times = [
            str((shards.folder / f).stat().st_mtime_ns)
            for f in files
            if (shards.folder / f).is_file()
        ]
        text = canonical({"facts": facts, "files": stamps, "times": times})
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        self.folder = cache_folder("streams") / digest
        self._observers = observers
        self._layers: frozenset[str] = frozenset()
        if not resume:
            self.clear()
        with self._room():
            self.folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Say what to do if the disk is full: what was kept before stays whole."""
        try:
            with space_on(self.folder):
                yield
        except NoSpaceError as problem:
            raise NoSpaceError(
                f"no space left on the disk of {self.folder}, where finished layers are kept: make "
                "room there and go on with --resume"
            ) from problem

    def clear(self) -> None:
        """Remove all that is kept."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def replay(self, weights: Weights) -> Replay | None:
        """What an earlier run has left behind; None if nothing."""
        self._layers = frozenset(weights.layers)
        last = self.folder / "last"
        return Replay(last, weights) if last.is_dir() else None

    def restore(self, units: list[str]) -> None:
        """Give observers back what they found in these units."""
        for unit in units:
            for number, observer in enumerate(self._observers):
                folder = self._state_folder(unit, number)
                if folder.is_dir():
                    values: Any = parse_json(
                        (folder / "values.json").read_bytes(), str(folder), LONGEST_RESULT
                    )
                    tensors = load_file(folder / "tensors")
                    observer.restore(unit, {"tensors": tensors, "values": values})

    def keep(self, unit: str, left: list[str], journal: Journal) -> None:
        """Keep what was found in a unit, and where the passes stand after a layer."""
        for number, observer in enumerate(self._observers):
            state = observer.state(unit)
            if state is None:
                continue
            tensors = {name: t.clone().contiguous() for name, t in state["tensors"].items()}
            folder = self._state_folder(unit, number)
            with self._room(), whole_folder(folder, replace=True) as half:
                save_file(tensors, half / "tensors")
                (half / "values.json").write_text(canonical(state["values"]))
        if journal.usable and unit in self._layers:
            with self._room(), whole_folder(self.folder / "last", replace=True) as half:
                journal.save(half, left)

    def _state_folder(self, unit: str, number: int) -> Path:
        return self.folder / f"{unit or 'model'}-{number}"
