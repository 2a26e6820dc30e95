"""Finding the routers of a model, by class."""

from collections.abc import Collection
from importlib.metadata import version

from torch import nn

from tieline.errors import UnsupportedModelError, require
from tieline.hf.families import family_of

__all__ = ["chosen_routers", "find_routers"]


def find_routers(model: nn.Module) -> dict[str, nn.Module]:
    """The routers of a model by qualified name, in order of depth; refuses a model without any."""
    found = {name: m for name, m in model.named_modules() if family_of(m) is not None}
    if found:
        return found
    kind = type(model).__name__
    if any("expert" in name.lower() for name, _ in model.named_modules()):
        raise UnsupportedModelError(
            f"{kind} has experts but no router of a known family under transformers "
            f"{version('transformers')}: describe its router with `register_family`"
        )
    raise UnsupportedModelError(f"{kind} is not a Mixture-of-Experts model: it has no router")


def chosen_routers(model: nn.Module, layers: Collection[str] | None) -> dict[str, nn.Module]:
    """The routers named in `layers`, all for None; refuses those that cannot be captured."""
    routers = find_routers(model)
    if layers is None:
        layers = routers
    unknown = sorted(set(layers) - set(routers))
    require(not unknown, f"no routers named {unknown}; the model has {list(routers)}")
    require(bool(layers), "layers must name at least one router, got none")
    chosen = {name: router for name, router in routers.items() if name in layers}
    for name, router in chosen.items():
        _refuse(name, router)
    return chosen


def _refuse(name: str, router: nn.Module) -> None:
    family = family_of(router)
    require(
        not hasattr(router, "tieline_handler"),
        f"layer {name!r} is smoothed: its experts are no top-k of its scores; call `unsmooth_` "
        "before its ties are captured",
        UnsupportedModelError,
    )
    if family is not None and family.refused is not None:
        raise UnsupportedModelError(
            f"layer {name!r}: {type(router).__name__} of family {family.name!r} (transformers "
            f"{version('transformers')}) cannot be captured: {family.refused}"
        )
