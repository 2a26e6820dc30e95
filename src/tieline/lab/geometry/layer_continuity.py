"""Is a trained layer continuous? Paper 1, Figures 1 and 3, layer by layer.

The inputs of each routed layer are moved to their nearest ties (`geometry.nearest_tie_point`), and
the layer is run in float64 with three gates on the same weights:

    hard        top-k
    b = 50      smooth top-k with the paper's ramp, ε such that k + 1/2 experts are in on average
    b = 1       smooth top-k with a ramp as wide as the band, the same ε

`measure_continuity` reports the change of the output across the ties against the step (Figure 1c)
and, on the line through the tie with the largest jump, the output itself (1a, 1b) and the largest
change across any event of the line.

Events are the offsets at which a layer could jump. On a line p + s n the scores of a linear router
are affine in s, z_e(s) = z_e(p) + s w_e·n. The weights of top-k can jump only where two scores are
equal, those of smooth top-k only there or where two scores are ε apart (at the lower end of the
band, or where the expert at the threshold changes):

    s = (z_j - z_i + c) / ((w_i - w_j)·n),    c ∈ {0, ε, -ε}

Comparing both sides of every event covers the whole line; a grid could miss a narrow jump.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.ranking import ranked_scores
from tieline.lab.geometry import difference_by_step, nearest_tie_point, step_exponent, walk_across
from tieline.measure.boundary import epsilon_for_extra
from tieline.routing import Gate, LinearRouter, MoE, SmoothTopK, TopK

__all__ = [
    "GateContinuity",
    "LayerContinuity",
    "LineJumps",
    "event_offsets",
    "largest_jump",
    "layer_inputs",
    "measure_continuity",
]

ROWS_AT_ONCE = 512


@dataclass(frozen=True)
class LineJumps:
    """The largest change of the output across any event of a line.

    Attributes:
        events: number of events on the line.
        largest: largest ‖f(s + h/2) - f(s - h/2)‖ over them.
        relative: the same over ‖f‖ there.
        at: offset s of it; NaN without events.
        step: h.
    """

    events: int
    largest: float
    relative: float
    at: float
    step: float


def event_offsets(
    scores: Float[Tensor, " experts"],
    rates: Float[Tensor, " experts"],
    reach: float,
    epsilon: float = 0.0,
) -> Float[Tensor, " events"]:
    """Return the offsets s in [-reach, reach] where two scores are equal or ε apart, ascending.

    Args:
        scores: z at s = 0, in float64.
        rates: dz/ds.
        reach: largest offset.
        epsilon: width of the band; 0 for equal scores alone.
    """
    require(reach > 0 and epsilon >= 0, f"need reach > 0 and ε >= 0, got {reach=}, {epsilon=}")
    first, second = torch.triu_indices(len(scores), len(scores), 1)
    difference, slope = scores[second] - scores[first], rates[first] - rates[second]
    shifts = (0.0,) if epsilon == 0 else (0.0, epsilon, -epsilon)
    offsets = torch.cat([(difference + shift) / slope for shift in shifts])
    return offsets[offsets.abs() <= reach].sort().values  # parallel scores give no finite offset


def largest_jump(
    layer: Callable[[Tensor], Tensor],
    point: Float[Tensor, " dim"],
    normal: Float[Tensor, " dim"],
    events: Float[Tensor, " events"],
    step: float = 1e-9,
) -> LineJumps:
    """Return the largest change of f over a step across any of the events.

    Args:
        layer: f, from (rows, dim) to (rows, out), in float64.
        point: p.
        normal: n, a unit vector.
        events: from `event_offsets`.
        step: h.
    """
    best = LineJumps(len(events), 0.0, 0.0, torch.nan, step)
    for offsets in events.split(ROWS_AT_ONCE) if len(events) else ():
        with torch.no_grad():
            front, back = (
                layer(point + (offsets[:, None] + side * step / 2) * normal) for side in (1, -1)
            )
        change = (front - back).norm(dim=1)
        index = int(change.argmax())
        if change[index] > best.largest:
            size = back[index].norm().item()
            largest = change[index].item()
            best = LineJumps(len(events), largest, largest / size, offsets[index].item(), step)
    return best


Layer = Callable[[Tensor], Tensor]
STEPS = torch.logspace(-9, 0, 10, dtype=torch.float64)
LINE_POINTS = 800
GATES = ("hard", "b = 50", "b = 1")


@dataclass(frozen=True)
class GateContinuity:
    """Continuity of one layer with one gate.

    Attributes:
        steps: h, lengths of the step across a tie.
        largest: largest ‖f(p + h n/2) - f(p - h n/2)‖ / ‖f‖ over the ties, for each h.
        median: the median of the same.
        exponent: slope of log(largest) in log(h) at small h; 0 for a jump, 1 if Lipschitz.
        offsets: signed distances along the line through one tie.
        output: the output coordinate that jumps most there.
        line: the largest change across any event of the line.
        slope: largest ‖Δf‖ / Δs between neighbouring points of the line, relative to ‖f‖.
        experts: mean number of experts in use over the inputs.
    """

    steps: tuple[float, ...]
    largest: tuple[float, ...]
    median: tuple[float, ...]
    exponent: float
    offsets: tuple[float, ...]
    output: tuple[float, ...]
    line: LineJumps
    slope: float
    experts: float


@dataclass(frozen=True)
class LayerContinuity:
    """Continuity of one layer with each of the three gates.

    Attributes:
        name: of the layer in the model.
        epsilon: width of the band.
        ties: number of ties measured.
        distance: median distance of an input from its nearest tie.
        gates: by name, in the order hard, b = 50, b = 1.
    """

    name: str
    epsilon: float
    ties: int
    distance: float
    gates: dict[str, GateContinuity]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)


def layer_inputs(model: nn.Module, **batch: Tensor) -> dict[str, Float[Tensor, "tokens dim"]]:
    """Return the inputs of every `MoE` of a model in one forward pass, by its name."""
    inputs_by_name: dict[str, Tensor] = {}

    def input_recorder(name: str) -> Callable[..., None]:
        def record_input(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            inputs_by_name[name] = inputs[0].detach().flatten(0, -2)

        return record_input

    handles = [
        module.register_forward_pre_hook(input_recorder(name))
        for name, module in model.named_modules()
        if isinstance(module, MoE)
    ]
    try:
        with torch.no_grad():
            model(**batch)
    finally:
        for handle in handles:
            handle.remove()
    return inputs_by_name


def measure_continuity(
    layer: MoE,
    inputs: Float[Tensor, "tokens dim"],
    *,
    name: str = "layer",
    ties: int = 64,
    extra: float = 0.5,
) -> LayerContinuity:
    """Measure how the output of a layer changes across ties near its inputs, for three gates.

    Args:
        layer: a trained layer with a linear router and a top-k or smooth top-k gate.
        inputs: its inputs.
        name: its name.
        ties: number of inputs that are moved to their nearest tie.
        extra: mean number of experts beyond k that the band lets in.
    """
    router, k = _linear_top_k(layer, name)
    double = deepcopy(layer).double()
    scores = double.router(inputs.double()).detach()
    epsilon = epsilon_for_extra(ranked_scores(scores, scores.shape[1]), k, extra).value
    require(epsilon is not None and epsilon > 0, f"{name}: no ε lets {extra} experts in")
    assert epsilon is not None
    bias = None if router.bias is None else router.bias.detach()
    nearest = nearest_tie_point(inputs[:ties], router.weight.detach(), bias, k)
    walls = _LayerTies(double, nearest.point, nearest.normal, nearest.distance, epsilon)
    gates = [TopK(k), SmoothTopK(k, epsilon=epsilon, b=50.0), SmoothTopK(k, epsilon=epsilon)]
    line = walls.line_of_largest_jump(_layer_with_gate(double, gates[0]))
    return LayerContinuity(
        name=name,
        epsilon=epsilon,
        ties=len(nearest.point),
        distance=nearest.distance.median().item(),
        gates={
            label: walls.measure_gate(gate, scores, line)
            for label, gate in zip(GATES, gates, strict=True)
        },
    )


@dataclass(frozen=True, eq=False)
class _LineAcrossTie:
    """The line through the tie at which the hard layer jumps most."""

    point: Tensor
    normal: Tensor
    reach: float
    coordinate: int


@dataclass(frozen=True, eq=False)
class _LayerTies:
    """Ties near the inputs of one layer, with the layer in float64."""

    layer: MoE
    points: Tensor
    normals: Tensor
    distances: Tensor
    epsilon: float

    def line_of_largest_jump(self, hard: Layer) -> _LineAcrossTie:
        """Return the line through the tie with the largest relative jump."""
        front, back = self._outputs_across_ties(hard, STEPS[0].item())
        jump = (front - back).norm(dim=1) / back.norm(dim=1)
        index = int(jump.argmax())
        point, normal = self.points[index], self.normals[index]
        rates = self.layer.router(point + normal) - self.layer.router(point)
        band = self.epsilon / (rates.max() - rates.min()).item()
        reach = max(2 * self.distances[index].item(), 8 * band)
        return _LineAcrossTie(point, normal, reach, int((front - back)[index].abs().argmax()))

    def measure_gate(self, gate: Gate, scores: Tensor, line: _LineAcrossTie) -> GateContinuity:
        """Measure the layer with this gate across all ties and along the line."""
        layer = _layer_with_gate(self.layer, gate)
        size = layer(self.points).norm(dim=1).median().item()
        by_step = difference_by_step(layer, self.points, self.normals, STEPS)
        walk = walk_across(layer, line.point, line.normal, line.reach, LINE_POINTS)
        spacing = 2 * line.reach / (LINE_POINTS - 1)
        weights = gate(scores)
        return GateContinuity(
            steps=tuple(by_step.steps.tolist()),
            largest=tuple((by_step.largest / size).tolist()),
            median=tuple((by_step.median / size).tolist()),
            exponent=step_exponent(by_step),
            offsets=tuple(walk.offsets.tolist()),
            output=tuple(walk.outputs[:, line.coordinate].tolist()),
            line=largest_jump(layer, line.point, line.normal, self._possible_jumps(gate, line)),
            slope=walk.jump / spacing / size,
            experts=(weights != 0).sum(dim=1).double().mean().item(),
        )

    def _possible_jumps(self, gate: Gate, line: _LineAcrossTie) -> Tensor:
        """Return the offsets on the line at which the gate could jump."""
        start = self.layer.router(line.point).detach()
        rates = self.layer.router(line.point + line.normal).detach() - start
        return event_offsets(start, rates, line.reach, getattr(gate, "fixed_epsilon", 0.0))

    @torch.no_grad()
    def _outputs_across_ties(self, layer: Layer, step: float) -> tuple[Tensor, Tensor]:
        """Return the outputs half a step in front of and behind every tie."""
        front, back = (layer(self.points + s * step / 2 * self.normals) for s in (1, -1))
        return front, back


def _linear_top_k(layer: MoE, name: str) -> tuple[LinearRouter, int]:
    """Return the linear router and k of a layer, or raise."""
    if isinstance(layer.router, LinearRouter) and isinstance(layer.gate, TopK | SmoothTopK):
        return layer.router, layer.gate.k
    kinds = f"{type(layer.router).__name__} with {type(layer.gate).__name__}"
    raise UnsupportedModelError(f"{name}: needs a linear router and a top-k gate, got {kinds}")


def _layer_with_gate(layer: MoE, gate: Gate) -> Layer:
    """Return the layer with another gate, without gradients."""

    @torch.no_grad()
    def layer_output(x: Tensor) -> Tensor:
        return layer.experts(x, gate(layer.router(x)))

    return layer_output
