"""Section 6, Figures 1 and 3 to 7, section B.2: the smooth gate, and routing during training.

    K_l(t)        experts in use per token in layer l after t steps
    ε_l(t)        width of the band of a smooth gate
    K_l(ε, t)     experts within ε of the threshold z_[k] (Figures 6, 7)

All are measured on the same windows, spread over the training text, so that changes are those of
the model and not of the batches.

Figures 4 and 5 train the decoder of a recipe, `tieline train demo-small-GATE`, on the text in
the box: two layers (four in full mode), 16 experts, top 2, the paper's b = 50. The paper trains six
layers over 80 epochs of WikiText-103.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import require
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import (
    Check,
    Evidence,
    FigureSeries,
    Real,
    at_least,
    at_most,
    chart,
    corrected,
    line,
    near,
    none_of,
    qualified,
)
from tieline.lab.claims.gate_comparisons import require_training_packages
from tieline.lab.geometry import (
    difference_by_step,
    gaussian_budget_epsilon,
    gaussian_near_ties,
    nearest_tie_point,
    step_exponent,
    tie_order,
    walk_across,
)
from tieline.lab.training.config import DecoderConfig, TrainConfig
from tieline.lab.training.gate_schedules import BudgetSchedule
from tieline.measure.boundary import near_counts
from tieline.routing import (
    Experts,
    LinearRouter,
    ReLUGate,
    Smear,
    SmoothTopK,
    Softmax,
    TopK,
    boundary_loss,
    smoothstep,
)
from tieline.routing.losses import LayerRouting, collect_routing

A, B = 1.0, 50.0
"""Exponents of the paper's experiments."""


@claim("p1-sec6-smoothstep", "log-smoothstep")
def log_smoothstep(run: ClaimRun) -> Evidence:
    """h(u) = log(u^a/(u^a + (1-u)^b)) on (0, 1), 0 above, and continuous.

    Setting: h as a function to R, which the paper calls continuous
    Tested: Values and monotony of e^h, its ramp at a = 1, b = 50, limits at both ends; h itself and
        its gradient at u = 0.
    Overturned by: the words 'e^h is continuous', or values in [-∞, 0]
    Condition: continuity is that of s = e^h: h itself tends to -∞ at u = 0, where its log form has
        no gradient
    """
    u = torch.linspace(0, 1, 2_001, dtype=torch.float64)
    s = smoothstep(u, A, B)
    ramp = [_ramp_inverse(share) for share in (0.1, 0.9)]
    grid, exponents = u[::10], [(A, B), (1.0, 1.0)]
    curves = [line(f"a = {a:g}, b = {b:g}", grid, smoothstep(grid, a, b)) for a, b in exponents]
    zero = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    log_form = torch.log(zero**A / (zero**A + (1 - zero) ** B))
    (slope,) = torch.autograd.grad(torch.exp(log_form), zero)
    edge = smoothstep(
        torch.tensor([-1e-12, 1e-12, 1 - 1e-12, 1 + 1e-12], dtype=torch.float64), A, B
    )
    return Evidence.of(
        at_least("h at u = 0", log_form.item(), -1e300),
        qualified(
            near(
                "s(0.05)",
                smoothstep(torch.tensor(0.05, dtype=torch.float64), A, B).item(),
                0.3938714383,
                1e-9,
            ),
            at_least("smallest step of s", s.diff().min().item(), 0),
            at_most("jump of s at both ends", (edge[1] - edge[0] + edge[3] - edge[2]).item(), 1e-9),
        ),
        corrected(
            near("10 % of the ramp", ramp[0], 0.0275, 5e-5),
            near("90 % of the ramp", ramp[1], 0.0883, 5e-5),
            near("e^h in log form has no gradient at 0", slope.isnan().item(), 1, 0),
        ),
        paper="h continuous",
        corrected="s = e^h continuous; compute s",
        measured=f"ramp on [{ramp[0]:.4f}, {ramp[1]:.4f}]",
        figure=chart("u", "s(u)", *curves),
    )


def _ramp_inverse(share: float) -> float:
    """Value u at which the ramp s(u) reaches a share."""
    x = torch.linspace(0, 1, 1_000_001, dtype=torch.float64)
    return x[torch.searchsorted(smoothstep(x, A, B), share)].item()


@claim("p1-sec6-gate", "smoothed gate")
def smoothed_gate(run: ClaimRun) -> Evidence:
    """Experts less than ε below z_[k] fade in, those below are dropped, the top k keep their
    logits; near an order-n tie at most n more experts are active; tied experts share alike.

    Setting: every score vector; a = 1, b = 50, ε = 0.4
    Tested: Weights against the formula on draws; the number of active experts against k + order,
        at points moved onto an exact tie of order 1 too; all experts tied.
    Overturned by: the words 'the highest order whose band holds x'
    Condition: n is the highest order whose band holds x: a point on a wall of order 1 lies in the
        bands of all other walls within ε as well, and each of their experts is active
    """
    epsilon, scores = 0.4, run.normal(run.size(20_000, 200_000), 8, stream=1)
    on_wall = _scores_moved_onto_wall(scores, 2)
    weights = SmoothTopK(2, epsilon=epsilon, a=A, b=B)(scores)
    top = scores.sort(dim=1, descending=True).values[:, 1:2]
    raw = scores.exp() * smoothstep((scores - top + epsilon) / epsilon, A, B)
    stated = raw / raw.sum(dim=1, keepdim=True)
    extra = (weights > 0).sum(dim=1) - 2
    extra_on_wall = (SmoothTopK(2, epsilon=epsilon, a=A, b=B)(on_wall) > 0).sum(dim=1) - 2
    tied = SmoothTopK(2, epsilon=epsilon, a=A, b=B)(torch.ones(1, 8, dtype=torch.float64))
    return Evidence.of(
        none_of(
            "points of exact order 1 with more than one expert extra",
            (extra_on_wall > 1).sum().item(),
        ),
        qualified(
            at_most("largest error of a weight", (weights - stated).abs().max().item(), 1e-12),
            none_of(
                "tokens with more experts extra than the highest order within ε",
                (extra > tie_order(scores, 2, epsilon)).sum().item(),
            ),
            at_least("mean number of experts extra", extra.double().mean().item(), 0.1),
            near("spread of the weights of 8 tied experts", (tied.max() - tied.min()).item(), 0, 0),
        ),
        paper="at most n extra within ε of an order-n discontinuity",
        measured=f"{extra.double().mean().item():.3f} extra at ε = {epsilon}; on walls of order 1 "
        f"up to {int(extra_on_wall.max())}",
    )


def _scores_moved_onto_wall(scores: Tensor, k: int) -> Tensor:
    """Raise the score of rank k + 1 to that of rank k, so that each row is an order-1 tie."""
    values, ids = scores.topk(k + 1, dim=1)
    return scores.scatter(1, ids[:, k:], values[:, k - 1 : k])


def layer_pair(run: ClaimRun, layer: int, experts: int = 32, k: int = 4, width: int = 24) -> dict:
    """Draw a layer with a hard and two smooth gates on the same weights, and its router."""
    weight = run.normal(experts, width, stream=100 * layer + 1)
    first = run.normal(experts, 32, width, stream=100 * layer + 2) / width**0.5
    second = run.normal(experts, 8, 32, stream=100 * layer + 3) / 32**0.5

    def layer_with_gate(gate) -> object:
        def mapped(x: Tensor) -> Tensor:
            hidden = torch.einsum("ehd,nd->neh", first, x).relu()
            return torch.einsum(
                "ne,neo->no", gate(x @ weight.T), torch.einsum("eoh,neh->neo", second, hidden)
            )

        return mapped

    gates = {
        "hard": TopK(k),
        "smooth": SmoothTopK(k, epsilon=0.5, a=A, b=B),
        "ramp": SmoothTopK(k, epsilon=0.5, a=1.0, b=1.0),
    }
    return {"weight": weight, **{name: layer_with_gate(gate) for name, gate in gates.items()}}


def _nearest_tie_points(run: ClaimRun, weight: Tensor, k: int, n: int) -> tuple[Tensor, Tensor]:
    """Nearest tie points of drawn inputs, and the normals there."""
    nearest = nearest_tie_point(run.normal(n, weight.shape[1], stream=8), weight, None, k)
    return nearest.point, nearest.normal


@claim("p1-propA.7", "the smoothed layer is continuous", seconds=1.0)
def smoothed_layer_is_continuous(run: ClaimRun) -> Evidence:
    """With a continuous h, continuous experts and affine scores the layer is continuous.

    Setting: affine scores, ReLU experts, 32 experts, top 4
    Tested: Output differences across ties of a layer of 32 experts, step 1e-9 to 1: exponent 1 in
        the step; and along whole lines, where b = 50 moves a near-step to z_[k] - ε.
    Overturned by: an exponent below 1
    """
    layer = layer_pair(run, 1)
    points, normals = _nearest_tie_points(run, layer["weight"], 4, run.size(30, 300))
    exponents = {
        name: step_exponent(difference_by_step(layer[name], points, normals))
        for name in ("hard", "smooth")
    }
    steep = {}
    for name in ("smooth", "ramp"):
        walks = [
            walk_across(layer[name], p, n, 1.0, 2_000)
            for p, n in zip(points[:10], normals[:10], strict=True)
        ]
        steep[name] = max(walk.jump for walk in walks) * 1_000
    finer = walk_across(layer["smooth"], points[0], normals[0], 1.0, 20_000).jump
    coarse = walk_across(layer["smooth"], points[0], normals[0], 1.0, 2_000).jump
    return Evidence.of(
        near("exponent of the smooth layer", exponents["smooth"], 1, 0.1),
        at_most("largest step along a line, ten times finer", finer / coarse, 0.2),
        corrected(
            near("exponent of the hard layer", exponents["hard"], 0, 0.05),
            at_least("steepness of b = 50 over b = 1", steep["smooth"] / steep["ramp"], 1.5),
        ),
        paper="continuous",
        corrected=f"continuous; slope up to {steep['smooth']:.1f} (b = 50), {steep['ramp']:.1f} (b "
        f"= 1)",
        measured=exponents["smooth"],
    )


@claim("p1-fig1", "jump at a tie, with and without smoothing")
def figure_one_jump_at_tie(run: ClaimRun) -> Evidence:
    """Across a tie the hard layer jumps and the smooth one does not; its largest difference
    vanishes with the step.

    Setting: drawn layers of the figure's size (the figure has a trained one, see docs/vision.md)
    Tested: The three panels on a drawn layer of 32 experts, top 4: output along the normal, and
        differences down to a step of 1e-9. On a trained one, as in the paper: `tieline train
        cifar10-small-smoe`, then examples/cifar10_continuity.py (docs/vision.md).
    Overturned by: a hard layer without jump or a smooth one with it
    """
    layer = layer_pair(run, 1)
    points, normals = _nearest_tie_points(run, layer["weight"], 4, run.size(50, 500))
    differences = {
        name: difference_by_step(layer[name], points, normals) for name in ("hard", "smooth")
    }
    ratios = {name: (d.largest[0] / d.largest[-1]).item() for name, d in differences.items()}
    return Evidence.of(
        at_least("hard: difference at 1e-9 over that at 1", ratios["hard"], 0.01),
        at_most("smooth: the same", ratios["smooth"], 1e-5),
        paper="stays; vanishes",
        measured=f"{ratios['hard']:.3f}; {ratios['smooth']:.1e}",
        figure=chart(
            "step",
            "largest difference of outputs",
            line("hard top-k", differences["hard"].steps, differences["hard"].largest),
            line("smooth top-k", differences["smooth"].steps, differences["smooth"].largest),
            log="xy",
        ),
    )


@claim("p1-fig3", "continuity layer by layer")
def figure_three_layer_continuity(run: ClaimRun) -> Evidence:
    """In each of four layers smoothing removes the jump.

    Setting: four drawn layers of the figure's size
    Tested: Exponent of the largest difference in the step for four drawn layers; for four layers
        trained on CIFAR-10, every event of a line too: docs/vision.md.
    Overturned by: an exponent other than 0 and 1
    """
    checks = []
    for number in range(1, 5):
        layer = layer_pair(run, number)
        points, normals = _nearest_tie_points(run, layer["weight"], 4, run.size(20, 200))
        for name, stated in (("hard", 0.0), ("smooth", 1.0)):
            power = step_exponent(difference_by_step(layer[name], points, normals))
            checks.append(near(f"layer {number}, {name}", power, stated, 0.1))
    return Evidence.of(
        checks, paper="0 and 1", measured=f"{checks[0].measured:.3f} and {checks[1].measured:.3f}"
    )


@claim("p1-sec6-loss", "boundary loss")
def boundary_loss_claim(run: ClaimRun) -> Evidence:
    """α ε (K - k*) drives ε down while more than k* experts are in use and up while fewer.

    Setting: the direction of the loss in ε, which is what the paper states; convergence at any rate
        is not claimed there and is shown beside it
    Tested: Its gradient in ε for both signs; plain descent on ε = softplus(θ) with the exact K(ε)
        of normal scores, at rates below and above the limit ηαK'(ε*)(1 - e^(-ε*))² < 2.
    Overturned by: a gradient of the wrong sign
    """
    epsilon = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    slopes = []
    for active in (2, 4):
        weights = torch.zeros(5, 8, dtype=torch.float64)
        weights[:, :active] = 1.0
        slopes.append(torch.autograd.grad(boundary_loss(epsilon, weights, 2.5), epsilon)[0].item())
    target = gaussian_budget_epsilon(16, 2, 0.5)
    rise = (
        gaussian_near_ties(16, 2, target + 1e-4) - gaussian_near_ties(16, 2, target - 1e-4)
    ) / 2e-4
    limit = 2 / (rise * (1 - math.exp(-target)) ** 2)
    calm, wild = (_settled_epsilon_error(rate * limit, target) for rate in (0.75, 1.3))
    return Evidence.of(
        near("gradient with 2 experts in use", slopes[0], -0.5, 1e-12),
        near("gradient with 4 experts in use", slopes[1], 1.5, 1e-12),
        corrected(
            at_most("distance from ε* after 400 steps at 0.75 of the limit", calm, 1e-6),
            at_least("distance from ε* after 400 steps at 1.3 of the limit", wild, 1e-3),
        ),
        paper="down above k*, up below",
        corrected=f"plain descent settles for ηα < {limit:.2f} here, and never above",
        measured=f"{calm:.1e} below the limit, {wild:.3f} above",
    )


def _settled_epsilon_error(rate: float, target: float) -> float:
    """Error |ε - ε*| after 400 steps of descent from near ε*, with the exact K(ε)."""
    theta = math.log(math.expm1(target * 1.05))
    for _ in range(400):
        epsilon = math.log1p(math.exp(theta))
        excess = gaussian_near_ties(16, 2, epsilon) - 0.5
        theta -= rate * excess * (1 - math.exp(-epsilon))
    return abs(math.log1p(math.exp(theta)) - target)


@dataclass(frozen=True, eq=False)
class RoutingCourse:
    """Routing of every layer at some steps of a training run.

    Attributes:
        steps: steps after which the model was measured.
        experts: K, mean over tokens.
        epsilon: width of the band, NaN where a gate has none.
        near: mean number of experts within each tolerance of the threshold.
        losses: task loss of the logged steps.
        held_out: K on held-out text when the run is over, mean over layers.
    """

    steps: Int[Tensor, " looks"]
    experts: Float[Tensor, "looks layers"]
    epsilon: Float[Tensor, "looks layers"]
    near: Float[Tensor, "looks layers tolerances"]
    losses: tuple[float, ...]
    held_out: float

    def between(self, first: Real, last: Real) -> slice:
        """Slice of the measurements between shares `first` and `last` of the run."""
        end = int(self.steps[-1])
        looks = ((self.steps > first * end) & (self.steps <= last * end)).nonzero().flatten()
        require(len(looks) > 0, f"no look between {first} and {last} of {end} steps")
        return slice(int(looks[0]), int(looks[-1]) + 1)


def routing_course(
    config: TrainConfig, every: int, windows: int = 64, tolerances: Sequence[float] = ()
) -> RoutingCourse:
    """Train a language configuration in a temporary folder and measure it every `every` steps.

    The first and the last step are measured too, all on the same `windows` windows of the text;
    `tolerances` are the ε of `near`.
    """
    # these load transformers: only where a model is trained
    from tieline.lab.training.text_data import load_streams
    from tieline.lab.training.training_run import run_training

    language = config.task == "language"
    require(language and isinstance(config.model, DecoderConfig), "needs a decoder")
    assert isinstance(config.model, DecoderConfig)
    context, text = config.model.context, load_streams(config.data).train
    all_rows = text[: len(text) // context * context].view(-1, context)
    rows = all_rows[:: max(1, len(all_rows) // windows)][:windows].long()
    looks: list[tuple[int, Tensor]] = []

    def measure_at_step(model: nn.Module, step: int) -> None:
        if step == 1 or step % every == 0 or step == config.optim.steps:
            looks.append((step, _measure_layers(model, rows, tolerances)))

    with tempfile.TemporaryDirectory() as folder:
        done = run_training(config, Path(folder) / "run", watch=measure_at_step)
    steps, tables = zip(*looks, strict=True)
    table = torch.stack(tables)
    return RoutingCourse(
        steps=torch.tensor(steps),
        experts=table[..., 0],
        epsilon=table[..., 1],
        near=table[..., 2:],
        losses=tuple(entry["task_loss"] for entry in done.history if "task_loss" in entry),
        held_out=done.scores["validation"]["experts_per_token"],
    )


@torch.no_grad()
def _measure_layers(model: nn.Module, rows: Tensor, tolerances: Sequence[float]) -> Tensor:
    """Measure K, ε and the numbers of near experts of every layer, as rows."""
    training = model.training
    model.eval()
    with collect_routing(model) as records:
        model(input_ids=rows)
    model.train(training)
    return torch.stack([_layer_course_row(record, tolerances) for record in records])


def _layer_course_row(record: LayerRouting, tolerances: Sequence[float]) -> Tensor:
    """Experts in use, ε and numbers of near experts of one layer."""
    gate, scores = record.layer.gate, record.routing.scores.flatten(0, -2)
    used = record.routing.active.double().mean()
    width = gate.epsilon.double() if isinstance(gate, SmoothTopK) else torch.tensor(math.nan)
    near = near_counts(scores, getattr(gate, "k", 1), tolerances).double().mean(dim=0)
    return torch.cat([torch.stack([used, width.to(used)]), near])


BUDGET, HARD = 2.5, 2.0
"""k* of the paper's runs, at the start and after annealing."""

NEAR = 0.1
"""Tolerance of K around k*: Adam keeps ε moving, and scores spread meanwhile."""


def smoothing_course(
    run: ClaimRun, gate: str, *, tolerances: Sequence[float] = (), share: int = 1
) -> "RoutingCourse":
    """Train `demo-small-GATE` and measure it at its start and 32 times (64 in full mode).

    Near experts are counted at the tolerances ε; `share` divides the number of steps.
    """
    require_training_packages()
    from tieline.lab.training.recipes import recipe_config

    config = recipe_config(f"demo-small-{gate}", run.seed)
    if not run.fast:
        config = config.replace(model__layers=4, optim__steps=3 * config.optim.steps)
    if share > 1:
        config = config.replace(optim__steps=config.optim.steps // share)
    looks = run.size(32, 64) // share
    every = config.optim.steps // looks
    return routing_course(config, every, run.size(64, 128), tolerances)


def _layer_means(name: str, values: Tensor, target: float, tolerance: float) -> list[Check]:
    """Check the mean of each layer over some measurements against a target."""
    means = values.mean(dim=0).tolist()
    return [
        near(f"{name}, layer {index}", mean, target, tolerance) for index, mean in enumerate(means)
    ]


def _layer_curves(course: "RoutingCourse") -> list[FigureSeries]:
    """Lines of K against the steps, one per layer."""
    steps = course.steps.double()
    return [line(f"layer {index}", steps, column) for index, column in enumerate(course.experts.T)]


@claim(
    "p1-fig4", "boundary loss holds the number of experts", number="Figure 4, sec. B.4", seconds=9
)
def figure_four_boundary_loss(run: ClaimRun) -> Evidence:
    """ε grows until the mean number of active experts reaches k* = 2.5, in every layer, and stays
    there.

    Setting: two layers (four without --fast) on the text in the box; the paper has six on WikiText
    Tested: Reproduced at small scale by a real training run, `tieline train demo-small-smooth50`: K
        and ε of each layer on text of the run, from the start to the end. docs/training.md has
        longer runs.
    Overturned by: a layer whose K settles elsewhere than at k*
    """
    routed = smoothing_course(run, "smooth50")
    last, before = routed.between(0.75, 1), routed.between(0.5, 0.75)
    growth = (routed.epsilon[last].mean(dim=0) / 0.05).min().item()
    k = routed.experts[last].mean().item()
    return Evidence.of(
        _layer_means("K in the last quarter", routed.experts[last], BUDGET, NEAR),
        _layer_means("K in the quarter before", routed.experts[before], BUDGET, NEAR),
        at_least("ε in the last quarter over its start, least of the layers", growth, 1),
        at_most("K after the first step", routed.experts[0].max().item(), BUDGET - NEAR),
        corrected(at_least("least K of all looks", routed.experts.min().item(), 2)),
        at_most("last loss over the first", routed.losses[-1] / routed.losses[0], 0.6),
        paper=BUDGET,
        corrected="K begins at 2, not near 0: the top 2 are always in",
        measured=f"{k:.3f} on text of the run, {routed.held_out:.3f} on held-out text",
        figure=chart("step", "K", *_layer_curves(routed)),
        note="ε first overshoots and comes back: the scores of a fresh model lie close together",
    )


@claim("p1-fig5", "annealing to hard top-k", number="Figure 5, sec. 7.5", seconds=9)
def figure_five_annealing(run: ClaimRun) -> Evidence:
    """K follows the budget: 2.5, then linearly down to 2, then 2, where ε tends to 0.

    Setting: as Figure 4, with the annealed budget
    Tested: Reproduced at small scale by a real training run under the schedule, `tieline train
        demo-small-annealed`, as Figure 4.
    Overturned by: a stage whose K misses its budget
    """
    routed = smoothing_course(run, "annealed")
    first, middle, end = (
        routed.between(0.375, 0.5),
        routed.between(0.5, 0.75),
        routed.between(0.9, 1),
    )
    width = routed.epsilon[first].mean(dim=0)
    schedule = BudgetSchedule(
        BUDGET, HARD, int(routed.steps[-1]) // 2, int(routed.steps[-1]) * 3 // 4
    )
    budgets = [schedule(int(step)) for step in routed.steps]
    dead = (routed.epsilon[-1] / width).max().item()
    k = routed.experts[end].mean().item()
    return Evidence.of(
        _layer_means("K at the end of the first stage", routed.experts[first], BUDGET, NEAR),
        _layer_means("K over the second stage", routed.experts[middle], 2.25, NEAR),
        _layer_means("K at the end of the third", routed.experts[end], HARD, 0.06),
        at_most("ε at the end over that at 2.5, most of the layers", dead, 0.25),
        paper=HARD,
        corrected="ε tends to 0 and K to 2 without getting there: the pull K - k dies with ε",
        measured=f"{k:.3f}, ε down to {100 * dead:.0f} %",
        figure=chart(
            "step",
            "K",
            *_layer_curves(routed),
            line("budget", routed.steps.double(), budgets, dashed=True),
        ),
    )


NEAR_TOLERANCES = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""ε of Figures 6 and 7 at which the course is measured."""


@claim(
    "p1-fig6-7",
    "experts near the boundary while training",
    number="Figures 6, 7, (18)",
    seconds=3,
    full_seconds=40,
)
def near_experts(run: ClaimRun) -> Evidence:
    """While SMoE is trained (16 experts, top 2), experts other than the chosen ones lie within ε of
    z_[k] at every stage, for every ε of the two figures: near-ties are no artefact of the start.

    Setting: the training course of `demo-small-smoe`, two layers, 16 experts, top 2; a quarter of
        its steps in fast mode. The paper follows six layers on WikiText-103; what the curves do is
        not stated in words
    Tested: Reproduced at small scale by a real training run, `tieline train demo-small-smoe`: K(ε)
        from its start to its end, ε from 0.1 to 4; least excess over k after the first look.
    Overturned by: a stage of training without experts near the boundary
    """
    routed = smoothing_course(run, "smoe", tolerances=NEAR_TOLERANCES, share=run.size(4, 1))
    mean = routed.near.mean(dim=1)  # looks, tolerances
    excess = mean[1:, 0] - 2
    steps = routed.steps.double()
    return Evidence.of(
        at_least("least number of other experts within 0.1", excess.min().item(), 0.02),
        at_most("last loss over the first", routed.losses[-1] / routed.losses[0], 0.9),
        paper="present at every stage",
        measured=f"K(0.1) - 2 from {excess.max().item():.2f} to {excess[-1].item():.2f}, K(1) "
        f"{mean[0, 3].item():.1f} to {mean[-1, 3].item():.1f}",
        figure=chart(
            "step",
            "mean number of experts K(ε)",
            *(line(f"ε = {e:g}", steps, mean[:, i]) for i, e in enumerate(NEAR_TOLERANCES)),
        ),
    )


@claim("p1-secB.2", "against SMEAR, Soft MoE and ReMoE")
def smear_soft_moe_remoe(run: ClaimRun) -> Evidence:
    """Soft MoE and SMEAR are smooth but dense and not causal; ReMoE is continuous but does not fix
    the number of experts; smooth top-k is continuous, sparse and causal.

    Setting: the comparison in words, gate by gate, on normal scores
    Tested: Number of experts per token and jumps at ties of each gate on the same scores; influence
        of a later token on an earlier output under Soft MoE's dispatch and under SMEAR, which
        merges the experts' weights by the routing of the whole sequence, and of a token's own
        routing, as a causal form of it; the change of SMEAR's output across a tie.
    Overturned by: a gate with another continuity, sparsity or causality than stated
    """
    scores = run.normal(run.size(5_000, 50_000), 16, stream=1)
    use = {
        name: (gate(scores) > 0).sum(dim=1).double()
        for name, gate in (
            ("softmax", Softmax()),
            ("relu", ReLUGate()),
            ("smooth", SmoothTopK(2, epsilon=0.15)),
        )
    }
    jumps = {
        name: _weight_jump(gate)
        for name, gate in (
            ("top-k", TopK(2)),
            ("relu", ReLUGate()),
            ("smooth", SmoothTopK(2, epsilon=0.15)),
            ("softmax", Softmax()),
        )
    }
    return Evidence.of(
        near("experts of softmax gates", use["softmax"].mean().item(), 16, 0),
        at_least("spread of ReLU's number of experts", use["relu"].std().item(), 1),
        at_most("mean experts of smooth top-k", use["smooth"].mean().item(), 3),
        at_least("least experts of smooth top-k", use["smooth"].min().item(), 2),
        at_most(
            "jump of ReLU, smooth top-k and softmax",
            max(jumps[name] for name in ("relu", "smooth", "softmax")),
            1e-6,
        ),
        at_least("jump of top-k", jumps["top-k"], 0.1),
        at_least("influence of a later token in Soft MoE", _soft_moe_influence(run), 1e-3),
        at_least("influence of a later token in SMEAR", smear_influence(run), 1e-3),
        at_most("the same routed by tokens", smear_influence(run, by_token=True), 1e-12),
        at_most("jump of SMEAR at a tie", smear_jump(run), 1e-6),
        near("experts that SMEAR merges", smear_experts(run), 16, 0),
        paper="a comparison",
        measured=f"{use['smooth'].mean().item():.2f} experts (smooth), "
        f"{use['relu'].mean().item():.2f} ± {use['relu'].std().item():.2f} (ReLU)",
    )


def _weight_jump(gate: torch.nn.Module) -> float:
    """Largest change of a weight between the two sides of a tie at distance 1e-9."""
    base = torch.tensor([[1.0, 0.5, 0.5, -0.3, 0.0]], dtype=torch.float64)
    push = torch.tensor([[0.0, 1.0, -1.0, 0.0, 1.0]], dtype=torch.float64) * 1e-9
    return (gate(base + push) - gate(base - push)).abs().max().item()


def smear_layer(run: ClaimRun) -> Smear:
    """Build a SMEAR layer of 16 drawn experts of width 5 on 6 inputs."""
    layer = Smear(LinearRouter(6, 16), Experts(16, 6, 5, activation="relu")).double()
    layer.requires_grad_(False)
    drawn = (layer.router.get_parameter("weight"), layer.experts.w_in, layer.experts.w_out)
    for stream, parameter in enumerate(drawn, 31):
        parameter.copy_(run.normal(*parameter.shape, stream=stream))
    return layer


def smear_influence(run: ClaimRun, *, by_token: bool = False) -> float:
    """Change of the first token's output when the last token changes.

    By token, every token is a sequence of its own, by whose routing experts are merged.
    """
    x = run.normal(8, 6, stream=2)
    other = x.clone()
    other[-1] += 1.0
    first, second = (smear_layer(run)(t[:, None] if by_token else t)[0] for t in (x, other))
    return (first - second).norm().item()


def smear_jump(run: ClaimRun) -> float:
    """Change of SMEAR's output between the two sides of a tie of its best experts, 1e-9 away."""
    layer, tie, across = smear_layer(run), torch.zeros(1, 6).double(), torch.zeros(1, 6).double()
    tie[0, 0], across[0, 1] = 1.0, 1e-9
    router = layer.router.get_parameter("weight")
    router[:2, 0], router[0, 1], router[1, 1] = 5.0, 1.0, -1.0
    return (layer(tie + across) - layer(tie - across)).norm().item()


def smear_experts(run: ClaimRun) -> float:
    """Least number, over tokens, of experts whose weights enter the merged network."""
    tokens = run.normal(200, 6, stream=34)
    return float((smear_layer(run).weights(tokens[:, None]) > 0).sum(dim=-1).min())


def _soft_moe_influence(run: ClaimRun) -> float:
    """Change of the first token's output of soft MoE with four slots when the last changes."""
    x, slots = run.normal(8, 6, stream=2), run.normal(6, 4, stream=3)
    other = x.clone()
    other[-1] += 1.0
    outputs = []
    for tokens in (x, other):
        logits = tokens @ slots
        mixed = torch.softmax(logits, dim=0).T @ tokens
        outputs.append((torch.softmax(logits, dim=1) @ mixed.tanh())[0])
    return (outputs[1] - outputs[0]).norm().item()
