r"""Choose the width ε of the band, layer by layer, from the scores of a calibration text.

    by budget    ε = inf{ε : mean experts per token >= budget}
    by noise     ε = M·σ / ω,   σ = median |δ| / 0.6745,
                 δ = change of c_[k] - c_[k+1] under the target precision, for the clean experts
                 ω = width of the ramp from 10 to 90 % for ε = 1: 0.8 at b = 1, 0.061 at b = 50,
                 1.6 for the projection, whose ramp is 2ε wide

A token within the ramp changes its weights by σ/ε instead of completely, and ε/σ times as many
tokens are in it: the mean square change falls by about ε/σ, hence M = 10 widths of the noise.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.ranking import ranked_scores
from tieline.core.setting_fields import require_setting
from tieline.core.text import layer_label
from tieline.measure.boundary import epsilon_for_extra
from tieline.models.class_changes import Call
from tieline.models.number_formats import FORMATS
from tieline.models.router_rule import at_least_float32, selection_scores
from tieline.models.smoothed_router import GateName, LayerPlan, gate_groups
from tieline.routing.gates import Groups
from tieline.routing.smooth_gates import group_projection, smooth_columns, smoothstep


class RampForm(NamedTuple):
    """The form of the ramp."""

    gate: GateName
    a: float
    b: float


NOISE_WIDTHS = 10.0
"""M: width of the ramp in standard deviations of the noise."""

NORMAL_MEDIAN = 0.6745
"""Median of |N(0, 1)|, which heavy tails of the noise in deep layers do not move."""

PROJECTED_WIDTH = 1.6
"""ω of `ProjectedTopK`: two experts share a seat along a straight ramp of width 2ε."""

HALVINGS = 40


class Scores:
    """A handler that keeps the selection scores of a router and changes nothing.

    Attributes:
        groups: how the choice is limited to groups; None without.
    """

    def __init__(self, plan: LayerPlan) -> None:
        """Watch the router of `plan`."""
        self._plan = plan
        self._calls: list[Tensor] = []
        self.groups: Groups | None = None

    def __call__(self, router: nn.Module, call: Call, output: Any) -> Any:
        """Keep the scores of this call."""
        logits = self._plan.family.layout.logits(call[0], output)
        selection = selection_scores(self._plan.family, router, logits.detach(), call)
        self.groups = gate_groups(selection.limit)
        self._calls.append(at_least_float32(selection.scores).cpu().clone())
        return output

    @property
    def scores(self) -> Float[Tensor, "tokens experts"]:
        """Scores of all tokens so far."""
        name = self._plan.name
        require(bool(self._calls), f"{layer_label(name)} did not run on the calibration text")
        return torch.cat(self._calls)


class CalibrationScores(NamedTuple):
    """What ε is chosen by: scores of the clean run; σ and changes of the margin under noise."""

    clean: Mapping[str, Scores]
    sigmas: Mapping[str, float]
    margin_noise: Mapping[str, Tensor] = {}


def refuse_equal_scores(clean: Mapping[str, Scores]) -> None:
    """Refuse routers that give all experts of every token one score."""
    equal = [
        name
        for name, recorded in clean.items()
        if bool((recorded.scores == recorded.scores[:, :1]).all())
    ]
    if equal:
        others = f" and {len(equal) - 1} more" if len(equal) > 1 else ""
        raise UnsupportedModelError(
            f"all scores are equal in {layer_label(equal[0])}{others}: an untrained or broken "
            "router, which cannot be smoothed; check the checkpoint"
        )


def budget_epsilon(
    scores: Float[Tensor, "tokens experts"],
    k: int,
    k_max: int,
    budget: float,
    groups: Groups | None = None,
    gate: GateName = "ramp",
) -> float:
    """Return inf{ε : mean number of experts per token >= budget}, at most k_max per token.

    For the ramp without groups it is an order statistic of the distances to the threshold. With
    groups, and for the projection, whose bands move with ε, it is found by bisection.
    """
    require(
        k < budget < k_max,
        f"the budget is a mean number of experts between k and k_max, got {budget:g} for {k=}, "
        f"{k_max=}",
    )
    scores = scores.double()
    if gate == "projected":
        return _bisected_epsilon(
            scores, budget, lambda width: group_projection(scores, k, width, groups)
        )
    if groups is not None:
        return _bisected_epsilon(
            scores,
            budget,
            lambda width: (
                smooth_columns(scores, k, epsilon=width, k_max=k_max, groups=groups).share
            ),
        )
    solution = epsilon_for_extra(ranked_scores(scores, k_max), k, budget - k)
    require(solution.value is not None, f"no ε reaches {budget:g} experts: {solution.status}")
    return float(solution.value or 0.0)


def _bisected_epsilon(scores: Tensor, budget: float, shares: Callable[[float], Tensor]) -> float:
    """inf{ε : mean experts per token >= budget}, by bisection of its logarithm."""

    def mean_count(epsilon: float) -> float:
        return (shares(epsilon) > 0).double().sum(dim=1).mean().item()

    span = (scores.amax() - scores.amin()).item()
    low, high = 1e-9 * max(span, 1e-30), 4 * max(span, 1e-30)
    reached = mean_count(high)
    require(
        reached >= budget, f"no ε reaches {budget:g} experts: all of the range gives {reached:.3g}"
    )
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if mean_count(middle) >= budget else (middle, high)
    return high


def precision_named(precision: str) -> tuple[str, Literal["router", "all"]]:
    """Return the format and the region that "bf16", "model bf16" or "router bf16" names."""
    *regions, name = precision.split() or [""]
    require(
        name in FORMATS and regions in ([], ["router"], ["model"]),
        f"unknown precision {precision!r}: one of {', '.join(FORMATS)}, or 'router …'",
    )
    return name, "router" if regions == ["router"] else "all"


def margin_changes(
    plans: Sequence[LayerPlan], clean: Mapping[str, Scores], noisy: Mapping[str, Scores]
) -> dict[str, Tensor]:
    """Change of every router's margin at its threshold, from a clean to a noisy run, by token."""
    return {
        plan.name: _layer_margin_changes(clean[plan.name], noisy[plan.name].scores, plan.k)
        for plan in plans
    }


def gap_noise(margin_noise: Mapping[str, Tensor]) -> dict[str, float]:
    """σ of every router's gap: median |δ| / 0.6745 of the changes of its margin."""
    return {
        name: change.abs().median().item() / NORMAL_MEDIAN for name, change in margin_noise.items()
    }


def _layer_margin_changes(clean: Scores, noisy: Tensor, k: int) -> Tensor:
    """Changes of the margin between the experts on both sides of the clean threshold."""
    clean_scores, noisy_scores = clean.scores.double(), noisy.double()
    tiny = 1e-9 * (clean_scores.amax() - clean_scores.amin()).item() + 1e-30
    ids = smooth_columns(clean_scores, k, epsilon=tiny, k_max=k + 1, groups=clean.groups).ids[
        :, k - 1 :
    ]
    change = (noisy_scores - clean_scores).gather(1, ids)
    return change[:, 0] - change[:, 1]


def noise_epsilon(sigma: float, a: float, b: float, gate: GateName = "ramp") -> float:
    """Return the ε whose ramp is `NOISE_WIDTHS` times as wide as the noise; 0 without noise."""
    width = PROJECTED_WIDTH if gate == "projected" else ramp_width(a, b)
    return NOISE_WIDTHS * sigma / width


def ramp_width(a: float, b: float) -> float:
    """Return u_90 - u_10: the share of the band that the ramp from 10 to 90 % takes."""
    ends = []
    for height in (0.1, 0.9):
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            share = smoothstep(torch.tensor(middle, dtype=torch.float64, device="cpu"), a, b).item()
            low, high = (middle, high) if share < height else (low, middle)
        ends.append(high)
    return ends[1] - ends[0]


def _scores_and_noise(
    plans: Sequence[LayerPlan],
    target: tuple[float | None, str | float | None],
    calibration: CalibrationScores | None,
) -> CalibrationScores:
    """Scores and noise by which ε is chosen, from the calibration tokens where needed."""
    budget, noise = target
    clean, sigmas = (calibration or CalibrationScores({}, {}))[:2]
    if isinstance(noise, str):
        precision_named(noise)
    measured = (budget is None or bool(clean)) and (not isinstance(noise, str) or bool(sigmas))
    require(
        measured or not plans,
        "choosing ε by budget or noise needs calibration tokens: give what `calibrate` measures "
        "on them, with the noise of the precision",
    )
    if isinstance(noise, str):
        return CalibrationScores(clean, sigmas)
    sigma = 0.0 if noise is None else float(noise)
    return CalibrationScores(clean, {plan.name: sigma for plan in plans})


def chosen_epsilons(
    plans: Sequence[LayerPlan],
    slots: Mapping[str, int],
    target: tuple[float | None, str | float | None],
    calibration: CalibrationScores | None,
    ramp: RampForm,
) -> dict[str, float]:
    """ε of every router, from the calibration tokens."""
    budget, noise = target
    for plan in plans if budget is not None else ():
        require_setting(
            plan.k < (budget or 0) < slots[plan.name],
            "{budget} is a mean number of experts between k and {k_max}, got {mean} for k={k}, "
            "{slots} slots in layer {layer}",
            mean=f"{budget:g}",
            k=plan.k,
            slots=slots[plan.name],
            layer=repr(plan.name),
        )
    if isinstance(noise, float | int):
        require(0 < noise < math.inf, f"noise must be positive and finite, got {noise!r}")
    widths = dict.fromkeys((plan.name for plan in plans), math.inf)
    clean, sigmas, _ = _scores_and_noise(plans, target, calibration)
    if noise is not None:
        widths = {
            name: noise_epsilon(sigma, ramp.a, ramp.b, ramp.gate) for name, sigma in sigmas.items()
        }
    for plan in plans if budget is not None else ():
        recorded, sizes = clean[plan.name], (plan.k, slots[plan.name], budget or 0)
        most = budget_epsilon(recorded.scores, *sizes, recorded.groups, ramp.gate)
        widths[plan.name] = min(widths[plan.name], most)
    return widths


def given_epsilons(
    epsilon: float | Sequence[float] | Mapping[str, float], plans: Sequence[LayerPlan]
) -> dict[str, float]:
    """Return ε of every router by name, as given: for all, in order, or by name."""
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
                f"epsilon must be finite and not negative, got {width!r} for {layer_label(name)}"
            )
    return {name: float(width) for name, width in widths.items()}
