"""Tieline measures, explains and removes the routing ties of Mixture-of-Experts models.

Every job is one function here, and every result one record with `.metrics`, `.plot(name)`,
`.to_html(path)` and `.to_json(path)`:

    inspect    how near a model's tokens are to a routing tie, and what a flip costs
    diff       whether two runs route alike and, if not, why
    check      whether a file of routes is sound
    audit      what low precision and noise do to a model's routing
    smooth     make routing continuous at ties, and measure what that repairs
    reroute    another router, fitted to the model's own choices
    upcycle    turn a dense model into a Mixture of Experts that computes the same function
    replay     let a model take recorded experts
    capture    record what the routers of a model choose while it runs
    register_family    describe a router that Tieline does not know
    load       read a saved trace, summary or result

Names are imported when they are first used, so `import tieline` loads neither torch nor
transformers.
"""

from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from tieline._version import __version__
from tieline.core.errors import TielineError
from tieline.core.plugins import when_imported

if TYPE_CHECKING:
    from tieline.analysis.audit import audit
    from tieline.analysis.check import check
    from tieline.analysis.diff import diff
    from tieline.analysis.inspect import inspect
    from tieline.analysis.monitor import RoutingMonitor
    from tieline.analysis.recompute import recompute_check
    from tieline.analysis.rollout import RolloutMismatch
    from tieline.analysis.route_files import load
    from tieline.analysis.smooth import smooth
    from tieline.analysis.trainer_callbacks import monitor_trainer
    from tieline.core.ranking import gap, stable_topk
    from tieline.lab.on_model.reroute import reroute
    from tieline.lab.on_model.upcycle import upcycle
    from tieline.models.capture import capture
    from tieline.models.families import RouterFamily, register_family
    from tieline.models.model import Model
    from tieline.models.replay import replay
    from tieline.routing import (
        CosineRouter,
        Experts,
        Groups,
        Hard,
        LinearRouter,
        MoE,
        ProjectedTopK,
        QuadraticRouter,
        ReLUGate,
        Sigmoid,
        SmoothTopK,
        Softmax,
        TopK,
        auxiliary_loss,
        collect_routing,
        moe,
    )
    from tieline.run.corpus import Corpus

__all__ = [
    "Corpus",
    "CosineRouter",
    "Experts",
    "Groups",
    "Hard",
    "LinearRouter",
    "MoE",
    "Model",
    "ProjectedTopK",
    "QuadraticRouter",
    "ReLUGate",
    "RolloutMismatch",
    "RouterFamily",
    "RoutingMonitor",
    "Sigmoid",
    "SmoothTopK",
    "Softmax",
    "TielineError",
    "TopK",
    "__version__",
    "audit",
    "auxiliary_loss",
    "capture",
    "check",
    "collect_routing",
    "diff",
    "gap",
    "inspect",
    "load",
    "moe",
    "monitor_trainer",
    "recompute_check",
    "register_family",
    "replay",
    "reroute",
    "smooth",
    "stable_topk",
    "upcycle",
]

HOMES = {
    "Corpus": "tieline.run.corpus",
    "Model": "tieline.models.model",
    "RolloutMismatch": "tieline.analysis.rollout",
    "RoutingMonitor": "tieline.analysis.monitor",
    "monitor_trainer": "tieline.analysis.trainer_callbacks",
    "recompute_check": "tieline.analysis.recompute",
    "load": "tieline.analysis.route_files",
    **{
        name: f"tieline.analysis.{name}" for name in ("audit", "check", "diff", "inspect", "smooth")
    },
    **{name: f"tieline.lab.on_model.{name}" for name in ("reroute", "upcycle")},
    **{name: f"tieline.models.{name}" for name in ("capture", "replay")},
    **dict.fromkeys(("RouterFamily", "register_family"), "tieline.models.families"),
    **dict.fromkeys(("gap", "stable_topk"), "tieline.core.ranking"),
}
"""The module that each public name is imported from when it is first used; else `routing`."""

ROOMS = ("analysis", "core", "engines", "lab", "measure", "models", "report", "routing")
ROOMS += ("testing", "trace")
"""Subpackages that can be used after a plain `import tieline`."""


def _register_auto_classes() -> None:
    """Let transformers' automatic classes load smoothed models, if Tieline is all there."""
    with suppress(ImportError):  # an engine's environment has the plug-in of vLLM alone
        import_module("tieline.models.saved_models").register_auto_classes()


when_imported("transformers.models.auto.modeling_auto", _register_auto_classes)


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(HOMES.get(name, "tieline.routing")), name)
        globals()[name] = value
        return value
    if name in ROOMS:
        return import_module(f"tieline.{name}")
    raise AttributeError(f"module 'tieline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *ROOMS})
