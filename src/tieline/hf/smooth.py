"""Smooth top-k on a model of transformers, in place and undoable (paper 1, section 6).

    record = smooth_(model, budget=2.5, calibration=[ids])
    model(input_ids=ids)               # continuous in its inputs where ties were
    model.save_pretrained("smooth")    # loaded again by `tieline.hf.loading.load_model`
    record.undo()                      # or unsmooth_(model)

Nothing is retrained. Every router chooses by the ramp of `SmoothTopK` in its family's own scoring;
ε is given, or follows from a budget of experts or from the noise of a precision, layer by layer.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from jaxtyping import Int
from torch import Tensor, nn

from tieline.errors import ParameterError, require
from tieline.hf.smooth_epsilon import (
    Progress,
    budget_epsilon,
    checked_batches,
    collect_scores,
    measured_noise,
    noise_epsilon,
)
from tieline.hf.smooth_layers import LayerPlan, default_k_max, plan_layers
from tieline.hf.smooth_records import LayerSmoothing, Smoothing
from tieline.hf.smooth_state import apply_smoothing, remove_smoothing

__all__ = ["smooth_", "unsmooth_"]

DEFAULT_EXTRA = 0.5
"""Experts beyond k that a token uses on average where nothing else is asked for."""


def smooth_(
    model: nn.Module,
    epsilon: float | Sequence[float] | Mapping[str, float] | None = None,
    budget: float | None = None,
    noise: str | float | None = None,
    *,
    calibration: Iterable[Int[Tensor, "rows length"]] | None = None,
    a: float = 1.0,
    b: float = 1.0,
    k_max: int | None = None,
    layers: Collection[str] | None = None,
    detach_ramp: bool = True,
    progress: Progress | None = None,
) -> Smoothing:
    """Let the routers of `model` choose by smooth top-k; the model is left as it was on refusal.

    With none of `epsilon`, `budget` and `noise`, the budget is k + 0.5. With budget and noise, a
    layer gets the smaller of both widths: as wide as the noise asks for, as far as the budget goes.

    Args:
        model: a Mixture-of-Experts model of transformers.
        epsilon: width of the band in units of the selection scores: one number, one per router in
            order, or by router name. Where it is 0 the router keeps its original code.
        budget: mean number of experts per token, k < budget < k_max.
        noise: precision against which the ramp shall be wide, such as "bf16", "int8" or
            "router bf16"; or the standard deviation of the gap itself.
        calibration: token ids to choose ε on; not needed where `epsilon` is given.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end: 1 is a straight ramp, 50 is the paper's.
        k_max: slots per token, k < k_max <= E; by default k + max(2, k/2).
        layers: names of routers; all that can be smoothed by default.
        detach_ramp: let no gradient through the shares, as training wants it.
        progress: is told how far the work is.
    """
    require(
        0 < a < math.inf and 0 < b < math.inf, f"a and b must be positive and finite: {a=}, {b=}"
    )
    plans, refused = plan_layers(model, layers)
    slots = {plan.name: _slots(plan, k_max) for plan in plans}
    open_plans = [plan for plan in plans if plan.k < plan.n_experts]
    if epsilon is not None:
        require(budget is None and noise is None, "give epsilon, or budget and noise, not both")
        widths, how = _given(epsilon, plans), "given"
    else:
        if budget is None and noise is None:
            budget = open_plans[0].k + DEFAULT_EXTRA if open_plans else None
        widths = _chosen(model, open_plans, slots, (budget, noise), calibration, (a, b), progress)
        how = " and ".join(
            f"{word} {value}"
            for word, value in (("budget", budget), ("noise", noise))
            if value is not None
        )
    records = tuple(
        LayerSmoothing(
            plan.name,
            plan.family.name,
            plan.k,
            plan.n_experts,
            slots[plan.name],
            float(widths.get(plan.name, 0.0)),
            plan.units,
        )
        for plan in plans
    )
    return apply_smoothing(model, Smoothing(records, dict(refused), a, b, how, detach_ramp))


def unsmooth_(model: nn.Module) -> None:
    """Undo `smooth_`: routers, experts and saving are what they were before."""
    remove_smoothing(model)


def _slots(plan: LayerPlan, k_max: int | None) -> int:
    if k_max is None or plan.k == plan.n_experts:
        return default_k_max(plan.k, plan.n_experts)
    require(
        plan.k < k_max <= plan.n_experts,
        f"k_max must be above k and at most the number of experts, got {k_max} for k={plan.k} of "
        f"{plan.n_experts} in layer {plan.name!r}",
    )
    return k_max


def _given(
    epsilon: float | Sequence[float] | Mapping[str, float], plans: Sequence[LayerPlan]
) -> dict[str, float]:
    names = [plan.name for plan in plans]
    if isinstance(epsilon, Mapping):
        unknown = sorted(set(epsilon) - set(names))
        require(not unknown, f"epsilon names {unknown}; routers that can be smoothed: {names}")
        widths = {name: epsilon.get(name, 0.0) for name in names}
    elif isinstance(epsilon, Sequence):
        require(
            len(epsilon) == len(names), f"{len(epsilon)} epsilons for {len(names)} routers: {names}"
        )
        widths = dict(zip(names, epsilon, strict=True))
    else:
        widths = dict.fromkeys(names, epsilon)
    for name, width in widths.items():
        number = isinstance(width, float | int) and not isinstance(width, bool)
        if not (number and 0 <= width < math.inf):
            raise ParameterError(
                f"epsilon must be finite and not negative, got {width!r} for layer {name!r}"
            )
    return {name: float(width) for name, width in widths.items()}


def _chosen(
    model: nn.Module,
    plans: Sequence[LayerPlan],
    slots: Mapping[str, int],
    wanted: tuple[float | None, str | float | None],
    calibration: Iterable[Tensor] | None,
    ramp: tuple[float, float],
    progress: Progress | None,
) -> dict[str, float]:
    """ε of every router from data."""
    budget, noise = wanted
    for plan in plans if budget is not None else ():
        require(
            plan.k < (budget or 0) < slots[plan.name],
            f"the budget is a mean number of experts between k and k_max, got {budget:g} for "
            f"k={plan.k}, k_max={slots[plan.name]} in layer {plan.name!r}",
        )
    if isinstance(noise, float | int):
        require(0 < noise < math.inf, f"noise must be positive and finite, got {noise!r}")
    batches = checked_batches(calibration) if budget or isinstance(noise, str) else []
    clean = collect_scores(model, plans, batches, progress) if batches else {}
    widths = dict.fromkeys((plan.name for plan in plans), math.inf)
    if noise is not None:
        sigmas = (
            measured_noise(model, plans, batches, clean, noise, progress)
            if isinstance(noise, str)
            else dict.fromkeys(widths, float(noise))
        )
        widths = {name: noise_epsilon(sigma, *ramp) for name, sigma in sigmas.items()}
    for plan in plans if budget is not None else ():
        kept = clean[plan.name]
        most = budget_epsilon(kept.scores, plan.k, slots[plan.name], budget or 0, kept.groups)
        widths[plan.name] = min(widths[plan.name], most)
    return widths
