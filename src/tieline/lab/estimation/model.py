"""Mixture-of-experts regression of papers 2 and 4: parameters, function, Jacobian, simulation.

    f(x) = Σ_i G_i(x) h(x, η_i)          P2 eq. 2, 8, 12; P4 eq. 5, 48, 83
    G = softmax(score) or σ(score),   score_i = v(β_i)·z(x) + bias_i

Gates are linear routers on features:

    gate         z(x)                 v(β)                      paper
    linear       x                    β
    cosine       x/‖x‖                β/‖β‖                     2, eq. 2
    perturbed    x/(‖x‖ + τ2)         β/(‖β‖ + τ1)              2, eq. 8
    quadratic    [vec xxᵀ, x]         [vec A, b]                4, eq. 5 (i)
    partial      vec xxᵀ              vec A                     4, eq. 5 (ii)

So the perturbed cosine router *is* a linear router, on x/(‖x‖ + τ2) with rows in the unit ball, and
has the symmetries of one. A zero row or input scores 0 under the vanilla cosine, which has no
derivative there; its slope is taken to be 0.

Experts h(x, η) are ridge functions of u = a·x + b:

    linear        u                        η = (a, b)
    polynomial    uᵖ                       η = (a, b)
    relu          max(u, 0)                η = (a, b)
    gelu          u Φ(u)                   η = (a, b)
    tanh          tanh u                   η = (a, b)
    two_layer     λ φ(u), φ one of the above except polynomial      η = (a, b, λ)

Parameters are one row of router, bias and expert per atom, with leading axes for repetitions and
starts, (*batch, N, ...). A router row is β_1 (d numbers) or the flat coefficients of a quadratic
score, vec A by rows: [vec A, b] of d² + d numbers (quadratic), vec A of d² (partial). They stand
for the measures

    softmax link (paper 2)    G = Σ_i exp(β_0i) δ(β_1i, η_i)       mass exp(bias)
    sigmoid link (paper 4)    G = Σ_i σ(c_i) δ(A_i, b_i, η_i)      mass σ(bias)

With s_i the slope of f in score i,

    softmax: s_i = G_i (h_i - f)        sigmoid: s_i = G_i (1 - G_i) h_i
    ∂f/∂bias_i = s_i,   ∂f/∂β_i = s_i ∂score_i/∂β_i,   ∂f/∂η_i = G_i ∂h_i/∂η_i

All functions take parameters with leading axes (repetitions, starts) and inputs (n, d) shared by
all of them or (*batch, n, d). Arrays are held with the samples last, (..., N, n): for small d a
sweep over the samples is contiguous and one over d is not. Inputs and noise of a repetition come
from two streams of its own seed, so a repetition is the same drawn alone or among others.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require

Numbers = Tensor | Sequence[Any] | Any  # a tensor, an array or nested lists of numbers


@dataclass(frozen=True, eq=False, init=False)
class MoEParameters:
    """Parameters of N experts in float64, from tensors, arrays or nested lists."""

    # rows β_1 or flat quadratic coefficients (*batch, N, w)
    router: Float[Tensor, "*batch experts dim"]
    bias: Float[Tensor, "*batch experts"]  # β_0 or c (*batch, N)
    experts: Float[Tensor, "*batch experts q"]  # rows η (*batch, N, q)

    def __init__(self, router: Numbers, bias: Numbers, experts: Numbers) -> None:
        offsets = _parameter_in_float64("bias", bias)
        require(offsets.ndim >= 1, "bias needs an axis of experts, got a single number", ShapeError)
        rows = _flat_router_rows(_parameter_in_float64("router", router), offsets.ndim)
        expert_rows = _parameter_in_float64("experts", experts)
        for name, value in (("router", rows), ("experts", expert_rows)):
            require(
                value.ndim == offsets.ndim + 1 and value.shape[:-1] == offsets.shape,
                f"{name} {tuple(value.shape)} must have one row for each bias "
                f"{tuple(offsets.shape)}",
                ShapeError,
            )
        object.__setattr__(self, "router", rows)
        object.__setattr__(self, "bias", offsets)
        object.__setattr__(self, "experts", expert_rows)

    @property
    def n_experts(self) -> int:
        """Number N of atoms."""
        return self.bias.shape[-1]

    @property
    def batch_shape(self) -> torch.Size:
        """Shape of the leading axes."""
        return self.bias.shape[:-1]

    @property
    def size(self) -> int:
        """Number p of parameters of one problem."""
        return self.n_experts * (self.router.shape[-1] + 1 + self.experts.shape[-1])

    def __getitem__(self, index: Any) -> "MoEParameters":
        """Select problems by an index of the leading axes."""
        require(self.bias.ndim > 1, "parameters without leading axes hold one problem", ShapeError)
        return MoEParameters(self.router[index], self.bias[index], self.experts[index])

    def take(self, order: Tensor | Sequence[int]) -> "MoEParameters":
        """Select atoms by index."""
        index = torch.as_tensor(order)
        return MoEParameters(
            self.router.index_select(-2, index),
            self.bias.index_select(-1, index),
            self.experts.index_select(-2, index),
        )

    def expand(self, *batch: int) -> "MoEParameters":
        """Expand the parameters to a batch of problems."""
        return MoEParameters(
            self.router.expand(*batch, *self.router.shape[-2:]),
            self.bias.expand(*batch, self.n_experts),
            self.experts.expand(*batch, *self.experts.shape[-2:]),
        )

    def flatten(self) -> Float[Tensor, "*batch p"]:
        """One vector per problem: all router rows, then all biases, then all expert rows."""
        blocks = (self.router.flatten(-2), self.bias, self.experts.flatten(-2))
        return torch.cat(blocks, dim=-1)

    def like(self, vector: Float[Tensor, "*batch p"]) -> "MoEParameters":
        """Unflatten vectors to parameters of this shape: the inverse of `flatten`."""
        n, dim, q = self.n_experts, self.router.shape[-1], self.experts.shape[-1]
        return from_vector(vector, n, dim, q)


def from_vector(vector: Float[Tensor, "*batch p"], n: int, dim: int, q: int) -> MoEParameters:
    """Parameters of n experts, router rows of `dim` numbers and expert rows of q from vectors."""
    require(
        vector.shape[-1] == n * (dim + 1 + q),
        f"{n} experts with rows of {dim} + 1 + {q} need {n * (dim + 1 + q)} numbers, "
        f"got {vector.shape[-1]}",
        ShapeError,
    )
    router, bias, experts = vector.split([n * dim, n, n * q], dim=-1)
    return MoEParameters(router.unflatten(-1, (n, dim)), bias, experts.unflatten(-1, (n, q)))


def quadratic_parameters(
    A: Numbers, c: Numbers, experts: Numbers, b: Numbers | None = None
) -> MoEParameters:
    """A quadratic gate from A (*batch, N, d, d), c, η and b (*batch, N, d); partial without b."""
    rows = _parameter_in_float64("A", A).flatten(-2)
    if b is not None:
        rows = torch.cat((rows, _parameter_in_float64("b", b)), dim=-1)
    return MoEParameters(rows, c, experts)


def quadratic_blocks(
    router: Float[Tensor, "*batch experts dim"], *, full: bool
) -> tuple[Float[Tensor, "*batch experts d d"], Float[Tensor, "*batch experts _"]]:
    """A and b of flat quadratic rows; b has no columns for the partially quadratic score."""
    d = quadratic_dim(router.shape[-1], full=full)
    return router[..., : d * d].unflatten(-1, (d, d)), router[..., d * d :]


def quadratic_dim(dim: int, *, full: bool) -> int:
    """Return the d for which `dim` is d² + d (full) or d² (partial)."""
    d = (math.isqrt(1 + 4 * dim) - 1) // 2 if full else math.isqrt(dim)
    fits = d >= 1 and dim == d * d + (d if full else 0)
    form = "[vec A, b] of d² + d" if full else "vec A of d²"
    require(fits, f"a quadratic router row is {form} numbers, got {dim}", ShapeError)
    return d


def _parameter_in_float64(name: str, value: Numbers) -> Tensor:
    """Convert `value` to float64; lists directly, not through float32."""
    try:
        tensor = torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"{name} must be a regular array of numbers: {error}") from error
    require(not tensor.is_complex(), f"{name} must be real", ShapeError)
    return tensor


def _flat_router_rows(router: Tensor, bias_axes: int) -> Tensor:
    """Flatten router matrices (d, d) or [A | b] (d, d + 1) to rows (*batch, N, w); keep rows."""
    if router.ndim != bias_axes + 2:
        return router
    d, columns = router.shape[-2:]
    require(
        columns in (d, d + 1),
        f"a router matrix is (d, d) or [A | b] of shape (d, d + 1), got ({d}, {columns})",
        ShapeError,
    )
    return torch.cat((router[..., :d].flatten(-2), router[..., d:].flatten(-2)), dim=-1)


LawName = Literal["uniform", "normal"]
GateName = Literal["linear", "cosine", "perturbed", "quadratic", "partial"]
LinkName = Literal["softmax", "sigmoid"]
LAWS, GATES, LINKS = get_args(LawName), get_args(GateName), get_args(LinkName)
NORMALISED = ("cosine", "perturbed")

Inputs = Float[Tensor, "*inputs n d"]
Rows = Float[Tensor, "*batch experts dim"]
PerExpert = Float[Tensor, "*batch experts n"]
Features = Float[Tensor, "*inputs dim n"]


@dataclass(frozen=True, eq=False)
class Sample:
    """Data of a regression."""

    x: Float[Tensor, "*repetitions n d"]  # inputs (*repetitions, n, d)
    y: Float[Tensor, "*repetitions n"]  # responses (*repetitions, n)
    noise: float  # standard deviation of the noise in y


def repetition_seeds(seed: int, n: int, repetitions: int) -> list[int]:
    """Independent seeds of the repetitions 0, 1, … at sample size n."""
    return [
        int(np.random.SeedSequence((seed, n, r)).generate_state(1, np.uint64)[0] >> 1)
        for r in range(repetitions)
    ]


def draw_inputs(
    law: LawName, n: int, d: int, seed: int | Sequence[int]
) -> Float[Tensor, "*repetitions n d"]:
    """Draw inputs (n, d) for one seed, or (R, n, d) for R seeds."""
    require(law in LAWS, f"law must be one of {LAWS}, got {law!r}")

    def draw_inputs_of_seed(generator: torch.Generator) -> Tensor:
        if law == "normal":
            return torch.randn(n, d, dtype=torch.float64, generator=generator)
        return 2 * torch.rand(n, d, dtype=torch.float64, generator=generator) - 1

    return _draw_per_seed(draw_inputs_of_seed, seed, stream=0)


def draw_noise(n: int, seed: int | Sequence[int]) -> Float[Tensor, "*repetitions n"]:
    """Draw standard normal noise (n,) for one seed, or (R, n) for R seeds."""

    def draw_noise_of_seed(generator: torch.Generator) -> Tensor:
        return torch.randn(n, dtype=torch.float64, generator=generator)

    return _draw_per_seed(draw_noise_of_seed, seed, stream=1)


def _draw_per_seed(draw, seed: int | Sequence[int], stream: int) -> Tensor:
    """Draw for one seed, or stack the draws for several."""
    if isinstance(seed, int):
        state = np.random.SeedSequence((seed, stream)).generate_state(1, np.uint64)[0]
        return draw(torch.Generator().manual_seed(int(state >> 1)))
    require(len(seed) > 0, "several repetitions need at least one seed, got none")
    return torch.stack([_draw_per_seed(draw, each, stream) for each in seed])


@dataclass(frozen=True)
class Ridge:
    """A function φ of one variable with its derivatives."""

    value: Callable[[Tensor], Tensor]  # u ↦ φ(u)
    slope: Callable[[Tensor], Tensor]  # u ↦ φ′(u); the left one at the kink of ReLU
    curvature: Callable[[Tensor], Tensor]  # u ↦ φ″(u) where it exists
    degree: int | None = None  # p if φ(tu) = tᵖ φ(u) for t > 0, else None


RIDGES = {
    "linear": Ridge(lambda u: u, torch.ones_like, torch.zeros_like, degree=1),
    "relu": Ridge(torch.relu, lambda u: (u > 0).to(u.dtype), torch.zeros_like, degree=1),
    "gelu": Ridge(
        lambda u: u * torch.special.ndtr(u),
        lambda u: torch.special.ndtr(u) + u * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi),
        lambda u: (2 - u * u) * torch.exp(-0.5 * u * u) / math.sqrt(2 * math.pi),
    ),
    "tanh": Ridge(
        torch.tanh,
        lambda u: 1 - torch.tanh(u).square(),
        lambda u: -2 * torch.tanh(u) * (1 - torch.tanh(u).square()),
    ),
}
EXPERTS = (*RIDGES, "polynomial", "two_layer")


def ridge_function(expert: str, power: int = 2, activation: str = "relu") -> Ridge:
    """Function φ of an expert: uᵖ if polynomial, the activation if two-layer."""
    require(expert in EXPERTS, f"expert must be one of {EXPERTS}, got {expert!r}")
    if expert == "polynomial":
        require(power >= 1, f"a polynomial expert needs a power >= 1, got {power}")
        second = (
            torch.zeros_like if power == 1 else lambda u: power * (power - 1) * u ** (power - 2)
        )
        return Ridge(lambda u: u**power, lambda u: power * u ** (power - 1), second, degree=power)
    name = activation if expert == "two_layer" else expert
    require(name in RIDGES, f"activation must be one of {tuple(RIDGES)}, got {name!r}")
    return RIDGES[name]


def router_dim(gate: str, d: int) -> int:
    """Length of a router row: d, d² + d or d²."""
    require(gate in GATES, f"gate must be one of {GATES}, got {gate!r}")
    return {"quadratic": d * d + d, "partial": d * d}.get(gate, d)


def input_features(gate: str, x: Float[Tensor, "*inputs n d"], tau2: float) -> Features:
    """Router features z(x), samples last."""
    columns = x.mT.contiguous()
    if gate in NORMALISED:
        return _perturbed_unit_vectors(columns, dim=-2, tau=tau2)
    if gate == "linear":
        return columns
    products = (columns.unsqueeze(-2) * columns.unsqueeze(-3)).flatten(-3, -2)
    return products if gate == "partial" else torch.cat((products, columns), dim=-2)


def router_directions(gate: str, router: Rows, tau1: float) -> Rows:
    """Router rows β divided by ‖β‖ + τ1 where the gate normalises them, else as they are."""
    return _perturbed_unit_vectors(router, dim=-1, tau=tau1) if gate in NORMALISED else router


def score_gradient(
    gate: str, router: Rows, tau1: float, features: Features, scores: PerExpert
) -> Float[Tensor, "*either _ dim n"]:
    """∂score_i/∂β_i = (z - û_i v_i·z)/(‖β_i‖ + τ1) for normalised rows, z for the others.

    From the scores v_i·z without bias; the axis of experts has length 1 where all are the same.
    """
    if gate not in NORMALISED:
        return features.unsqueeze(-3)
    norm = torch.linalg.vector_norm(router, dim=-1, keepdim=True)
    unit = router * _safe_inverse(norm)
    radial = unit.unsqueeze(-1) * scores.unsqueeze(-2)
    return (features.unsqueeze(-3) - radial) * _safe_inverse(norm + tau1).unsqueeze(-1)


def gate_weights(link: str, scores: PerExpert) -> PerExpert:
    """Softmax over experts, or the sigmoid of each score."""
    return scores.softmax(dim=-2) if link == "softmax" else scores.sigmoid()


def _perturbed_unit_vectors(vectors: Tensor, dim: int, tau: float) -> Tensor:
    """Vectors v/(‖v‖ + τ), 0 for v = 0."""
    if dim == -2:  # over a short axis that is not the last, `vector_norm` is several times slower
        norm = vectors.square().sum(dim=dim, keepdim=True).sqrt()
    else:
        norm = torch.linalg.vector_norm(vectors, dim=dim, keepdim=True)
    return vectors * _safe_inverse(norm + tau)


def _safe_inverse(length: Tensor) -> Tensor:
    """1/length, 0 where the length is 0."""
    return torch.where(length > 0, 1 / length.clamp_min(torch.finfo(length.dtype).tiny), 0.0)


class _ForwardPass(NamedTuple):
    """Intermediate results that value and Jacobian share; samples last."""

    columns: Tensor  # (*inputs, d, n)
    features: Tensor  # (*inputs, w, n)
    products: Tensor  # v_i·z (*batch, N, n)
    weights: Tensor  # G_i (*batch, N, n)
    inner: Tensor  # a·x + b (*batch, N, n)
    ridge: Tensor  # φ(inner) (*batch, N, n)
    outputs: Tensor  # h_i (*batch, N, n)


@dataclass(frozen=True)
class MoEModel:
    """A family of mixture-of-experts regressions; its parameters are given to each method."""

    gate: GateName  # "linear", "cosine", "perturbed", "quadratic" or "partial"
    link: LinkName  # "softmax" or "sigmoid"
    expert: str  # "linear", "polynomial", "relu", "gelu", "tanh" or "two_layer"
    d: int  # dimension of an input
    n_experts: int  # number N of experts
    # (τ1, τ2) of the perturbed cosine; the other gates ignore it
    tau: tuple[float, float] = (0.1, 0.1)
    power: int = 2  # p of polynomial experts
    activation: str = "relu"  # φ of two-layer experts

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
    def router_dim(self) -> int:
        """Length of a router row."""
        return router_dim(self.gate, self.d)

    @property
    def expert_dim(self) -> int:
        """Length q of an expert row."""
        return self.d + 1 + (self.expert == "two_layer")

    @property
    def n_parameters(self) -> int:
        """Number p of parameters."""
        return self.n_experts * (self.router_dim + 1 + self.expert_dim)

    @property
    def ridge(self) -> Ridge:
        """φ of the experts, with its derivatives."""
        return ridge_function(self.expert, self.power, self.activation)

    @property
    def expert_label(self) -> str:
        """Name of the expert with its power p, "u^p", or activation φ, "λ φ"."""
        if self.expert == "polynomial":
            return f"u^{self.power}"
        return f"λ {self.activation}" if self.expert == "two_layer" else self.expert

    @property
    def has_kink(self) -> bool:
        """Whether φ of the experts is ReLU."""
        return "relu" in (self.expert, self.activation if self.expert == "two_layer" else "")

    def with_experts(self, n_experts: int) -> "MoEModel":
        """The same family with another number of experts."""
        return replace(self, n_experts=n_experts)

    def unflatten(self, vector: Float[Tensor, "*batch p"]) -> MoEParameters:
        """Parameters from vectors [router rows, biases, expert rows]."""
        return from_vector(vector, self.n_experts, self.router_dim, self.expert_dim)

    def check(self, params: MoEParameters) -> None:
        """Raise unless the parameters have the shapes of this model."""
        sizes = (params.n_experts, params.router.shape[-1], params.experts.shape[-1])
        expected = (self.n_experts, self.router_dim, self.expert_dim)
        require(
            sizes == expected,
            f"{self.gate} gate, {self.expert} experts, d={self.d}: experts and lengths of "
            f"router and expert rows must be {expected}, got {sizes}",
            ShapeError,
        )

    def scores(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n experts"]:
        """Scores v(β_i)·z(x) + bias_i of every input."""
        self.check(params)
        products = self._score_products(params, input_features(self.gate, x, self.effective_tau[1]))
        return (products + params.bias.unsqueeze(-1)).mT

    def weights(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n experts"]:
        """Gate weights G_i(x) of every input."""
        return gate_weights(self.link, self.scores(params, x).mT).mT

    def expert_outputs(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n experts"]:
        """Expert outputs h(x, η_i) of every input."""
        return self._expert_values(params, x.mT)[2].mT

    def regression(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n"]:
        """Regression function f(x) for every problem and input."""
        run = self._forward_pass(params, x)
        return (run.weights * run.outputs).sum(dim=-2)

    def jacobian(self, params: MoEParameters, x: Inputs) -> Float[Tensor, "*batch n p"]:
        """Jacobian ∂f(x)/∂parameters in the order of `flatten`, in closed form."""
        return self.value_and_jacobian(params, x)[1]

    def value_and_jacobian(
        self, params: MoEParameters, x: Inputs
    ) -> tuple[Float[Tensor, "*batch n"], Float[Tensor, "*batch n p"]]:
        """Compute f and its Jacobian in one pass."""
        run = self._forward_pass(params, x)
        value = (run.weights * run.outputs).sum(dim=-2)
        n_samples, n, dim = x.shape[-2], self.n_experts, self.router_dim
        out = run.weights.new_empty((*run.weights.shape[:-2], self.n_parameters, n_samples))
        router, bias, experts = out.split([n * dim, n, n * self.expert_dim], dim=-2)
        softmax = self.link == "softmax"
        rest = run.outputs - value.unsqueeze(-2) if softmax else (1 - run.weights) * run.outputs
        torch.mul(run.weights, rest, out=bias)  # s_i
        gradient = score_gradient(
            self.gate, params.router, self.effective_tau[0], run.features, run.products
        )
        torch.mul(bias.unsqueeze(-2), gradient, out=router.unflatten(-2, (n, dim)))
        self._write_expert_block(params, run, experts.unflatten(-2, (n, self.expert_dim)))
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
        """Draw n samples y = f(x) + noise · N(0, 1): (n, d) for one seed, (R, n, d) for R seeds.

        A repetition depends on its own seed and on n alone. The papers' variance .01 is a noise of
        0.1; the law is "uniform" on [-1, 1]ᵈ as in both papers, or "normal".
        """
        require(n >= 1 and noise >= 0, f"need n >= 1 and noise >= 0, got {n=}, {noise=}")
        x = draw_inputs(law, n, self.d, seed)
        y = self.regression(params, x)
        return Sample(x, y + noise * draw_noise(n, seed), noise)

    @property
    def effective_tau(self) -> tuple[float, float]:
        """(τ1, τ2), zero unless the router is the perturbed cosine."""
        return self.tau if self.gate == "perturbed" else (0.0, 0.0)

    def _score_products(self, params: MoEParameters, features: Tensor) -> Tensor:
        """Scores without biases, (*batch, N, n)."""
        return router_directions(self.gate, params.router, self.effective_tau[0]) @ features

    def _expert_values(
        self, params: MoEParameters, columns: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return u = a·x + b, φ(u) and the outputs h."""
        rows = params.experts
        inner = rows[..., : self.d] @ columns + rows[..., self.d, None]
        value = self.ridge.value(inner)
        scaled = self.expert == "two_layer"
        return inner, value, value * rows[..., self.d + 1, None] if scaled else value

    def _forward_pass(self, params: MoEParameters, x: Inputs) -> _ForwardPass:
        """Evaluate the model, keeping what derivatives need."""
        self.check(params)
        require(
            x.shape[-1] == self.d and x.dtype == torch.float64,
            f"inputs must be float64 (..., n, {self.d}), got {tuple(x.shape)} {x.dtype}",
            ShapeError,
        )
        columns = x.mT.contiguous()
        features = input_features(self.gate, x, self.effective_tau[1])
        products = self._score_products(params, features)
        weights = gate_weights(self.link, products + params.bias.unsqueeze(-1))
        return _ForwardPass(
            columns, features, products, weights, *self._expert_values(params, columns)
        )

    def _write_expert_block(self, params: MoEParameters, run: _ForwardPass, out: Tensor) -> None:
        """Write G_i ∂h_i/∂(a, b[, λ]) to `out` (*batch, N, q, n)."""
        d = self.d
        torch.mul(run.weights, self.ridge.slope(run.inner), out=out[..., d, :])
        if self.expert == "two_layer":
            out[..., d, :].mul_(params.experts[..., d + 1, None])
            torch.mul(run.weights, run.ridge, out=out[..., d + 1, :])
        torch.mul(out[..., d : d + 1, :], run.columns.unsqueeze(-3), out=out[..., :d, :])
