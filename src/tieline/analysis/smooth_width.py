r"""How wide to smooth: what a calibration text says of a model, and the width that a wish asks for.

    moved       KL of the smoothed model to the original, both in float32
    factor      flip part of the KL before / after, flip part = KL - the original's floor with
                clean routes

Widths are ε_l = c σ_l, σ_l the noise of layer l's gap under the precision that is to be repaired.
A wish ("factor 8", "KL at most 0.001") is met by the c at which it holds on the calibration text.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.repair import RepairTable
from tieline.analysis.smooth_scores import measure_scores, noise_perturbation
from tieline.core.errors import ParameterError, require
from tieline.measure.flips import flip_reduction
from tieline.models.model import Model
from tieline.models.smooth_calibration import Measured, Scores, budget_epsilon
from tieline.models.smooth_router import GateName, LayerPlan, default_k_max, plan_layers
from tieline.routing.projected import group_projection
from tieline.routing.smooth import smooth_columns
from tieline.run.runner import Runner

SCALES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""c = ε/σ that a wish is sought among."""

NOISE = "router bf16"
"""The precision that is repaired unless another is named."""

Progress = Callable[[str, int, int], None]
Widths = Mapping[str, float]


class Calibration:
    """What is known of a model from its calibration text: scores and noise, layer by layer.

    Args:
        model: the original, in float32.
        batches: tokens to run.
        noise: the precision to repair.
        progress: called with stage, done and total.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Int[Tensor, "rows length"]],
        noise: str,
        progress: Progress | None = None,
    ) -> None:
        measured = measure_scores(Runner(Model(model)), batches, noise, progress)
        self._take(model, measured, noise)

    @classmethod
    def of(cls, model: nn.Module, measured: Measured, noise: str) -> "Calibration":
        """What scores and noise that were measured before say of a model."""
        calibration = cls.__new__(cls)
        calibration._take(model, measured, noise)
        return calibration

    def _take(self, model: nn.Module, measured: Measured, noise: str) -> None:
        plans, _ = plan_layers(model, None)
        self.plans: list[LayerPlan] = [plan for plan in plans if plan.k < plan.n_experts]
        self.noise = noise_perturbation(noise)
        self.clean: Mapping[str, Scores] = measured.clean
        self.sigmas = dict(measured.sigmas)
        positive = any(sigma > 0 for sigma in self.sigmas.values())
        require(positive, f"{noise} does not change the scores of any router: nothing to repair")

    def by_noise(self, scale: float) -> dict[str, float]:
        """ε_l = c σ_l."""
        return {name: scale * sigma for name, sigma in self.sigmas.items()}

    def experts(self, widths: Widths, gate: GateName) -> float:
        """Mean experts per token and layer at these widths, on the calibration text."""
        counts = []
        for plan in self.plans:
            kept, width = self.clean[plan.name], widths[plan.name]
            scores, k, groups = kept.scores.double(), plan.k, kept.groups
            if width <= 0:
                counts.append(float(k))
            elif gate == "projected":
                counts.append(_mean_used(group_projection(scores, k, width, groups)))
            else:
                of = {"epsilon": width, "k_max": default_k_max(k, plan.n_experts)}
                counts.append(_mean_used(smooth_columns(scores, k, groups=groups, **of).share))
        return sum(counts) / len(counts)

    def by_budget(self, budget: float, gate: GateName) -> dict[str, float]:
        """The ε of each layer that gives it this mean number of experts."""
        widths = {}
        for plan in self.plans:
            kept = self.clean[plan.name]
            of = kept.scores, plan.k, plan.n_experts, budget, kept.groups, gate
            widths[plan.name] = budget_epsilon(*of)
        return widths


def _mean_used(share: Tensor) -> float:
    return (share > 0).double().sum(dim=-1).mean().item()


def chosen_scale(
    points: Mapping[float, RepairTable], *, factor: float | None, max_moved: float | None
) -> float:
    """The c with this factor, or with this KL to the original, on a line between logarithms.

    The KL of a text is heavy-tailed, so the factor is that of the law, times the median over all
    points of what was measured over it.

    Args:
        points: tables of the calibration text by c, with one row, that of the noise.
        factor: how many times lower the flip part of the KL shall be.
        max_moved: KL to the original, nats per token.
    """
    if max_moved is not None:
        moved = {c: table.moved.value or 0.0 for c, table in points.items()}
        return _crossing(moved, max_moved, "--max-moved", "KL to the original")
    assert factor is not None
    found = {c: table.rows[0].flip_factor for c, table in points.items()}
    ratios = sorted(value / flip_reduction(c) for c, value in found.items() if value and c >= 1)
    require(bool(ratios), "no flips are left to be seen at any width: give --max-moved instead")
    middle = ratios[len(ratios) // 2]
    return _crossing({c: middle * flip_reduction(c) for c in found}, factor, "--factor", "factor")


def _crossing(values: Mapping[float, float], target: float, option: str, what: str) -> float:
    """Where increasing values reach the target first."""
    require(0 < target < math.inf, f"{option} must be positive and finite, got {target:g}")
    scales = sorted(values)
    first, best = values[scales[0]], max(values.values())
    if target < first or target > best:
        side = "least" if target < first else "largest"
        end = first if target < first else best
        raise ParameterError(
            f"no ε between {scales[0]:g} and {scales[-1]:g} times the noise reaches {option} "
            f"{target:g}: the {side} {what} is {end:.3g}"
        )
    for low, high in itertools.pairwise(scales):
        below, above = values[low], values[high]
        if below <= target <= above:
            if not (0 < below < above < math.inf):
                return high
            share = math.log(target / below) / math.log(above / below)
            return low * (high / low) ** share
    return scales[0]
