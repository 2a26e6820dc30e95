"""Models spread over the processes of torchrun, by transformers' own `DistributedConfig`.

    data    every process holds the whole model and runs its share of the text
    tp      tensor parallel: matrices are cut over the processes, all see all tokens
    ep      expert parallel: each process holds some of the experts, tokens travel to them
    pp      pipeline: each process holds consecutive layers
    fsdp    parameters are cut over the processes and gathered layer by layer; text as in `data`

What a family has no plan for, and sizes that cannot be cut, are refused on the skeleton of the
model, before any weight is read. `ep` takes plans that send tokens to their experts
("ep_dispatch_experts"): the other kind ("ep_router") renumbers the choice of the router on every
process, so that no process would see the experts that were chosen.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers.distributed.configuration_utils import DistributedConfig

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.setting_fields import SettingError, require_setting
from tieline.core.untrusted_input import EXPERTS
from tieline.models.families import family_of, find_routers

Parallel = Literal["data", "tp", "ep", "pp", "fsdp"]
"""A way to spread the work over processes."""

PARALLEL: tuple[str, ...] = get_args(Parallel)

SHARES_TEXT = ("data", "fsdp")
"""Ways in which every process runs another part of the text."""


class SpreadError(SettingError, UnsupportedModelError):
    """A model that cannot be spread over processes as the settings ask."""


def check_parallel(parallel: str | None) -> int:
    """Return the number of processes; refuses an unknown way, and one without processes.

    Args:
        parallel: a name in `PARALLEL`, or None for one process, whatever others do.
    """
    if parallel is None:
        return 1
    require_setting(
        parallel in PARALLEL,
        "{parallel} must be one of {names}, got {way!r}",
        names=", ".join(PARALLEL),
        way=parallel,
    )
    require_setting(
        dist.is_initialized(),
        "{parallel} {way!r} needs several processes: start with torchrun --nproc-per-node N "
        "-m tieline ..., or call join_processes()",
        way=parallel,
    )
    return dist.get_world_size()


UNROUNDED = {
    "tp": "matrices are cut inside the rows that share a scale, and sums are rounded in parts",
    "pp": "every process has some of the layers alone",
    "fsdp": "weights are gathered from a store that is not rounded",
}
"""Why low precision cannot be emulated in a model that is spread in this way."""


def check_rounding(parallel: str | None, what: str) -> None:
    """Refuse work that emulates low precision where the numbers to round are cut.

    Args:
        parallel: a name in `PARALLEL` or None.
        what: the work, such as "an audit".
    """
    check_parallel(parallel)
    why = UNROUNDED.get(str(parallel))
    sentence = "{parallel} {way!r}: {what} emulates low precision, and {why}: take data or ep"
    require_setting(why is None, sentence, way=parallel, what=what, why=why)


def distributed_config(parallel: str | None, skeleton: nn.Module) -> DistributedConfig | None:
    """Return how transformers shall spread a model; None for a whole model on every process.

    Args:
        parallel: a name in `PARALLEL` or None.
        skeleton: the model without weights, refused if it cannot be spread so.
    """
    ranks = check_parallel(parallel)
    if parallel in (None, "data") or ranks == 1:
        return None
    _CHECKS[str(parallel)](_Skeleton.from_model(skeleton), ranks)
    sizes: dict[str, Mapping[str, Any]] = {
        "tp": {"tp_size": ranks},
        "ep": {"tp_size": ranks, "ep_size": ranks, "tp_plan": {}},
        "pp": {"pp_size": ranks},
        "fsdp": {"fsdp_size": ranks},
    }
    return DistributedConfig(**sizes[str(parallel)])


class _Skeleton(NamedTuple):
    """A model without weights, its configuration of the text, and the name of its family."""

    model: Any
    config: Any
    family: str

    @classmethod
    def from_model(cls, model: Any) -> "_Skeleton":
        """The skeleton of a model on the meta device."""
        config = model.config.get_text_config()
        return cls(model, config, str(getattr(model.config, "model_type", type(model).__name__)))

    def number(self, *names: str) -> int | None:
        """The first of these fields of the configuration that is a whole number."""
        values = (getattr(self.config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), None)

    def must_have(self, plan: object, way: str) -> None:
        """Refuse a way of sharing for which transformers has no plan."""
        if not plan:
            raise SpreadError(
                "{parallel} {way!r}: transformers has no such plan for the family {family!r}",
                way=way,
                family=self.family,
            )

    def must_divide(self, size: int | None, ranks: int, what: str) -> None:
        """Refuse a number of processes that does not divide a size of the model."""
        require(
            size is None or size % ranks == 0,
            f"{size} {what} of {self.family!r} cannot be cut over {ranks} processes: take a number "
            "of processes that divides them",
            UnsupportedModelError,
        )


def _check_tp(skeleton: _Skeleton, ranks: int) -> None:
    """Refuse a model without a plan, or whose heads and experts cannot be cut."""
    plan = skeleton.model.tp_plan
    skeleton.must_have(plan, "tp")
    for part, names in (
        ("q_proj", ("num_attention_heads",)),
        ("k_proj", ("num_key_value_heads",)),
    ):
        if any(key.endswith(part) and style == "colwise" for key, style in plan.items()):
            skeleton.must_divide(skeleton.number(*names), ranks, names[0].removeprefix("num_"))
    cut = any("experts" in key and "wise" in style for key, style in plan.items())
    if cut:
        width = skeleton.number("moe_intermediate_size", "intermediate_size")
        skeleton.must_divide(width, ranks, "intermediate features of an expert")


def _check_ep(skeleton: _Skeleton, ranks: int) -> None:
    """Refuse a model without a plan that sends tokens to their experts."""
    styles = set(skeleton.model.ep_plan.values())
    skeleton.must_have(styles, "ep")
    if "ep_dispatch_experts" not in styles:
        raise SpreadError(
            "{parallel} 'ep': the plan of {family!r} renumbers the router's choice on every "
            "process ('ep_router'), so that it cannot be seen: take tp",
            family=skeleton.family,
        )
    skeleton.must_divide(skeleton.number(*EXPERTS), ranks, "experts")


def _check_pp(skeleton: _Skeleton, ranks: int) -> None:
    """Refuse a model without stages, or with a stage without a router."""
    routers = find_routers(skeleton.model)
    families = [family_of(router) for router in routers.values()]
    planned = any("layers" in key for key in skeleton.model.pp_plan or ())
    checked = all(family is not None and family.pipeline_checked for family in families)
    skeleton.must_have(planned or checked, "pp")
    base = getattr(skeleton.model, skeleton.model.base_model_prefix, None)
    layers = getattr(base, "layers", None)
    skeleton.must_have(
        isinstance(layers, nn.ModuleList) and hasattr(skeleton.model, "lm_head"), "pp"
    )
    assert isinstance(layers, nn.ModuleList)
    share = len(layers) // ranks  # layers of a stage; the last one has what remains
    depths = [next(int(x) for x in name.split(".") if x.isdigit()) for name in routers]
    stages = {min(depth // share, ranks - 1) for depth in depths} if share else set()
    require(
        len(stages) == ranks,
        f"{len(layers)} layers of {skeleton.family!r} in {ranks} stages leave one without a "
        "router: take fewer processes",
        UnsupportedModelError,
    )


_CHECKS: dict[str, Callable[[_Skeleton, int], None]] = {
    "tp": _check_tp,
    "ep": _check_ep,
    "pp": _check_pp,
    "fsdp": lambda skeleton, _: skeleton.must_have(
        getattr(skeleton.model, "fsdp_plan", None), "fsdp"
    ),
}


def class_name(model: nn.Module) -> str:
    """Return the name of a model's class as transformers has it, also where FSDP cuts the model."""
    name = type(model).__name__
    return name.removeprefix("FSDP") if isinstance(model, FSDPModule) else name


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor that is cut over processes; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def is_sharded(module: nn.Module) -> bool:
    """Return whether some of a module's parameters are cut over processes."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def local_shard(tensor: Tensor, axis: int | None = None) -> Tensor:
    """Return what this process holds of a tensor; the tensor itself if it is not cut.

    Args:
        tensor: a weight.
        axis: an axis along which numbers belong together; a tensor that is cut there is refused.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    cut = {shard.dim for shard in tensor.placements if isinstance(shard, Shard)}
    require(
        axis is None or axis % tensor.ndim not in cut,
        "weights are cut over processes along the axis that shares a scale: they cannot be rounded",
        UnsupportedModelError,
    )
    return tensor._local_tensor  # to_local would be a view, whose data can be set for itself alone


def gathering_unit(model: nn.Module, name: str) -> Any:
    """Return the innermost module around this one that FSDP gathers as a unit; None if none."""
    path = name.split(".")
    for end in range(len(path), -1, -1):
        module = model.get_submodule(".".join(path[:end]))
        if isinstance(module, FSDPModule):
            return module
    return None


@contextmanager
def gathered_weights(unit: Any) -> Iterator[None]:
    """Hold the weights of a unit whole inside the block; all processes must enter it.

    A unit that is whole already, as in its own forward pass, is left as it is.
    """
    if unit is None or not is_sharded(unit):
        yield
        return
    unit.unshard()
    try:
        yield
    finally:
        unit.reshard()
