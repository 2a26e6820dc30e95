"""Starts of a fit of a mixture of experts: from shares of rows to parameters.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from scipy.optimize import minimize
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from tieline.lab.estimation.model import MoEModel, MoEParameters

SMALLEST = 1e-8  # least noise variance, for standardised targets
WIDEST_TREE = 64  # largest input dimension for which a tree is grown: the work grows like its cube
STEPS = 60  # steps of L-BFGS
PENALTY = 1e-6  # of squared parameters, beside a mean over rows
EM_RIDGE, GATE_STEPS = 1e-4, 5
"""Of expectation-maximisation: penalty of gates and experts, steps of the gate per iteration."""

Theta = Float[Tensor, "problems p"]
Inputs = Float[Tensor, "problems n d"]
Weights = Float[Tensor, " rows"]


class WeightedRows(NamedTuple):
    """Standardised rows with weights of mean 1: inputs (n, D), targets (n, C), weights (n)."""

    x: Float[Tensor, "rows dim"]
    y: Float[Tensor, "rows outputs"]
    weight: Float[Tensor, " rows"]

    def take(self, index: Tensor) -> "WeightedRows":
        """The rows of an index or mask, with weights of mean 1 again."""
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
        return self.model.regression(self.parameters(theta), self._once_per_output(x)).mT

    def value_and_jacobian(
        self, theta: Theta, x: Inputs
    ) -> tuple[Float[Tensor, "problems n outputs"], Float[Tensor, "problems n outputs p"]]:
        """Compute f and its Jacobian; an output does not depend on the experts of the others."""
        value, jacobian = self.model.value_and_jacobian(
            self.parameters(theta), self._once_per_output(x)
        )
        if self.outputs == 1:
            return value.mT, jacobian.transpose(1, 2)
        full_jacobian = theta.new_zeros(len(theta), x.shape[1], self.outputs, self.size)
        each = (self.size - self.gate_size) // self.outputs
        for output in range(self.outputs):
            first = self.gate_size + output * each
            full_jacobian[:, :, output, : self.gate_size] = jacobian[:, output, :, : self.gate_size]
            full_jacobian[:, :, output, first : first + each] = jacobian[
                :, output, :, self.gate_size :
            ]
        return value.mT, full_jacobian

    def _once_per_output(self, x: Inputs) -> Float[Tensor, "problems outputs n d"]:
        """The inputs once for every output."""
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
    """Return parameter vectors to start from; the first is the same for every generator."""
    vectors, model = [], regression.model
    for number in range(starts):
        shares = _start_shares(model, rows, number, generator)
        gate = _start_gate(model, rows, shares.share)
        experts = _start_experts(model, rows, shares)
        vectors.append(torch.cat([gate.router.flatten(), gate.bias, experts.flatten()]))
    return torch.stack(vectors)


def _start_shares(
    model: MoEModel, rows: WeightedRows, number: int, generator: torch.Generator
) -> Responsibilities:
    """Shares of the rows, from a tree for the first start and random directions for the others."""
    x, y, weight = rows
    experts = model.n_experts
    directions = torch.randn(x.shape[1] + 1, experts, dtype=x.dtype, generator=generator)
    if number == 0 and x.shape[1] <= WIDEST_TREE:
        start = one_hot(linear_tree(x, y, weight, experts), experts).to(x)
    else:
        start = (x @ directions[:-1] + directions[-1]).softmax(dim=1)
    return responsibilities(x, y, weight, start)


def _start_gate(model: MoEModel, rows: WeightedRows, share: Tensor) -> MoEParameters:
    """The gate whose weights are nearest to the shares in cross entropy."""
    n, dim, q = model.n_experts, model.router_dim, model.expert_dim
    none = share.new_zeros(n, q)
    mass = rows.weight[:, None] * share
    fixed = torch.Generator().manual_seed(0)
    spread = 0.1 + 0.9 * torch.rand(n, dim, dtype=share.dtype, generator=fixed)
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
    """Expert rows (C, N, q) by least squares with the shares as weights."""
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
        value = loss(vector) + PENALTY * vector.square().sum()
        (gradient,) = torch.autograd.grad(value, vector)
        return value.item(), gradient.numpy()

    options = {"maxiter": STEPS}
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
    experts, variance = _linear_experts(design, y, mass[:, None] * share), SMALLEST
    for _ in range(iterations):
        for _ in range(GATE_STEPS):
            error = mass[:, None] * (share - (design @ gate).softmax(dim=1))
            gate = gate + torch.cholesky_solve(design.mT @ error - EM_RIDGE * gate, factor)
        squares = (y - design @ experts).square().sum(dim=2).mT  # ‖y - B_e (x, 1)‖² (n, E)
        variance = max((mass[:, None] * share * squares).sum().item() / y.shape[1], SMALLEST)
        share = ((design @ gate).log_softmax(dim=1) - squares / (2 * variance)).softmax(dim=1)
        experts = _linear_experts(design, y, mass[:, None] * share)
    return Responsibilities(share, experts, gate, variance)


def _linear_experts(design: Tensor, y: Tensor, mass: Tensor) -> Tensor:
    """B_e by weighted least squares, (E, D + 1, C)."""
    weighted = mass.mT[:, :, None] * design  # (E, n, D + 1)
    gram = weighted.mT @ design
    eye = torch.eye(design.shape[1], dtype=design.dtype)
    size = mass.sum(dim=0)[:, None, None].clamp(min=1e-12)
    return torch.linalg.solve(gram + EM_RIDGE * size * eye + 1e-12 * eye, weighted.mT @ y)


class _Split(NamedTuple):
    """The best split of a leaf; `feature` is -1 where none helps."""

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
    """Return the leaf of each row, 0, 1, ...; fewer leaves than asked for if no split helps.

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
    """Smallest value whose cumulated weight reaches each level; repeats count as weight does."""
    ordered, order = values.sort(stable=True)
    mass = weight[order].cumsum(dim=0)
    goal = levels * mass[-1] * (1 - 1e-12)  # so that rounding does not move on by one row
    return ordered[torch.searchsorted(mass, goal).clamp(max=len(values) - 1)]


def _best_split(
    rows: Tensor, weight: Tensor, outputs: int, least: Tensor, cuts: int, ridge: float
) -> _Split:
    """The split of these rows (x, 1, y) that lowers S most, with `least` weight on either side."""
    if weight.sum() < 2 * least:
        return _Split()
    total = (rows * weight[:, None]).mT @ rows
    penalty = ridge * total.diagonal()[:-outputs].mean()
    before, best = least_residual(total, outputs, penalty), _Split()
    levels = torch.arange(1, cuts + 1, dtype=rows.dtype) / (cuts + 1)
    for feature in range(rows.shape[1] - outputs - 1):
        column = rows[:, feature].contiguous()
        thresholds = weighted_quantiles(column, weight, levels).unique()
        left, mass = _moments_below(rows, weight, column, thresholds)
        after = least_residual(left, outputs, penalty) + least_residual(
            total - left, outputs, penalty
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
    """Σ w z zᵀ and Σ w over the rows up to each threshold."""
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
    """min_B Σ w ‖y - B φ‖² + λ‖B‖² from the moments (..., p + C, p + C) of (φ, y)."""
    gram, cross = moments[..., :-outputs, :-outputs], moments[..., :-outputs, -outputs:]
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    solved = torch.linalg.solve(gram + penalty * eye, cross)
    squares = moments[..., -outputs:, -outputs:].diagonal(dim1=-2, dim2=-1).sum(dim=-1)
    return squares - (solved * cross).sum(dim=(-2, -1))
