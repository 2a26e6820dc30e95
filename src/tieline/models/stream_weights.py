"""Which weights each part of a model needs, and how they come into it and leave it again.

    model, weights = open_skeleton(load, shards)    the model with every weight on the meta device
    weights.load("model.layers.3")             reads what the unit needs
    weights.free("model.layers.3")             back to the meta device

A *unit* is loaded as one: a decoder layer (what transformers never splits over devices), else a
module with weights of its own. Parameters that stand on a container of units are *resident*: they
are read once and stay.

Tensors whose conversion is a cast, or a stack of experts with gate and up side by side, are read
straight into their place; all others go through transformers' own converters. Both give the bits
that `from_pretrained` gives. Memory of a layer is used again for the next one of the same shapes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.utils.loading_report import LoadStateDictInfo

from tieline.core.errors import UnsupportedModelError, require
from tieline.models.number_formats import CutFp8Blocks
from tieline.models.saved_models import LOADING, no_loading_bars
from tieline.models.shards import LINE, Shards, aligned_bytes
from tieline.models.weight_checks import check_finite_tensor, is_finite_tensor

REUSED = 1 << 20
"""Bytes from which memory is used again: small blocks are the allocator's business."""

CHECKED_BYTES = 64 << 20
"""Bytes of a tensor that are read at a time where it is only checked."""

RESIDENT = 64 << 20
"""Most bytes of parameters that a container of units may keep in memory for good."""

STACK = [("MergeModulelist", 0)]
SIDE_BY_SIDE = [("MergeModulelist", 0), ("Concatenate", 1)]
"""Operations of the converters that are done in place here."""

SCALE = "_scale_inv"
"""What the name of a pattern of block scales adds to that of its weights."""


class TensorSource(NamedTuple):
    """A tensor of the checkpoint on its way into the model."""

    key: str
    target: str
    pattern: str | None


class StackPart(NamedTuple):
    """What stands beside each other in the rows of a stack of experts.

    Attributes:
        keys: names of the tensors in the checkpoint, by expert.
        scales: names of their block scales; empty where they have none.
    """

    keys: list[str]
    scales: list[str]


class ExpertStack(NamedTuple):
    """A parameter (experts, rows, columns) that is made of one tensor or a few for each expert."""

    target: str
    parts: list[StackPart]


class ReadPlan(NamedTuple):
    """How the weights of one unit are read.

    Attributes:
        plain: tensors that are cast at most.
        stacks: experts that are put side by side.
        others: tensors that transformers' converters make.
    """

    plain: list[TensorSource]
    stacks: list[ExpertStack]
    others: list[TensorSource]

    @property
    def keys(self) -> list[str]:
        """Names of all tensors in the checkpoint."""
        stacked = [k for s in self.stacks for part in s.parts for k in (*part.keys, *part.scales)]
        return [s.key for s in (*self.plain, *self.others)] + stacked

    @property
    def targets(self) -> list[str]:
        """Names of the first parameters that each tensor goes into."""
        names = [source.target for source in (*self.plain, *self.others)]
        return [*dict.fromkeys(names), *(stack.target for stack in self.stacks)]


def find_units(model: PreTrainedModel) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Units by name, in the order of the model, and containers whose own parameters stay."""
    unsplit = set(model._no_split_modules or ())
    units: dict[str, nn.Module] = {}
    containers: dict[str, nn.Module] = {}

    def walk(name: str, module: nn.Module) -> None:
        """Sort a module into units and containers, from the outside in."""
        size = sum(t.numel() * t.element_size() for t in own_tensors(module).values())
        children = dict(module.named_children())
        if type(module).__name__ in unsplit or (size and not children) or size > RESIDENT:
            units[name] = module
            return
        if size:
            containers[name] = module
        for child, inner in children.items():
            walk(f"{name}.{child}".lstrip("."), inner)

    walk("", model)
    return units, containers


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers of a module itself."""
    passing = module._non_persistent_buffers_set
    buffers = {n: b for n, b in module._buffers.items() if b is not None and n not in passing}
    return {n: p for n, p in module._parameters.items() if p is not None} | buffers


class Weights:
    """Where the weights of each unit are, and how they come into the model.

    Attributes:
        model: the model, its weights on the meta device.
        shards: the files.
        units: modules that are loaded as one, by name.
        layers: names of those that are decoder layers.
        meta: every saved tensor of the model, on the meta device.
        unused: names that the model has no parameter for.
        plans: how the weights of each unit are read.
    """

    def __init__(self, model: PreTrainedModel, shards: Shards, config: Any) -> None:
        """Map the tensors of `shards` onto the model by transformers' own rules in `config`."""
        self.model, self.shards, self._config = model, shards, config
        self.meta: dict[str, Tensor] = dict(model.state_dict())
        self.units, self._containers = find_units(model)
        unsplit = set(model._no_split_modules or ())
        self.layers = [n for n, m in self.units.items() if type(m).__name__ in unsplit]
        mapping = config.weight_mapping or []
        for operation in [x for entry in mapping for x in getattr(entry, "operations", None) or ()]:
            if type(operation) is Fp8Dequantize:  # the converters are this load's own
                operation.__class__ = CutFp8Blocks
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._by_pattern = {p: c for c in self._converters for p in c.source_patterns}
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        mapped = [self._mapped(key, renamings) for key in shards.tensors]
        self._sources = [source for source in mapped if source.target in self.meta]
        self.unused = {source.target for source in mapped if source.target not in self.meta}
        self.stored_targets = self._stored_targets()
        self._pool: dict[int, list[Tensor]] = {}
        self._pooled: dict[str, list[Tensor]] = {}
        self._finite: set[str] = set()
        self.tied: dict[str, str] = {}
        self.plans: dict[str, ReadPlan] = {}
        self._names: dict[str, list[str]] = {}
        plan = config.dtype_plan or {}
        self._special = (*build_glob_alternation(list(plan))[:2], plan) if plan else None

    def _mapped(self, key: str, renamings: list[Any]) -> TensorSource:
        """The parameter that a tensor of the checkpoint goes into, which the model may not have."""
        prefix = self.model.base_model_prefix
        target, pattern = rename_source_key(key, renamings, self._converters, prefix, self.meta)
        if target not in self.meta and key in self.meta:
            target, pattern = rename_source_key(key, [], [], prefix, self.meta)
        return TensorSource(key, target, pattern)

    def _stored_targets(self) -> set[str]:
        """Parameters that the checkpoint has; a converter may make more than one of a tensor."""
        targets = set()
        for source in self._sources:
            targets.add(source.target)
            if source.pattern is not None:
                names = self._by_pattern[source.pattern].target_patterns
                targets.update(source.target.replace(names[0], name) for name in names)
        return targets

    def arrange(self) -> None:
        """Say how each unit is read, once ties between weights are known; resident ones are."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        self.tied = {
            t: s
            for t, s in tied.items()
            if t not in self.stored_targets and s in self.stored_targets
        }
        by_unit: dict[str, list[TensorSource]] = {name: [] for name in self.units}
        resident: list[TensorSource] = []
        for source in self._sources:
            unit = self.unit_of(source.target)
            (resident if unit is None else by_unit[unit]).append(source)
        for target, origin in self.tied.items():
            unit, home = self.unit_of(target), self.unit_of(origin)
            if unit is not None and home is not None and unit != home:
                by_unit[unit] += [s for s in by_unit[home] if s.target == origin]
        self.plans = {name: self._plan(sources) for name, sources in by_unit.items()}
        self._names = {name: [] for name in self.units}
        for name in self.meta:
            unit = self.unit_of(name)
            if unit is not None and (name in self.stored_targets or name in self.tied):
                self._names[unit].append(name)
        self._read(self._plan(resident), reuse=False)

    def unit_of(self, name: str) -> str | None:
        """The unit that a parameter belongs to; None for a resident one."""
        path = name.rpartition(".")[0]
        if path in self._containers:
            return None
        while path and path not in self.units:
            path = path.rpartition(".")[0]
        return path if path in self.units else None

    def _plan(self, sources: list[TensorSource]) -> ReadPlan:
        """How these tensors are read: in place, stacked, or by converters."""
        plan, stacked = ReadPlan([], [], []), {}
        for source in sources:
            if source.pattern is None and self._is_plain(source):
                plan.plain.append(source)
            elif source.pattern is not None and self._stacks(source.pattern):
                stacked.setdefault(source.target, []).append(source)
            else:
                plan.others.append(source)
        for target, group in stacked.items():
            stack = self._stack(target, group)
            plan.others.extend(group) if stack is None else plan.stacks.append(stack)
        return plan

    def _is_plain(self, source: TensorSource) -> bool:
        """Whether a tensor is only cast on its way into the model."""
        stored = self.shards.tensors[source.key]
        return stored.shape == tuple(self.meta[source.target].shape) and (
            self._config.hf_quantizer is None or stored.kind in ("F64", "F32", "F16", "BF16")
        )

    def _stacks(self, pattern: str) -> bool:
        """Whether a converter only puts experts beside each other, after block scales if any."""
        operations = self._by_pattern[pattern].operations
        scaled = bool(operations) and isinstance(operations[0], Fp8Dequantize)
        rest = operations[1:] if scaled else operations
        kinds = [(type(operation).__name__, getattr(operation, "dim", None)) for operation in rest]
        quantised = self._config.hf_quantizer is not None
        return kinds in (STACK, SIDE_BY_SIDE) and (scaled or not quantised)

    def _stack(self, target: str, group: list[TensorSource]) -> ExpertStack | None:
        """The parts of a stack; None if they do not make up the parameter."""
        patterns = self._by_pattern[group[0].pattern or ""].source_patterns
        by_pattern: dict[str, list[str]] = {}
        for source in sorted(group, key=lambda s: dot_natural_key(s.key)):
            by_pattern.setdefault(source.pattern or "", []).append(source.key)
        present = [
            p for p in patterns if p in by_pattern and not p.endswith((SCALE, "activation_scale"))
        ]
        pieces = [StackPart(by_pattern[p], by_pattern.get(p + SCALE, [])) for p in present]
        shapes = [self.shards.tensors[piece.keys[0]].shape for piece in pieces]
        meta = self.meta[target]
        complete = meta.ndim == 3 and all(
            len(piece.keys) == len(meta) and len(piece.scales) in (0, len(meta)) for piece in pieces
        )
        rows = sum(shape[0] for shape in shapes)
        fits = complete and rows == meta.shape[1] and all(s[1:] == meta.shape[2:] for s in shapes)
        return ExpertStack(target, pieces) if fits else None

    def wrong_shapes(self) -> set[tuple[str, torch.Size, torch.Size]]:
        """Tensors without a converter that have another shape than the model's."""
        if self._config.hf_quantizer is not None:
            return set()
        return {
            (s.target, torch.Size(shape), self.meta[s.target].shape)
            for s in self._sources
            if s.pattern is None
            and (shape := self.shards.tensors[s.key].shape) != tuple(self.meta[s.target].shape)
        }

    def size(self, unit: str) -> int:
        """Bytes of a unit in memory."""
        return sum(self.meta[n].numel() * self.dtype(n).itemsize for n in self._names[unit])

    def stored(self, unit: str) -> int:
        """Bytes of a unit on disk."""
        return sum(self.shards.tensors[key].size for key in self.plans[unit].keys)

    def dtype(self, target: str) -> torch.dtype:
        """Precision that a parameter is loaded in."""
        if self._special is not None:
            pattern, by_group, plan = self._special
            match = pattern.search(target)
            if match is not None:
                return plan[by_group[match.lastgroup]]
        return self.meta[target].dtype

    def load(self, unit: str, without: frozenset[str] = frozenset()) -> None:
        """Read the weights of a unit.

        Args:
            unit: its name.
            without: parameters that are left out.
        """
        plan = self.plans[unit]
        kept = plan._replace(stacks=[s for s in plan.stacks if s.target not in without])
        self._read(kept, reuse=unit in self.layers, unit=unit)
        self._pool.clear()  # what this unit had no use for

    def _read(self, plan: ReadPlan, reuse: bool, unit: str | None = None) -> None:
        """Read what a plan says; `unit` is where tied weights go."""
        for source in plan.plain:
            into = self._room(source.target, reuse, source.key)
            self.shards.copy(source.key, into)
            self._check(source.target, into)
            self._put_read(source.target, into, unit)
        for stack in plan.stacks:
            into = self._room(stack.target, reuse)
            self.fill(stack, into, 0)
            self._put_read(stack.target, into, unit)
        if plan.others:
            self._convert(plan.others)
            for source in plan.others:
                target = source.target
                self._check(target, self.tensor_named(target))
                # transformers leaves what a quantised file has beside its blocks as it is stored
                self._put_read(target, self.tensor_named(target).to(self.dtype(target)), unit)

    def fill(self, stack: ExpertStack, into: Tensor, first: int) -> None:
        """Read the experts from `first` on into a tensor (some experts, rows, columns)."""
        for index in range(len(into)):
            start = 0
            expert = f"{stack.target}[{first + index}]"
            for part in stack.parts:
                rows = self.shards.tensors[part.keys[first + index]].shape[0]
                row = into[index, start : start + rows]
                self._fill_part(part, first + index, row)
                start += rows
            self._check(expert, into[index])

    def _check(self, name: str, tensor: Tensor) -> None:
        """Refuse NaN and infinity in a tensor, the first time that it is read."""
        if name not in self._finite:
            check_finite_tensor(name, tensor)
            self._finite.add(name)

    def check_unloaded(self, unit: str) -> None:
        """Refuse NaN and infinity in a unit that a run does not load, a block of rows at a time."""
        for key, target in [(s.key, s.target) for s in self.plans[unit].plain]:
            rows = self.shards.tensors[key].shape[0]
            step = max(1, rows * CHECKED_BYTES // max(1, self.shards.tensors[key].size))
            for first in () if target in self._finite else range(0, rows, step):
                if not is_finite_tensor(self.shards.read(key, slice(first, first + step))):
                    check_finite_tensor(target, self.shards.read(key))
            self._finite.add(target)
        self.shards.release(self.plans[unit].keys)

    def _fill_part(self, part: StackPart, expert: int, into: Tensor) -> None:
        """Read one expert, unpacked by its block scales where it has some."""
        key = part.keys[expert]
        if not part.scales:
            self.shards.copy(key, into)
            return
        scales, weight = self.shards.read(part.scales[expert]), self.shards.read(key)
        unpack = CutFp8Blocks(self._config.hf_quantizer)._dequantize_one
        into.copy_(unpack(weight, scales, output_dtype=into.dtype))

    def _put_read(self, target: str, value: Tensor, unit: str | None) -> None:
        """Put a tensor where it belongs: in its own place, or where it is tied to in `unit`."""
        names = [t for t, s in self.tied.items() if s == target and self.unit_of(t) == unit]
        home = self.unit_of(target) == unit
        for name in [*([target] if home else []), *(names if unit is not None else [])]:
            self.put(name, value)
        if not home and not self.tensor_named(target).is_meta:
            self.put(target, self.meta[target])

    def _convert(self, sources: list[TensorSource]) -> None:
        """Load tensors by transformers' own converters."""
        state = {source.key: self.shards.lazy(source.key) for source in sources}
        with no_loading_bars():
            report, _ = convert_and_load_state_dict_in_model(self.model, state, self._config)
        wrong = [
            f"{n!r} has the shape {tuple(a)} instead of {tuple(b)}"
            for n, a, b in report.mismatched_keys
        ]
        wrong += [f"{name!r}: {why}" for name, why in report.conversion_errors.items()]
        require(not wrong, "; ".join(sorted(wrong)[:3]), UnsupportedModelError)

    def _room(self, target: str, reuse: bool, key: str | None = None) -> Tensor:
        """Memory for a parameter, if possible that of the layer before.

        Matrix products round by how their operands lie in memory. A tensor that is not cast lies
        in an ordinary load as it lies in its file (`key`), so it is placed like that here.
        """
        meta, dtype = self.meta[target], self.dtype(target)
        size = meta.numel() * dtype.itemsize
        stored = None if key is None else self.shards.tensors[key]
        start = stored.start if stored is not None and stored.dtype == dtype else 0
        free_rooms = self._pool.get(size + LINE, []) if reuse and size >= REUSED else []
        new_room = {"dtype": torch.uint8, "device": "cpu"}
        room = free_rooms.pop() if free_rooms else torch.empty(size + LINE, **new_room)
        if reuse and size >= REUSED:
            self._pooled.setdefault(self.unit_of(target) or "", []).append(room)
        return aligned_bytes(size, start, dtype, room).view(dtype).view(meta.shape)

    def tensor_named(self, name: str) -> Tensor:
        """The tensor that stands at a name."""
        module, leaf = self._module_and_leaf(name)
        tensor = module._parameters.get(leaf)
        tensor = module._buffers[leaf] if tensor is None else tensor
        assert tensor is not None
        return tensor

    def put(self, name: str, value: Tensor) -> None:
        """Let a tensor stand at a name."""
        module, leaf = self._module_and_leaf(name)
        if leaf in module._buffers:
            module._buffers[leaf] = value
        elif isinstance(value, nn.Parameter):
            module._parameters[leaf] = value
        else:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)

    def _module_and_leaf(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a name, and the last part of the name."""
        path, _, leaf = name.rpartition(".")
        return self.model.get_submodule(path), leaf

    def free(self, unit: str) -> None:
        """Put the weights of a unit back on the meta device; its memory is kept for the next."""
        for name in self._names[unit]:
            self.put(name, self.meta[name])
        for room in self._pooled.pop(unit, []):
            self._pool.setdefault(len(room), []).append(room)
        self.shards.release(self.plans[unit].keys)


def open_skeleton(
    load: Callable[[], PreTrainedModel], open_files: Callable[[list[str]], Shards]
) -> tuple[PreTrainedModel, Weights]:
    """The model that `load` would load, its weights on the meta device, and what it would read.

    The step of `from_pretrained` that reads weights is replaced while `load` runs; all else is
    transformers' own, as are its reports of missing tensors and wrong shapes.

    Args:
        load: calls `from_pretrained`.
        open_files: given the paths of the checkpoint's files, opens them.
    """
    kept: list[Weights] = []

    def pretend(
        model: Any,
        state_dict: Any,
        checkpoint_files: list[str] | None,
        load_config: Any,
        expected_keys: Any = None,
    ) -> tuple[LoadStateDictInfo, None]:
        """Note where the weights are in place of reading them, and report what is missing."""
        require(state_dict is None and bool(checkpoint_files), "the weights are in no files")
        weights = Weights(model, open_files(checkpoint_files or []), load_config)
        kept.append(weights)
        missing = set(weights.meta) - weights.stored_targets
        shapes: Any = weights.wrong_shapes()
        passing = {name for name, _ in model.named_non_persistent_buffers()}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name not in missing:  # marked as loaded, so that nothing is drawn in its place
                tensor._is_hf_initialized = name not in passing
        nothing: dict[str, Any] = {"conversion_errors": {}, "error_msgs": []}
        report = LoadStateDictInfo(
            missing_keys=missing,
            unexpected_keys=weights.unused,
            mismatched_keys=shapes,
            skipped_pp_keys=set(),
            **nothing,
        )
        return report, None

    with LOADING, no_loading_bars():
        original = PreTrainedModel.__dict__["_load_pretrained_model"]
        PreTrainedModel._load_pretrained_model = staticmethod(pretend)  # type: ignore[method-assign]
        try:
            model = load()
        finally:
            PreTrainedModel._load_pretrained_model = original
    weights = kept[-1]
    weights.arrange()
    return model.eval(), weights
