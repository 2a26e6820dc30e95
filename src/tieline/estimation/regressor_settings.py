"""What the settings of `MoERegressor` may be, told in scikit-learn's words."""

import math
from numbers import Integral, Real
from typing import Any

from tieline.estimation.expert_functions import EXPERTS, RIDGES
from tieline.estimation.gates import GATES, LINKS

__all__ = ["check_settings"]

CHOICES = {
    "gating": GATES,
    "link": LINKS,
    "expert": EXPERTS,
    "activation": tuple(RIDGES),
    "selection": ("cv", "dendrogram"),
}
COUNTS = ("power", "n_init", "max_iter", "max_experts")


def check_settings(estimator: Any) -> None:
    """Refuse a setting with its value and its rule."""
    for name, allowed in CHOICES.items():
        value = getattr(estimator, name)
        words = ", ".join(repr(word) for word in allowed)
        _need(isinstance(value, str) and value in allowed, estimator, name, f"among {{{words}}}")
    for name in COUNTS:
        _need(_is_count(getattr(estimator, name)), estimator, name, "an int >= 1")
    count = estimator.n_experts
    _need(_is_count(count) or count == "auto", estimator, "n_experts", "an int >= 1 or 'auto'")
    _need(_is_real(estimator.tol), estimator, "tol", "a finite number >= 0")
    ridge = estimator.ridge
    fine = ridge == "auto" if isinstance(ridge, str) else _is_real(ridge)
    _need(fine, estimator, "ridge", "a finite number >= 0 or 'auto'")
    tau = estimator.tau
    pair = isinstance(tau, tuple | list) and len(tau) == 2 and all(_is_real(t) for t in tau)
    _need(pair, estimator, "tau", "two finite numbers >= 0")


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_real(value: Any) -> bool:
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and 0 <= float(value) < math.inf


def _need(fine: bool, estimator: Any, name: str, rule: str) -> None:
    if not fine:
        raise ValueError(
            f"The {name!r} parameter of {type(estimator).__name__} must be {rule}. "
            f"Got {getattr(estimator, name)!r} instead."
        )
