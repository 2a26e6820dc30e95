"""Recording what the routers of a transformers model choose, while it runs as it always does.

    with capture(model) as recorder:
        model(**batch)
    trace = recorder.trace()

Each router's class is replaced by a subclass of itself while the capture lasts, so parameters,
state-dict keys, hooks, `output_router_logits` and the outputs stay what they are; leaving the
block, also by an exception, restores the classes.
"""

import inspect
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import nn

from tieline._version import __version__
from tieline.errors import TielineError, require
from tieline.hf.batches import DocumentCounter
from tieline.hf.discovery import chosen_routers
from tieline.hf.families import family_of
from tieline.hf.layers import LayerObserver, Settings
from tieline.hf.recorder import Recorder, Sink
from tieline.recompute import is_recomputing
from tieline.trace.record import check_epsilons

__all__ = ["DEFAULT_EPSILONS", "capture"]

DEFAULT_EPSILONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Grid of ε, in units of the selection score, at which K(ε) is counted."""

_CAPTURED = "_tieline_captured"


@contextmanager
def capture(
    model: nn.Module,
    *,
    keep: Literal["scores", "inputs"] = "scores",
    ranks: int | Literal["all"] = 4,
    epsilons: tuple[float, ...] = DEFAULT_EPSILONS,
    layers: Collection[str] | None = None,
    distances: bool = True,
    sink: Sink | None = None,
) -> Iterator[Recorder]:
    """Record, per MoE layer and token, the selection scores, combine weights and chosen experts.

    Every forward pass of `model` inside the block is recorded: in evaluation and training, under
    `generate`, with `output_router_logits` or without. A forward pass that activation checkpointing
    repeats is not counted again. The first pass proves for each layer that the captured scores
    explain the router's choice; later ones are checked as well.

    Args:
        model: a model of transformers whose forward takes `input_ids` or `inputs_embeds`.
        keep: "inputs" also keeps the router inputs (T, D) of each layer.
        ranks: number m of ranks kept beyond the k chosen ones, or "all".
        epsilons: grid at which K(ε), the number of experts within ε of the threshold, is counted.
        layers: names of the router modules to record (`find_routers`); all by default.
        distances: compute the exact Euclidean distance to the nearest tie for affine routers.
        sink: takes the layers of each pass, which are then forgotten: a streaming summary.
    """
    _check_arguments(keep, ranks, epsilons)
    settings = Settings(None if ranks == "all" else ranks, epsilons, keep == "inputs", distances)
    routers = chosen_routers(model, layers)
    observers = [_observer(name, router, settings) for name, router in routers.items()]
    recorder = Recorder(_counter(model), epsilons, _provenance(model), sink)
    with ExitStack() as stack:
        for observer, router in zip(observers, routers.values(), strict=True):
            stack.callback(setattr, router, "__class__", type(router))
            router.__class__ = _observed_class(type(router), observer, recorder)
        for handle in _watch_forward(model, recorder):
            stack.callback(handle.remove)
        yield recorder


def _observer(name: str, router: nn.Module, settings: Settings) -> LayerObserver:
    family = family_of(router)
    assert family is not None
    require(
        not (settings.inputs and family.layout == "method"),
        f"the inputs of the routers of family {family.name!r} cannot be kept: {family.note}",
    )
    require(
        not hasattr(type(router), _CAPTURED),
        f"layer {name!r} is being captured already: leave that block first",
        TielineError,
    )
    return LayerObserver(name, family, settings)


def _observed_class(
    cls: type[nn.Module], observer: LayerObserver, recorder: Recorder
) -> type[nn.Module]:
    """A subclass of the router's class, of the same name, that shows each call to the recorder."""
    plain = getattr(cls, observer.family.method)

    def observed(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, *args, **kwargs)
        if not is_recomputing():
            # an emulated number format is the model's, not that of the record's own arithmetic
            with torch._C.DisableTorchFunction():
                recorder.observe(observer, self, (args, kwargs), output)
        return output

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, _CAPTURED: True}
    return type(cls.__name__, (cls,), {observer.family.method: observed, **names})


def _watch_forward(
    model: nn.Module, recorder: Recorder
) -> Iterator[torch.utils.hooks.RemovableHandle]:
    """Tell the recorder where forward passes of the model begin and end."""
    names = list(inspect.signature(model.forward).parameters)

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_recomputing():
            recorder.begin(dict(zip(names, args, strict=False)) | kwargs)

    def finish(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not is_recomputing():
            recorder.finish()

    yield model.register_forward_pre_hook(begin, with_kwargs=True)
    yield model.register_forward_hook(finish)


def _counter(model: nn.Module) -> DocumentCounter:
    """Document counter that knows the padding which `generate` feeds to rows that have ended."""
    config = getattr(model, "generation_config", None)
    ends = getattr(config, "eos_token_id", None)
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    padding = getattr(config, "pad_token_id", None)
    return DocumentCounter((ends or [None])[0] if padding is None else padding, frozenset(ends))


def _provenance(model: nn.Module) -> dict[str, object]:
    config = getattr(model, "config", None)
    return {
        "model": getattr(config, "_name_or_path", None) or type(model).__name__,
        "architecture": type(model).__name__,
        "model_type": getattr(config, "model_type", None),
        "revision": getattr(config, "_commit_hash", None),
        "dtype": str(getattr(model, "dtype", None)).removeprefix("torch."),
        "experts_implementation": getattr(config, "_experts_implementation", None),
        "training": model.training,
        "tieline": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }


def _check_arguments(keep: str, ranks: int | str, epsilons: tuple[float, ...]) -> None:
    require(keep in ("scores", "inputs"), f"keep must be 'scores' or 'inputs', got {keep!r}")
    enough = ranks == "all" or (isinstance(ranks, int) and ranks >= 1)
    require(enough, f"ranks must be at least 1 (gaps need rank k + 1) or 'all', got {ranks!r}")
    check_epsilons(epsilons)
