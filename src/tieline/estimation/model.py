"""Mixture-of-experts regression of papers 2 and 4: function, analytic Jacobian, simulation.

    f(x) = Σ_i G_i(x) h(x, η_i)          P2 eq. 2, 8, 12; P4 eq. 5, 48, 83
    G = softmax(score) or σ(score), score_i = v(β_i)·z(x) + bias_i      `gates`
    h(x, η) = φ(a·x + b) or λ φ(a·x + b)                                `expert_functions`

With s_i the slope of f in score i,

    softmax: s_i = G_i (h_i - f)        sigmoid: s_i = G_i (1 - G_i) h_i
    ∂f/∂bias_i = s_i,   ∂f/∂β_i = s_i ∂score_i/∂β_i,   ∂f/∂η_i = G_i ∂h_i/∂η_i

All functions take parameters with leading axes (repetitions, starts) and inputs (n, d) shared by
all of them or (*batch, n, d).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.estimation import gates
from tieline.estimation.design import LawName, Sample, draw_inputs, draw_noise
from tieline.estimation.expert_functions import EXPERTS, Ridge, ridge_function
from tieline.estimation.gates import GATES, LINKS, GateName, LinkName
from tieline.estimation.parameters import MoEParameters, from_vector

__all__ = ["MoEModel"]

Inputs = Float[Tensor, "*inputs n d"]


class _Pass(NamedTuple):
    """What value and Jacobian share; samples last."""

    columns: Tensor  # (*inputs, d, n)
    features: Tensor  # (*inputs, w, n)
    products: Tensor  # v_i·z (*batch, N, n)
    weights: Tensor  # G_i (*batch, N, n)
    inner: Tensor  # a·x + b (*batch, N, n)
    ridge: Tensor  # φ(inner) (*batch, N, n)
    outputs: Tensor  # h_i (*batch, N, n)


@dataclass(frozen=True)
class MoEModel:
    """A family of mixture-of-experts regressions; its parameters are given to each method.

    Attributes:
        gate: "linear", "cosine", "perturbed", "quadratic" or "partial".
        link: "softmax" or "sigmoid".
        expert: "linear", "polynomial", "relu", "gelu", "tanh" or "two_layer".
        d: width of an input.
        n_experts: number N of experts.
        tau: (τ1, τ2) of the perturbed cosine; the other gates ignore it.
        power: p of polynomial experts.
        activation: φ of two-layer experts.
    """

    gate: GateName
    link: LinkName
    expert: str
    d: int
    n_experts: int
    tau: tuple[float, float] = (0.1, 0.1)
    power: int = 2
    activation: str = "relu"

    def __post_init__(self) -> None:
        require(self.gate in GATES, f"gate must be one of {GATES}, got {self.gate!r}")
        require(self.link in LINKS, f"link must be one of {LINKS}, got {self.link!r}")
        require(self.expert in EXPERTS, f"expert must be one of {EXPERTS}, got {self.expert!r}")
        require(
            self.d >= 1 and self.n_experts >= 1,
            f"need d, n_experts >= 1: {self.d=} {self.n_experts=}",
        )
        require(
            len(self.tau) == 2 and min(self.tau) >= 0, f"tau is two numbers >= 0, got {self.tau}"
        )
        ridge_function(self.expert, self.power, self.activation)

    @property
    def router_width(self) -> int:
        """Numbers in a router row."""
        return gates.router_width(self.gate, self.d)

    @property
    def expert_width(self) -> int:
        """Numbers q in an expert row."""
        return self.d + 1 + (self.expert == "two_layer")

    @property
    def n_parameters(self) -> int:
        """Length p of the flat vector."""
        return self.n_experts * (self.router_width + 1 + self.expert_width)

    @property
    def ridge(self) -> Ridge:
        """φ and its slope."""
        return ridge_function(self.expert, self.power, self.activation)

    def with_experts(self, n_experts: int) -> "MoEModel":
        """The same family with another number of experts."""
        return replace(self, n_experts=n_experts)

    def unflatten(self, vector: Float[Tensor, "*batch p"]) -> MoEParameters:
        """Parameters from vectors [router rows, biases, expert rows]."""
        return from_vector(vector, self.n_experts, self.router_width, self.expert_width)

    def check(self, params: MoEParameters) -> None:
        """Refuse parameters of other widths."""
        found = (params.n_experts, params.router.shape[-1], params.experts.shape[-1])
        wanted = (self.n_experts, self.router_width, self.expert_width)
        require(
            found == wanted,
            f"{self.gate} gate, {self.expert} experts, d={self.d}: experts and widths of router "
            f"and expert rows must be {wanted}, got {found}",
            ShapeError,
        )

    def scores(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n experts"]:
        """v(β_i)·z(x) + bias_i."""
        self.check(params)
        products = self._products(params, gates.input_features(self.gate, x, self._tau[1]))
        return (products + params.bias.unsqueeze(-1)).mT

    def weights(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n experts"]:
        """G_i(x)."""
        return gates.gate_weights(self.link, self.scores(params, x).mT).mT

    def expert_outputs(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n experts"]:
        """h(x, η_i)."""
        return self._experts(params, x.mT)[2].mT

    def regression(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n"]:
        """f(x) for every problem and input."""
        run = self._run(params, x)
        return (run.weights * run.outputs).sum(dim=-2)

    def jacobian(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n p"]:
        """∂f(x)/∂parameters in the order of `flatten`, in closed form.

        It is stored with the samples contiguous; its transpose costs nothing.
        """
        return self.value_and_jacobian(params, x)[1]

    def value_and_jacobian(
        self, params: MoEParameters, x: Inputs
    ) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n p"]]:
        """Value f and its Jacobian from one pass."""
        run = self._run(params, x)
        value = (run.weights * run.outputs).sum(dim=-2)
        n_samples, n, width = x.shape[-2], self.n_experts, self.router_width
        out = run.weights.new_empty((*run.weights.shape[:-2], self.n_parameters, n_samples))
        router, bias, experts = out.split([n * width, n, n * self.expert_width], dim=-2)
        torch.mul(run.weights, self._slopes(run, value), out=bias)
        gradient = gates.score_gradient(
            self.gate, params.router, self._tau[0], run.features, run.products
        )
        torch.mul(bias.unsqueeze(-2), gradient, out=router.unflatten(-2, (n, width)))
        self._write_expert_block(params, run, experts.unflatten(-2, (n, self.expert_width)))
        return value, out.mT

    def chunks(self, n: int, batch: int, limit: int = 2**22) -> Iterator[slice]:
        """Slices of n samples on which a Jacobian of `batch` problems has about `limit` entries."""
        step = max(1, limit // max(1, batch * self.n_parameters))
        for start in range(0, n, step):
            yield slice(start, min(start + step, n))

    def simulate(
        self,
        params: MoEParameters,
        n: int,
        seed: int | Sequence[int],
        *,
        noise: float = 0.1,
        law: LawName = "uniform",
    ) -> Sample:
        """Draw n samples y = f(x) + noise · N(0, 1); with several seeds, one repetition for each.

        Args:
            params: the truth, without leading axes.
            n: samples in a repetition.
            seed: one seed for (n, d), or R seeds for (R, n, d); a repetition depends on its own
                seed and on n alone.
            noise: standard deviation; the papers' variance .01 is 0.1.
            law: "uniform" on [-1, 1]ᵈ as in both papers, or "normal".
        """
        require(n >= 1 and noise >= 0, f"need n >= 1 and noise >= 0, got {n=}, {noise=}")
        x = draw_inputs(law, n, self.d, seed)
        y = self.regression(params, x)
        return Sample(x, y + noise * draw_noise(n, seed), noise)

    @property
    def _tau(self) -> tuple[float, float]:
        return self.tau if self.gate == "perturbed" else (0.0, 0.0)

    def _products(self, params: MoEParameters, features: Tensor) -> Tensor:
        return gates.router_directions(self.gate, params.router, self._tau[0]) @ features

    def _experts(self, params: MoEParameters, columns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a·x + b, φ of it, and h."""
        rows = params.experts
        inner = rows[..., : self.d] @ columns + rows[..., self.d, None]
        value = self.ridge.value(inner)
        scaled = self.expert == "two_layer"
        return inner, value, value * rows[..., self.d + 1, None] if scaled else value

    def _run(self, params: MoEParameters, x: Inputs) -> _Pass:
        self.check(params)
        require(
            x.shape[-1] == self.d and x.dtype == torch.float64,
            f"inputs must be float64 (..., n, {self.d}), got {tuple(x.shape)} {x.dtype}",
            ShapeError,
        )
        columns = x.mT.contiguous()
        features = gates.input_features(self.gate, x, self._tau[1])
        products = self._products(params, features)
        weights = gates.gate_weights(self.link, products + params.bias.unsqueeze(-1))
        return _Pass(columns, features, products, weights, *self._experts(params, columns))

    def _slopes(self, run: _Pass, value: Tensor) -> Tensor:
        """s_i/G_i."""
        if self.link == "softmax":
            return run.outputs - value.unsqueeze(-2)
        return (1 - run.weights) * run.outputs

    def _write_expert_block(self, params: MoEParameters, run: _Pass, out: Tensor) -> None:
        """G_i ∂h_i/∂(a, b[, λ]) into (*batch, N, q, n)."""
        d = self.d
        torch.mul(run.weights, self.ridge.slope(run.inner), out=out[..., d, :])
        if self.expert == "two_layer":
            out[..., d, :].mul_(params.experts[..., d + 1, None])
            torch.mul(run.weights, run.ridge, out=out[..., d + 1, :])
        torch.mul(out[..., d : d + 1, :], run.columns.unsqueeze(-3), out=out[..., :d, :])
