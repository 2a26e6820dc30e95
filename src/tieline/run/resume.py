"""What is kept of a run from disk, so that a killed one goes on where it was.

    streams/<digest>/<unit>-<observer>/    what an observer found in a unit, written once
    streams/<digest>/last/                 what the passes need to go on after the last layer

The digest is that of everything the numbers depend on: the files of the model, the text, batches,
settings, threads and versions. Every folder is whole or absent. A run that ends removes its own.

A parked pass cannot be saved. Kept are what each unit before the layers returned, what the last
layer returned, and which arguments of the next unit are not those of the first layer (`Journal`).
To go on, the passes run from the beginning: units that were left return what was kept, without
weights, and the next unit is given the kept arguments (`Replay`). In between nothing is computed
but masks and tables.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tieline.core.errors import NoSpaceError
from tieline.core.files import cache_folder, naming_full_disk, whole_folder
from tieline.core.records import LONGEST_RESULT, canonical_json, parse_json
from tieline.models.class_changes import make_subclass, swapped_class
from tieline.models.shards import Shards
from tieline.models.stream_weights import Weights
from tieline.run.observers import Observer
from tieline.run.streamed_passes import current_pass

TENSORS, INDEX = "state.safetensors", "state.json"


class Journal:
    """Keeps what units return and are given, by pass.

    Attributes:
        weights: of the model.
        usable: whether all of it can be saved: tensors, and tuples of tensors and nothing.
    """

    def __init__(self, weights: Weights) -> None:
        """Keep a run over these weights."""
        self.weights, self.usable = weights, True
        self._outputs: dict[str, dict[int, Any]] = {}
        self._first: dict[int, list[Any]] = {}
        self._changed: dict[int, dict[int, Tensor]] = {}
        self.next = ""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Look at all units inside the block."""
        with ExitStack() as stack:
            for name, module in self.weights.units.items():
                take, keep = self._argument_hook(name), self._output_hook(name)
                # before the pass parks here
                handle = module.register_forward_pre_hook(take, prepend=True, with_kwargs=True)
                stack.callback(handle.remove)
                stack.callback(module.register_forward_hook(keep).remove)
            yield

    def _argument_hook(self, unit: str) -> Any:
        """Hook that notes the tensors a pass gives to a unit."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            parked = current_pass()
            if parked is None:
                return
            leaves, _ = tree_flatten((args, kwargs))
            first = self._first.get(parked.number)
            if first is None and unit in self.weights.layers:
                self._first[parked.number] = first = leaves
            first_leaves = first if first is not None and len(first) == len(leaves) else None
            self._changed[parked.number] = {
                index: leaf
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, Tensor) and not (first_leaves and first_leaves[index] is leaf)
            }
            self.next = unit

        return hook

    def _output_hook(self, unit: str) -> Any:
        """Hook that keeps what a pass got from a unit."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            parked = current_pass()
            if parked is None:
                return
            if unit in self.weights.layers:  # the last one stands for all
                for other in [n for n in self._outputs if n in self.weights.layers and n != unit]:
                    del self._outputs[other]
            self._outputs.setdefault(unit, {})[parked.number] = output
            self.usable &= _output_shape(output) is not None

        return hook

    def save(self, folder: Path, left: list[str]) -> None:
        """Write what is needed to go on after the units in `left`.

        Args:
            folder: where to.
            left: units that all passes have left, in order.
        """
        tensors: dict[str, Tensor] = {}
        shapes: dict[str, list[Any]] = {}
        for unit, by_pass in self._outputs.items():
            shapes[unit] = [_output_shape(by_pass[number]) for number in sorted(by_pass)]
            for number, output in by_pass.items():
                leaves_of = output if isinstance(output, tuple | list) else (output,)
                for index, part in enumerate(leaves_of):
                    if isinstance(part, Tensor):
                        tensors[f"{unit}|{number}|{index}"] = part.detach().clone().contiguous()
        for number, leaves in self._changed.items():
            for index, leaf in leaves.items():
                tensors[f"|{number}|{index}"] = leaf.detach().clone().contiguous()
        save_file(tensors, folder / TENSORS)
        (folder / INDEX).write_text(
            json.dumps({"left": left, "next": self.next, "outputs": shapes})
        )


def _output_shape(output: Any) -> Any:
    """How tensors make up an output: "tensor", or a list of 1 and 0; None for anything else."""
    if isinstance(output, Tensor):
        return "tensor"
    if type(output) in (tuple, list) and all(x is None or isinstance(x, Tensor) for x in output):
        return [int(leaf is not None) for leaf in output]
    return None


class Replay:
    """Units that were left, and what they returned.

    Attributes:
        left: their names, in order.
    """

    def __init__(self, folder: Path, weights: Weights) -> None:
        """Read what `Journal.save` wrote."""
        index = json.loads((folder / INDEX).read_text())
        self.left: list[str] = list(index["left"])
        self._next, self._shapes = str(index["next"]), index["outputs"]
        # copies lie in memory as what torch computes does: products round by that
        self._tensors = {n: tensor.clone() for n, tensor in load_file(folder / TENSORS).items()}
        self._weights = weights

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside the block, units that were left return what they did, and need no weights."""
        last = [name for name in self.left if name in self._weights.layers][-1:]
        with ExitStack() as stack:
            for name in self.left:
                source = last[0] if name in self._weights.layers else name
                module = self._weights.units[name]
                replaying = make_subclass(type(module), forward=self._kept_forward(source))
                stack.enter_context(swapped_class(module, replaying))
                stack.enter_context(self._stand_ins(name))
            unit, give = self._weights.units[self._next], self._argument_hook(set())
            handle = unit.register_forward_pre_hook(give, prepend=True, with_kwargs=True)
            stack.callback(handle.remove)
            yield

    @contextmanager
    def _stand_ins(self, unit: str) -> Iterator[None]:
        """Weights that take no memory, for forwards that look at their device."""
        names = [n for n in self._weights.meta if self._weights.unit_of(n) == unit]
        for name in names:
            meta = self._weights.meta[name]
            stand_in = torch.zeros((), dtype=meta.dtype, device="cpu").expand(meta.shape)
            self._weights.put(name, stand_in)
        try:
            yield
        finally:
            for name in names:
                self._weights.put(name, self._weights.meta[name])

    def _kept_forward(self, unit: str) -> Any:
        """Forward of a unit that returns what an earlier run kept of it."""

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            parked = current_pass()
            assert parked is not None
            shape = self._shapes[unit][parked.number]
            if shape == "tensor":
                return self._tensors[f"{unit}|{parked.number}|0"]
            return tuple(
                self._tensors[f"{unit}|{parked.number}|{index}"] if is_tensor else None
                for index, is_tensor in enumerate(shape)
            )

        return forward

    def _argument_hook(self, finished: set[int]) -> Any:
        """Hook that replaces the arguments of the first unit that is run by kept ones."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            parked = current_pass()
            if parked is None or parked.number in finished:
                return None
            finished.add(parked.number)
            leaves, spec = tree_flatten((args, kwargs))
            for key, tensor in self._tensors.items():
                unit, number, index = key.split("|")
                if not unit and int(number) == parked.number:
                    leaves[int(index)] = tensor
            return tree_unflatten(leaves, spec)

        return hook


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
        text = canonical_json({"facts": facts, "files": stamps, "times": times})
        digest = hashlib.sha256(text.encode()).hexdigest()[:24]
        self.folder = cache_folder("streams") / digest
        self._observers = observers
        self.journal: Journal | None = None
        if not resume:
            self.clear()
        with self._room():
            self.folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def _room(self) -> Iterator[None]:
        """Say what to do if the disk is full: what was kept before stays whole."""
        try:
            with naming_full_disk(self.folder):
                yield
        except NoSpaceError as problem:
            raise NoSpaceError(
                f"no space left on the disk of {self.folder}, where finished layers are kept: make "
                "room there and go on with --resume"
            ) from problem

    def clear(self) -> None:
        """Remove all that is kept.

        Where the passes stand is renamed first: a process that ends in here leaves nothing to go
        on from, and not a half of it.
        """
        discarded = self.folder / ".last"
        shutil.rmtree(discarded, ignore_errors=True)
        with suppress(FileNotFoundError):
            (self.folder / "last").rename(discarded)
        shutil.rmtree(self.folder, ignore_errors=True)

    def replay(self, weights: Weights) -> Replay | None:
        """What an earlier run has left behind, None if nothing; begins a journal of this one."""
        self.journal = Journal(weights)
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

    def keep(self, unit: str, left: list[str]) -> None:
        """Keep what was found in a unit, and where the passes stand after a layer.

        Args:
            unit: its name.
            left: units that all passes have left, this one last.
        """
        for number, observer in enumerate(self._observers):
            state = observer.state(unit)
            if state is None:
                continue
            tensors = {name: t.clone().contiguous() for name, t in state["tensors"].items()}
            folder = self._state_folder(unit, number)
            with self._room(), whole_folder(folder, replace=True) as half:
                save_file(tensors, half / "tensors")
                (half / "values.json").write_text(canonical_json(state["values"]))
        journal = self.journal
        if journal is not None and journal.usable and unit in journal.weights.layers:
            with self._room(), whole_folder(self.folder / "last", replace=True) as half:
                journal.save(half, left)

    def _state_folder(self, unit: str, number: int) -> Path:
        """Folder of what one observer kept of a unit."""
        return self.folder / f"{unit or 'model'}-{number}"
