"""Least squares for a mixture of experts: starts, fits, and the number of experts.

Cross-validation chooses the number that predicts best, from a fit for each fold and number; the
dendrogram estimates how many experts there are, from one fit. Both use at most `MOST_ROWS` rows.

Up to `FIRST` rows are fitted at once from every start. With more rows, all starts take
`SCREENING_STEPS` steps on a sample; the best continues on it, on a larger sample and then on all
rows, where it needs few steps, and the others are "set aside". The solver works in rounds of a few
steps. A start ends when the solver has converged or a round lowers the loss by less than the share
`tol` ("converged"), when no step lowers it ("stalled": a kink of the loss), or when the steps run
out ("unfinished").

In the dendrogram the fitted gates G_i stay; the experts are taken as h_i = B_i φ, linear in
features φ, and fitted to the targets by least squares with error e. The dissimilarity of two
experts is what merging them, with the gate G_i + G_j, costs:

    d(i, j) = e(i and j merged) - e

For hard gates and constant experts that is π_i π_j / (π_i + π_j) ‖h_i - h_j‖², π_i = E[G_i], the
dissimilarity of the atoms of a mixing measure (Do, Do, McKinley, Terhorst and Nguyen 2024). The
nearest pair is merged, and so on down to one expert. With e_κ the error of κ experts, the tree is
cut where it is tallest on a logarithmic scale,

    κ* = argmax_{κ >= 2} log(e_{κ-1} / e_κ),

and κ* = 1 if no merger costs as much as the Bayesian information criterion charges for the
parameters of an expert, n log(e_{κ-1} / e_κ) < q log n. Gates are added and not compared: two
experts with equal functions are one expert, wherever their regions lie. All errors come from the
second moments of the columns G_i φ, where a merger adds rows and columns: one pass over the data.

A start is made in three steps. Shares of rows come from a tree of linear models (the first start)
or random directions (the others), followed by steps of expectation-maximisation. The gate is fitted
to the shares by cross entropy for every kind of gate. The experts come from least squares with the
shares as weights; those that are not linear begin at the linear ones. Gate and nonlinear experts
are found by L-BFGS on a penalised loss. The fit that follows minimises the squared error of the
mixture and may undo any of this.

Expectation-maximisation is that of a Gaussian mixture with linear experts B_e, linear softmax gates
π_e(x) and one noise variance s² (Jordan and Jacobs 1994):

    E    r_te ∝ π_e(x_t) exp(-‖y_t - B_e (x_t, 1)‖² / 2s²)
    M    B_e by least squares with weights w_t r_te;  s² the mean squared residual;
         the gates by steps up the lower bound that the curvature Σ w φφᵀ / 2 gives the likelihood

Rows are assigned by the predictions of the experts and not by their position, so the regions need
not be clusters of the inputs.

The tree is grown greedily: of all leaves, features and thresholds it makes the split that most
lowers

    S(leaf) = min_B Σ_{t ∈ leaf} w_t ‖y_t - B (x_t, 1)‖² + λ ‖B‖².

Thresholds are weighted quantiles of the feature in the leaf, and S of all of them comes from the
moments of the bins between them. The tree is deterministic and depends on the rows only through
their weighted distribution: a row of weight 2 counts as two rows, in any order.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from tieline.core.errors import ShapeError, require
from tieline.core.statistics import mean_estimate
from tieline.lab.estimation.model import MoEModel, MoEParameters
from tieline.lab.estimation.solvers import LeastSquares, Status, levenberg_marquardt

LEAST_VARIANCE = 1e-8  # least noise variance, for standardised targets
MOST_TREE_INPUTS = (
    64  # largest input dimension for which a tree is grown: the work grows like its cube
)
LBFGS_STEPS = 60  # steps of L-BFGS
LBFGS_PENALTY = 1e-6  # of squared parameters, beside a mean over rows
EM_RIDGE, GATE_STEPS = 1e-4, 5
"""Expectation-maximisation: penalty of gates and experts, gate steps per iteration."""

Theta = Float[Tensor, "problems p"]
Inputs = Float[Tensor, "problems n d"]
Weights = Float[Tensor, " rows"]


class WeightedRows(NamedTuple):
    """Standardised rows with weights of mean 1: inputs (n, D), targets (n, C), weights (n)."""

    x: Float[Tensor, "rows dim"]
    y: Float[Tensor, "rows outputs"]
    weight: Float[Tensor, " rows"]

    def take(self, index: Tensor) -> "WeightedRows":
        """Select rows by index or mask, and rescale the weights to mean 1."""
        weight = self.weight[index]
        return WeightedRows(self.x[index], self.y[index], weight / weight.mean())


@dataclass(frozen=True)
class SharedGate:
    """A mixture with C outputs, f_c(x) = Σ_i G_i(x) h(x, η_ic), for the solvers.

    Outputs share the gate and have experts of their own. A parameter vector is [router rows,
    biases, expert rows of output 1, ..., expert rows of output C]; for C = 1 that of `MoEModel`.
    Value and Jacobian are computed output by output.
    """

    model: MoEModel  # gate, link and experts of one output
    outputs: int = 1  # C

    @property
    def gate_size(self) -> int:
        """Parameters of the gate."""
        return self.model.n_experts * (self.model.router_dim + 1)

    @property
    def size(self) -> int:
        """Length p of a parameter vector."""
        return self.gate_size + self.outputs * self.model.n_experts * self.model.expert_dim

    def parameters(self, theta: Theta) -> MoEParameters:
        """Parameters of every output, (problems, C, ...); the gate is the same in all of them."""
        gate, experts = theta[:, None, : self.gate_size], theta[:, self.gate_size :]
        rows = experts.unflatten(1, (self.outputs, -1))
        return self.model.unflatten(torch.cat([gate.expand(-1, self.outputs, -1), rows], dim=2))

    def value(self, theta: Theta, x: Inputs) -> Float[Tensor, "problems n outputs"]:
        """Compute f of every problem, input and output."""
        return self.model.regression(self.parameters(theta), self._inputs_per_output(x)).mT

    def value_and_jacobian(
        self, theta: Theta, x: Inputs
    ) -> tuple[Float[Tensor, "problems n outputs"], Float[Tensor, "problems n outputs p"]]:
        """Compute f and its Jacobian; an output does not depend on the experts of the others."""
        value, jacobian = self.model.value_and_jacobian(
            self.parameters(theta), self._inputs_per_output(x)
        )
        if self.outputs == 1:
            return value.mT, jacobian.transpose(1, 2)
        full_jacobian = theta.new_zeros(len(theta), x.shape[1], self.outputs, self.size)
        per_output = (self.size - self.gate_size) // self.outputs
        for output in range(self.outputs):
            first = self.gate_size + output * per_output
            full_jacobian[:, :, output, : self.gate_size] = jacobian[:, output, :, : self.gate_size]
            full_jacobian[:, :, output, first : first + per_output] = jacobian[
                :, output, :, self.gate_size :
            ]
        return value.mT, full_jacobian

    def _inputs_per_output(self, x: Inputs) -> Float[Tensor, "problems outputs n d"]:
        """Repeat the inputs for every output."""
        return x.unsqueeze(1).expand(-1, self.outputs, -1, -1)


class Responsibilities(NamedTuple):
    """Result of expectation-maximisation."""

    share: Float[Tensor, "rows experts"]  # r (n, E), rows sum to 1
    experts: Float[Tensor, "experts inputs outputs"]  # B (E, D + 1, C), the constant last
    gate: Float[Tensor, "inputs experts"]  # linear gate (D + 1, E), the constant last
    variance: float  # s²


def mixture_starts(
    regression: SharedGate, rows: WeightedRows, starts: int, generator: torch.Generator
) -> Float[Tensor, "starts p"]:
    """Return parameter vectors to start from; the first does not depend on the generator."""
    vectors, model, (x, y, weight) = [], regression.model, rows
    for number in range(starts):
        directions = torch.randn(
            x.shape[1] + 1, model.n_experts, dtype=x.dtype, generator=generator
        )
        if number == 0 and x.shape[1] <= MOST_TREE_INPUTS:
            leaves = linear_tree(x, y, weight, model.n_experts)
            first = one_hot(leaves, model.n_experts).to(x)
        else:
            first = (x @ directions[:-1] + directions[-1]).softmax(dim=1)
        shares = responsibilities(x, y, weight, first)
        gate = _start_gate(model, rows, shares.share)
        experts = _start_experts(model, rows, shares)
        vectors.append(torch.cat([gate.router.flatten(), gate.bias, experts.flatten()]))
    return torch.stack(vectors)


def _start_gate(model: MoEModel, rows: WeightedRows, share: Tensor) -> MoEParameters:
    """Fit the gate to the shares by cross entropy."""
    n, dim, q = model.n_experts, model.router_dim, model.expert_dim
    none = share.new_zeros(n, q)
    mass = rows.weight[:, None] * share
    generator = torch.Generator().manual_seed(0)
    spread = 0.1 + 0.9 * torch.rand(n, dim, dtype=share.dtype, generator=generator)
    begin = torch.cat([(spread - spread.mean(dim=0)).flatten(), mass.mean(dim=0).log().clamp(-9)])

    def gate_cross_entropy(vector: Tensor) -> Tensor:
        router, bias = vector[: n * dim].unflatten(0, (n, dim)), vector[n * dim :]
        scores = model.scores(MoEParameters(router, bias, none), rows.x)
        if model.link == "softmax":
            return -(mass * scores.log_softmax(dim=1)).sum() / len(mass)
        total = binary_cross_entropy_with_logits(
            scores, share, weight=rows.weight[:, None], reduction="sum"
        )
        return total / len(mass)

    solution = _minimise_by_lbfgs(gate_cross_entropy, begin)
    return MoEParameters(solution[: n * dim].unflatten(0, (n, dim)), solution[n * dim :], none)


def _start_experts(model: MoEModel, rows: WeightedRows, shares: Responsibilities) -> Tensor:
    """Fit expert rows (C, N, q) by least squares with the shares as weights."""
    linear = shares.experts.permute(2, 0, 1)
    if model.expert == "linear":
        return linear
    ones = torch.ones_like(linear[..., :1])
    begin = torch.cat([linear, ones], dim=2) if model.expert == "two_layer" else linear
    shape = begin.shape
    mass = rows.weight[:, None] * shares.share

    def weighted_square_error(vector: Tensor) -> Tensor:
        experts = vector.unflatten(0, shape)
        gate = MoEParameters(torch.zeros_like(experts), torch.zeros_like(experts[..., 0]), experts)
        outputs = model.expert_outputs(gate, rows.x)  # (C, n, N)
        return (mass * (rows.y.mT[:, :, None] - outputs).square()).sum() / len(mass)

    return _minimise_by_lbfgs(weighted_square_error, begin.flatten()).unflatten(0, shape)


def _minimise_by_lbfgs(loss: Callable[[Tensor], Tensor], begin: Tensor) -> Tensor:
    """Minimise the penalised loss by L-BFGS; return `begin` if the end is not finite."""

    def value_and_gradient(array):
        vector = torch.tensor(array, dtype=torch.float64, requires_grad=True)
        value = loss(vector) + LBFGS_PENALTY * vector.square().sum()
        (gradient,) = torch.autograd.grad(value, vector)
        return value.item(), gradient.numpy()

    options = {"maxiter": LBFGS_STEPS}
    solution = minimize(
        value_and_gradient, begin.numpy(), jac=True, method="L-BFGS-B", options=options
    )
    end = torch.tensor(solution.x, dtype=torch.float64)
    return end if bool(end.isfinite().all()) else begin


def responsibilities(
    x: Float[Tensor, "rows dim"],
    y: Float[Tensor, "rows outputs"],
    weight: Float[Tensor, " rows"],
    start: Float[Tensor, "rows experts"],
    *,
    iterations: int = 40,
) -> Responsibilities:
    """Shares r of standardised rows after `iterations` of expectation-maximisation.

    The rows of `start` sum to 1.
    """
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    mass = weight / weight.sum()
    eye = torch.eye(design.shape[1], dtype=x.dtype)
    curvature = 0.5 * (design * mass[:, None]).mT @ design + EM_RIDGE * eye
    factor = torch.linalg.cholesky(curvature)
    share, gate = start, x.new_zeros(design.shape[1], start.shape[1])
    experts, variance = _linear_experts(design, y, mass[:, None] * share), LEAST_VARIANCE
    for _ in range(iterations):
        for _ in range(GATE_STEPS):
            error = mass[:, None] * (share - (design @ gate).softmax(dim=1))
            gate = gate + torch.cholesky_solve(design.mT @ error - EM_RIDGE * gate, factor)
        squares = (y - design @ experts).square().sum(dim=2).mT  # ‖y - B_e (x, 1)‖² (n, E)
        variance = max((mass[:, None] * share * squares).sum().item() / y.shape[1], LEAST_VARIANCE)
        share = ((design @ gate).log_softmax(dim=1) - squares / (2 * variance)).softmax(dim=1)
        experts = _linear_experts(design, y, mass[:, None] * share)
    return Responsibilities(share, experts, gate, variance)


def _linear_experts(design: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    """Fit B_e by weighted least squares, (E, D + 1, C)."""
    weighted = mass.mT[:, :, None] * design  # (E, n, D + 1)
    gram = weighted.mT @ design
    eye = torch.eye(design.shape[1], dtype=design.dtype)
    size = mass.sum(dim=0)[:, None, None].clamp(min=1e-12)
    return torch.linalg.solve(gram + EM_RIDGE * size * eye + 1e-12 * eye, weighted.mT @ y)


class _Split(NamedTuple):
    """The best split of a leaf; `feature` is -1 if no split lowers S."""

    gain: float = 0.0
    feature: int = -1
    threshold: float = 0.0


def linear_tree(
    x: Float[Tensor, "rows dim"],
    y: Float[Tensor, "rows outputs"],
    weight: Weights,
    leaves: int,
    *,
    cuts: int = 15,
    ridge: float = 1e-3,
) -> Int[Tensor, " rows"]:
    """Return the leaf of each row, 0, 1, ...; fewer than `leaves` if no split helps.

    Weights are positive; `cuts` thresholds are tried per feature; `ridge` is λ over the mean square
    of the design, so that small leaves have models too.
    """
    rows = torch.cat([x, torch.ones_like(x[:, :1]), y], dim=1)
    least = (x.shape[1] + 1) * weight.sum() / len(weight)
    leaf = torch.zeros(len(x), dtype=torch.long)
    splits = [_best_split(rows, weight, y.shape[1], least, cuts, ridge)]
    while len(splits) < leaves:
        widest = max(range(len(splits)), key=lambda number: splits[number].gain)
        split = splits[widest]
        if split.feature < 0:
            break
        leaf[(leaf == widest) & (x[:, split.feature] > split.threshold)] = len(splits)
        splits.append(_Split())
        for number in (widest, len(splits) - 1):
            inside = leaf == number
            splits[number] = _best_split(
                rows[inside], weight[inside], y.shape[1], least, cuts, ridge
            )
    return leaf


def weighted_quantiles(
    values: Float[Tensor, " rows"], weight: Weights, levels: Float[Tensor, " levels"]
) -> Float[Tensor, " levels"]:
    """Weighted quantiles: the smallest value whose cumulative weight reaches each level."""
    ordered, order = values.sort(stable=True)
    mass = weight[order].cumsum(dim=0)
    goal = levels * mass[-1] * (1 - 1e-12)  # so that rounding does not move on by one row
    return ordered[torch.searchsorted(mass, goal).clamp(max=len(values) - 1)]


def _best_split(
    rows: Tensor, weight: Tensor, outputs: int, least: Tensor, cuts: int, ridge: float
) -> _Split:
    """Find the split of rows (x, 1, y) that lowers S most, with weight `least` on either side."""
    if weight.sum() < 2 * least:
        return _Split()
    total = (rows * weight[:, None]).mT @ rows
    penalty = ridge * total.diagonal()[:-outputs].mean()
    before, best = least_residual(total, outputs, penalty), _Split()
    levels = torch.arange(1, cuts + 1, dtype=rows.dtype) / (cuts + 1)
    for feature in range(rows.shape[1] - outputs - 1):
        column = rows[:, feature].contiguous()
        thresholds = weighted_quantiles(column, weight, levels).unique()
        lower, mass = _moments_below(rows, weight, column, thresholds)
        after = least_residual(lower, outputs, penalty) + least_residual(
            total - lower, outputs, penalty
        )
        allowed = (mass >= least) & (weight.sum() - mass >= least)
        gain = (before - after).where(allowed, 0.0)
        top = int(gain.argmax())
        if gain[top] > best.gain * (1 + 1e-9):
            best = _Split(gain[top].item(), feature, thresholds[top].item())
    return best


def _moments_below(
    rows: Tensor, weight: Tensor, column: Tensor, thresholds: Tensor
) -> tuple[Tensor, Tensor]:
    """Moments Σ w z zᵀ and weights Σ w of the rows up to each threshold."""
    bins, order = torch.bucketize(column, thresholds).sort(stable=True)
    ends = torch.searchsorted(bins, torch.arange(len(thresholds)), right=True)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    last = int(ends[-1])
    bins_of_rows = zip(
        rows[order][:last].split(sizes), weight[order][:last].split(sizes), strict=True
    )
    moments, masses = zip(
        *(((z * w[:, None]).mT @ z, w.sum()) for z, w in bins_of_rows), strict=True
    )
    return torch.stack(moments).cumsum(dim=0), torch.stack(masses).cumsum(dim=0)


def least_residual(moments: Tensor, outputs: int, penalty: Tensor | float) -> Tensor:
    """Least Σ w ‖y - B φ‖² + λ‖B‖² over B, from the moments (..., p + C, p + C) of (φ, y)."""
    gram, cross = moments[..., :-outputs, :-outputs], moments[..., :-outputs, -outputs:]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    solved = torch.linalg.solve(gram + penalty * eye, cross)
    squares = moments[..., -outputs:, -outputs:].diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return squares - (solved * cross).sum(dim=(-2, -1))


FIRST, SECOND = 4096, 16384  # rows of the first and the second sample
MOST_ROWS = 4096  # rows that choose the number of experts
SCREENING_STEPS = 20  # steps after which the starts on a sample are compared
SAMPLE_TOLERANCE = 1e-2  # tolerance on samples, which later fits to more rows correct
STEPS_PER_ROUND = 5  # steps of a round
SUCCESSFUL_ENDS = ("converged", "set aside")
RIDGE, FEW_ROWS_RIDGE = 1e-10, 1e-3
"""Penalties in standard units: a negligible one, and one for too few rows."""
MERGE_RIDGE = 1e-9  # penalty of merged experts beside a mean over rows
PARAMETER_BOX = 3e3  # bound on standardised parameters: a wall between two experts may be sharp
LEAST_ERROR = 1e-12
"""Least mean squared error, in standard units: the logarithm of an exact fit is finite."""

Moments = Float[Tensor, "columns columns"]
Fold = tuple[Int[Tensor, " train"], Int[Tensor, " test"]]


@dataclass(frozen=True)
class FitSettings:
    """Settings of a fit."""

    starts: int = 4  # how many are tried
    max_iter: int = 200  # steps of a start on each sample of rows
    tol: float = 1e-3  # a round that lowers the loss by less than this share of it is the last
    # λ of the penalty λ‖θ‖² beside the mean squared error, in standard units; None for
    # `RIDGE`, or `FEW_ROWS_RIDGE` where there are fewer targets than parameters
    ridge: float | None = None
    seed: int = 0  # of starts and samples

    def penalty(self, regression: SharedGate, rows: WeightedRows) -> float:
        """Return λ for these rows."""
        if self.ridge is not None:
            return self.ridge
        return FEW_ROWS_RIDGE if rows.y.numel() < regression.size else RIDGE


@dataclass(frozen=True)
class MixtureFit:
    """The best fit, and the status of all starts."""

    theta: Float[Tensor, " p"]  # parameters of `SharedGate`, in standard units
    error: float  # mean squared error over rows and outputs, in standard units, without the penalty
    status: str  # how the best fit ended on all rows
    starts: tuple[str, ...]  # how every start ended on the rows it was fitted to
    iterations: int  # steps of the best fit, on all samples together

    @property
    def failed(self) -> int:
        """Starts that did not converge."""
        return sum(word not in SUCCESSFUL_ENDS for word in self.starts)

    def failures(self) -> str:
        """Describe the starts that did not converge, as "2 unfinished, 1 stalled"."""
        ends = Counter(word for word in self.starts if word not in SUCCESSFUL_ENDS)
        return ", ".join(f"{count} {word}" for word, count in ends.items())


@dataclass(frozen=True)
class _RefinedStarts:
    """Parameters, penalised loss per row, status and steps of each start."""

    theta: Float[Tensor, "starts p"]
    loss: Float[Tensor, " starts"]
    status: tuple[str, ...]
    iterations: tuple[int, ...]

    def select(self, index: int) -> "_RefinedStarts":
        """Keep the start with this index."""
        row = slice(index, index + 1)
        return _RefinedStarts(
            self.theta[row], self.loss[row], self.status[row], self.iterations[row]
        )


def fit_mixture(regression: SharedGate, rows: WeightedRows, settings: FitSettings) -> MixtureFit:
    """Fit standardised rows from several starts; return the best fit."""
    generator = torch.Generator().manual_seed(settings.seed)
    order = torch.randperm(len(rows.x), generator=generator)
    sample = _first_rows(rows, order, FIRST)
    all_rows = len(sample.x) == len(rows.x)
    starts = mixture_starts(regression, sample, settings.starts, generator)
    first = (
        settings
        if all_rows
        else replace(settings, max_iter=min(SCREENING_STEPS, settings.max_iter))
    )
    refined = _refine_starts(regression, sample, starts, first)
    best = int(refined.loss.nan_to_num(nan=torch.inf).argmin())
    best_start = refined.select(best)
    if not all_rows:
        best_start = _refine_on_more_rows(regression, rows, order, best_start, settings)
    others = refined.status if all_rows else ("set aside",) * len(starts)
    ends = (*others[:best], best_start.status[0], *others[best + 1 :])
    problem, which = _least_squares(regression, rows, 0.0, 1), torch.zeros(1, dtype=torch.long)
    error = problem.loss(best_start.theta, which).item() / rows.y.numel()
    return MixtureFit(
        best_start.theta[0], error, best_start.status[0], ends, best_start.iterations[0]
    )


def _refine_on_more_rows(
    regression: SharedGate,
    rows: WeightedRows,
    order: Tensor,
    start: _RefinedStarts,
    settings: FitSettings,
) -> _RefinedStarts:
    """Refine the best start on samples of growing size and then on all rows."""
    coarse = replace(settings, tol=max(settings.tol, SAMPLE_TOLERANCE))
    for size in sorted({FIRST, min(SECOND, len(rows.x)), len(rows.x)}):
        size_settings = settings if size == len(rows.x) else coarse
        refined = _refine_starts(
            regression, _first_rows(rows, order, size), start.theta, size_settings
        )
        start = replace(refined, iterations=(start.iterations[0] + refined.iterations[0],))
    return start


def _first_rows(rows: WeightedRows, order: Tensor, size: int) -> WeightedRows:
    """Select the first `size` rows of the order, or all."""
    return rows if size >= len(order) else rows.take(order[:size])


def _refine_starts(
    regression: SharedGate,
    rows: WeightedRows,
    theta: Float[Tensor, "starts p"],
    settings: FitSettings,
) -> _RefinedStarts:
    """Run rounds of the solver until every start has ended."""
    penalty, running = settings.penalty(regression, rows), list(range(len(theta)))
    status, steps = ["unfinished"] * len(theta), [0] * len(theta)
    theta = theta.clone()
    loss = _least_squares(regression, rows, penalty, len(theta)).loss(theta, torch.tensor(running))
    while running:
        problem = _least_squares(regression, rows, penalty, len(running))
        remaining_steps = settings.max_iter - max(steps[start] for start in running)
        minimum = levenberg_marquardt(
            problem,
            theta[running],
            iterations=min(STEPS_PER_ROUND, remaining_steps),
            box=PARAMETER_BOX,
        )
        for row, start in enumerate(tuple(running)):
            gain = loss[start] - minimum.loss[row]
            theta[start], loss[start] = minimum.theta[row], minimum.loss[row]
            steps[start] += int(minimum.iterations[row])
            ended = Status(int(minimum.status[row]))
            answered = ended.answered or gain <= settings.tol * minimum.loss[row]
            status[start] = "converged" if answered else ended.name.lower()
            if status[start] != "unfinished" or steps[start] >= settings.max_iter:
                running.remove(start)
    return _RefinedStarts(theta, loss / len(rows.x), tuple(status), tuple(steps))


def _least_squares(
    regression: SharedGate, rows: WeightedRows, ridge: float, starts: int
) -> LeastSquares:
    """The penalised least-squares problem of weighted rows."""
    penalty = ridge * len(rows.x)
    return LeastSquares(
        regression, rows.x[None], rows.y[None], rows.weight[None], ridge=penalty, starts=starts
    )


@dataclass(frozen=True)
class ExpertCurve:
    """Error on held-out rows by the number of experts."""

    experts: tuple[int, ...]  # the numbers tried
    errors: tuple[float, ...]  # mean over folds of the mean squared error, in standard units
    standard_errors: tuple[float, ...]  # of these means, over folds
    chosen: int  # the smallest number within one standard error of the least error


def sample_rows(rows: WeightedRows, seed: int) -> WeightedRows:
    """Sample at most `MOST_ROWS` rows."""
    if len(rows.x) <= MOST_ROWS:
        return rows
    order = torch.randperm(len(rows.x), generator=torch.Generator().manual_seed(seed))
    return rows.take(order[:MOST_ROWS])


def cross_validation_curve(
    model: MoEModel, rows: WeightedRows, most: int, folds: Iterable[Fold], settings: FitSettings
) -> ExpertCurve:
    """Cross-validated errors for 1, ..., `most` experts, over folds (train rows, test rows).

    The model's own number of experts is not used; numbers above the rows of a fold are left out.
    """
    folds = list(folds)
    most = min([most, *(len(train) for train, _ in folds)])
    errors = [
        [_held_out_error(model.with_experts(count), rows, fold, settings) for fold in folds]
        for count in range(1, most + 1)
    ]
    estimates = [mean_estimate(torch.tensor(row, dtype=torch.float64)) for row in errors]
    means = tuple(estimate.value or 0.0 for estimate in estimates)
    spreads = tuple(estimate.standard_error or 0.0 for estimate in estimates)
    best = min(range(most), key=means.__getitem__)
    choice = next(index for index in range(most) if means[index] <= means[best] + spreads[best])
    return ExpertCurve(tuple(range(1, most + 1)), means, spreads, choice + 1)


def fit_dendrogram(
    model: MoEModel, rows: WeightedRows, most: int, settings: FitSettings
) -> "Dendrogram":
    """Fit `most` experts and compute their dendrogram."""
    regression = SharedGate(model.with_experts(most), rows.y.shape[1])
    fit = fit_mixture(regression, rows, settings)
    parameters = regression.parameters(fit.theta[None])[0]
    gates = regression.model.weights(parameters, rows.x)[0]
    ones = torch.ones_like(rows.x[:, :1])
    if model.expert == "linear":
        features = torch.cat([rows.x, ones], dim=1)
    else:  # merged experts are combinations of those that were fitted
        outputs = regression.model.expert_outputs(parameters, rows.x)
        features = torch.cat([outputs.transpose(0, 1).flatten(1), ones], dim=1)
    size = model.router_dim + 1 + rows.y.shape[1] * model.expert_dim
    return expert_dendrogram(gates, features, rows.y, rows.weight, size)


def _held_out_error(
    model: MoEModel, rows: WeightedRows, fold: Fold, settings: FitSettings
) -> float:
    """Weighted mean squared error on the test rows of a fold."""
    train, test = rows.take(fold[0]), rows.take(fold[1])
    regression = SharedGate(model, rows.y.shape[1])
    fit = fit_mixture(regression, train, settings)
    residual = test.y - regression.value(fit.theta[None], test.x[None])[0]
    return (test.weight[:, None] * residual.square()).mean().item()


@dataclass(frozen=True)
class Dendrogram:
    """Levels κ = K, K - 1, ..., 1 of merging."""

    experts: tuple[int, ...]  # κ of each level
    errors: tuple[float, ...]  # mean squared error with κ experts left, in standard units
    heights: tuple[float, ...]  # d of the two experts that are merged after each level but the last
    merged: tuple[tuple[int, int], ...]  # these experts, by their places at that level
    chosen: int  # κ*


def expert_dendrogram(
    gates: Float[Tensor, "rows experts"],
    features: Float[Tensor, "rows features"],
    y: Float[Tensor, "rows outputs"],
    weight: Float[Tensor, " rows"],
    parameters: int,
) -> Dendrogram:
    """Compute the dendrogram of a fitted mixture on its rows, with weights of mean 1.

    Gates are G, features φ, (x, 1) for linear experts; `parameters` is q, those of an expert with
    its row of the gate.
    """
    count, outputs, dim = gates.shape[1], y.shape[1], features.shape[1]
    require(count >= 2, f"two experts or more are needed, got {count}", ShapeError)
    columns = torch.cat([(gates[:, :, None] * features[:, None, :]).flatten(1), y], dim=1)
    moments = (columns * weight[:, None]).mT @ columns / len(y)
    errors, merged = [_merged_error(moments, outputs)], []
    for level_experts in range(count, 1, -1):
        pairs = list(itertools.combinations(range(level_experts), 2))
        merged_errors = [
            _merged_error(_merge_columns(moments, dim, *pair), outputs) for pair in pairs
        ]
        best = min(range(len(pairs)), key=merged_errors.__getitem__)
        moments = _merge_columns(moments, dim, *pairs[best])
        errors.append(merged_errors[best])
        merged.append(pairs[best])
    heights = tuple(high - low for low, high in itertools.pairwise(errors))
    levels = tuple(range(count, 0, -1))
    logs = [math.log(max(error, LEAST_ERROR)) for error in errors]
    rises = [high - low for low, high in itertools.pairwise(logs)]
    tallest = max(range(len(rises)), key=lambda level: (rises[level], level))
    worth = rises[tallest] >= parameters * math.log(len(y)) / len(y)
    best_count = levels[tallest] if worth else 1
    return Dendrogram(levels, tuple(errors), heights, tuple(merged), best_count)


def _merged_error(moments: Moments, outputs: int) -> float:
    """Mean squared error over outputs of the experts that fit best."""
    return (least_residual(moments, outputs, MERGE_RIDGE) / outputs).item()


def _merge_columns(
    moments: Moments, dim: int, first: int, second: int
) -> Float[Tensor, "left left"]:
    """Add the columns of expert `second` to those of `first` in the moments."""
    target, source = (slice(expert * dim, (expert + 1) * dim) for expert in (first, second))
    rows = moments.clone()
    rows[target] += moments[source]
    rows[:, target] += rows[:, source]
    remaining = torch.ones(len(moments), dtype=torch.bool)
    remaining[source] = False
    return rows[remaining][:, remaining]
