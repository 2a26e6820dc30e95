"""What is kept of a streamed inspection under way, so that a killed one goes on where it was.

    streams/<digest>/router-00003/    trace, measures and jumps of one router, written once
    streams/<digest>/last/            what the passes need to go on after the last finished layer

The digest is that of everything the numbers depend on: the files of the model, the text, batches,
settings, threads and versions. Every folder is whole or absent. A run that ends removes its own.
"""

import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tieline.analysis.inspection import LayerJumps
from tieline.core.errors import NoSpaceError
from tieline.core.files import cache_folder, space_on, whole_folder
from tieline.core.records import canonical, from_plain, parse_json, to_plain
from tieline.measure.measures import LayerMeasures, MeasuredLayer
from tieline.models.shards import Shards
from tieline.models.stream_resume import Journal, Replay
from tieline.models.stream_weights import Weights
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.store import load_trace, save_trace

GAPS = "gaps"


class RunState:
    """The state of one run on disk."""

    def __init__(self, facts: dict[str, Any], shards: Shards, resume: bool) -> None:
        """Keep the run that these facts tell apart from all others.

        Args:
            facts: all that its numbers depend on, as JSON values.
            shards: the files of its model.
            resume: whether to go on with what is there; else that is removed.
        """
        stamps = [[name, *map(str, stored)] for name, stored in sorted(shards.tensors.items())]
        files = sorted({stored.file for stored in shards.tensors.values()})
        times = [
            str((shards.folder / f).stat().st_mtime_ns)
            for f in files
            if (shards.folder / f).is_file()
        ]
        words = canonical({"facts": facts, "files": stamps, "times": times})
        digest = hashlib.sha256(words.encode()).hexdigest()[:24]
        self.folder = cache_folder("streams") / digest
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
        last = self.folder / "last"
        return Replay(last, weights) if last.is_dir() else None

    def keep_pass(self, journal: Journal, left: list[str]) -> None:
        """Write where the passes stand, in the place of where they stood before."""
        with self._room(), whole_folder(self.folder / "last", replace=True) as half:
            journal.save(half, left)

    def _place(self, number: int) -> Path:
        return self.folder / f"router-{number:05d}"

    def keep_router(
        self,
        number: int,
        place: int,
        trace: RoutingTrace,
        measured: MeasuredLayer,
        jumps: LayerJumps | None,
    ) -> None:
        """Write what was found of one router, and its place among those that have run."""
        layer = replace(trace.layers[0], inputs=None)
        tensors = {f"noise|{name}": values for name, values in measured.noise.items()}
        tensors |= {f"precision|{name}": values for name, values in measured.precision.items()}
        if measured.gaps is not None:
            tensors[GAPS] = measured.gaps
        found = {
            "place": place,
            "record": to_plain(measured.record, nonfinite_as_text=True),
            "jumps": None if jumps is None else to_plain(jumps, nonfinite_as_text=True),
        }
        with self._room(), whole_folder(self._place(number), replace=True) as half:
            save_trace(replace(trace, layers=(layer,)), half / "trace")
            save_file({n: t.clone().contiguous() for n, t in tensors.items()}, half / "measured")
            (half / "found.json").write_text(canonical(found))

    def router(self, number: int) -> tuple[int, LayerTrace, MeasuredLayer, LayerJumps | None]:
        """Read what was found of one router, its place first."""
        place = self._place(number)
        layer = load_trace(place / "trace").layers[0]
        values: Any = parse_json((place / "found.json").read_bytes(), str(place))
        tensors = load_file(place / "measured")
        parts: dict[str, dict[str, Any]] = {"noise": {}, "precision": {}}
        for name, tensor in tensors.items():
            kind, _, level = name.partition("|")
            if level:
                parts[kind][level] = tensor
        record = from_plain(LayerMeasures, values["record"])
        measured = MeasuredLayer(record, tensors.get(GAPS), **parts)
        jumps = None if values["jumps"] is None else from_plain(LayerJumps, values["jumps"])
        return values["place"], layer, measured, jumps
