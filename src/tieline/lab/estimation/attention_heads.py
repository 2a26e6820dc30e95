"""Sample sizes needed to learn sigmoid and softmax attention heads (paper 4).

    f(X) = Σ_j G(s(X))_j x_j·v,   s_j = x_i B x_j,   G = softmax or σ       P4 eq. 1, 2, section 2

X = (x_1, ..., x_N) are the tokens, i the query row. Of queries and keys only B = s W_Q W_Kᵀ can be
learnt, so B and v are the parameters, shared by all N experts. Without sharing, each token has a
quadratic score and a linear expert of its own, which is the mixture that paper 4 studies.

A teacher is one row of a head, B and v drawn by seed and the same for both kinds. Students of both
kinds are fitted to samples of each teacher by least squares, in two families:

    head       what a transformer learns: B and v
    mixture    what paper 4 studies: a quadratic score and a linear expert for every token

Each is measured by its distance to the teacher's function, and by the error of its experts (v, or
all expert rows) against the population minimiser Ḡ of its family: the teacher if the kinds agree.

For a student that contains its teacher least squares is asymptotically normal: with I = E[∇f ∇fᵀ]

    n E‖f̂ - f*‖² → ν rank I,        n E‖η̂ - η*‖² → ν tr (I⁺)_ηη

where ν is the variance of the noise. Both kinds learn at n^-1/2; they differ by the constants.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import ShapeError, require
from tieline.lab.attention.head_mixture import attention_as_moe
from tieline.lab.attention.softmax_and_sigmoid import AttentionKind, HeadWeights, check_kind
from tieline.lab.estimation.fit import ModelRegression
from tieline.lab.estimation.model import (
    MoEModel,
    MoEParameters,
    draw_inputs,
    draw_noise,
    quadratic_parameters,
    repetition_seeds,
)
from tieline.lab.estimation.solvers import LeastSquares, Regression, levenberg_marquardt
from tieline.lab.power_law import PowerLaw, fit_rate

Family = Literal["head", "mixture"]
KINDS: tuple[AttentionKind, ...] = get_args(AttentionKind)
FAMILIES: tuple[Family, ...] = get_args(Family)
POPULATION_SIZE = 20_000  # inputs over which norms, information and Ḡ are computed
LEAST_ROOT_SHARE = 1e-10  # roots of the information below this share of the largest count as zero
START_RADIUS = 0.1  # standard deviation of a start around Ḡ; it does not shrink with n

Theta = Float[Tensor, "problems p"]
Inputs = Float[Tensor, "problems n tokens_dim"]


@dataclass(frozen=True)
class AttentionHead:
    """A row of a head with one value dimension; parameter vectors are [vec B, v]."""

    kind: AttentionKind  # "softmax" or "sigmoid"
    tokens: int  # N
    dim: int  # dimension D of a token
    row: int = 0  # i, counted from 0

    def __post_init__(self) -> None:
        check_kind(self.kind, None)
        require(
            self.tokens >= 2 and self.dim >= 1 and 0 <= self.row < self.tokens,
            f"need 2 tokens or more, dim >= 1 and a row among them, got {self}",
        )

    @property
    def size(self) -> int:
        """D² + D."""
        return self.dim * (self.dim + 1)

    def split(self, theta: Float[Tensor, "*batch p"]) -> tuple[Tensor, Tensor]:
        """B (..., D, D) and v (..., D)."""
        require(
            theta.shape[-1] == self.size,
            f"B and v are {self.size} numbers, got {theta.shape[-1]}",
            ShapeError,
        )
        square = self.dim**2
        return theta[..., :square].unflatten(-1, (self.dim, self.dim)), theta[..., square:]

    def value(self, theta: Theta, x: Inputs) -> Float[Tensor, "problems n"]:
        """Compute f of every problem and sequence; a sequence is its tokens in one vector."""
        weights, values, _ = self._attend(theta, x)
        return (weights * values).sum(dim=-1)

    def value_and_jacobian(
        self, theta: Theta, x: Inputs
    ) -> tuple[Float[Tensor, "problems n"], Float[Tensor, "problems n p"]]:
        """Compute f and its Jacobian: ∂f/∂B = x_i ⊗ Σ_j s_j x_j, ∂f/∂v = Σ_j G_j x_j."""
        weights, values, tokens = self._attend(theta, x)
        total = (weights * values).sum(dim=-1)
        if self.kind == "softmax":
            slopes = weights * (values - total[..., None])
        else:
            slopes = weights * (1 - weights) * values
        slope_sum, token_mean = (
            (factors[..., None] * tokens).sum(dim=-2) for factors in (slopes, weights)
        )
        outer = tokens[..., self.row, :, None] * slope_sum[..., None, :]
        return total, torch.cat([outer.flatten(-2), token_mean], dim=-1)

    def mixture(self) -> MoEModel:
        """The family of mixtures that contains this head."""
        return MoEModel("partial", self.kind, "linear", self.tokens * self.dim, self.tokens)

    def as_mixture(self, theta: Float[Tensor, " p"]) -> MoEParameters:
        """Express the head in the parameters of `mixture`, by `attention_as_moe`."""
        bilinear, value = self.split(theta)
        x = theta.new_zeros(self.tokens, self.dim)
        eye = torch.eye(self.dim, dtype=theta.dtype)
        head = HeadWeights(bilinear, eye, value[:, None])
        mixture = attention_as_moe(x, head, row=self.row, kind=self.kind, scale=1.0)
        rows = mixture.experts.maps[..., 0]
        experts = torch.cat([rows, torch.zeros_like(rows[:, :1])], dim=1)
        return quadratic_parameters(mixture.router.matrices, mixture.router.constant, experts)

    def _attend(self, theta: Theta, x: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and values (problems, n, N), and the tokens."""
        bilinear, value = self.split(theta)
        tokens = x.unflatten(-1, (self.tokens, self.dim))
        query = tokens[..., self.row, :] @ bilinear
        scores = (tokens @ query[..., None])[..., 0]
        weights = scores.softmax(dim=-1) if self.kind == "softmax" else scores.sigmoid()
        return weights, (tokens * value[:, None, None, :]).sum(dim=-1), tokens


@dataclass(frozen=True)
class StudentCurve:
    """Errors of one kind of student under one kind of teacher."""

    family: Family  # "head" or "mixture"
    teacher: AttentionKind
    student: AttentionKind
    sizes: tuple[int, ...]  # sample sizes n
    function: tuple[float, ...]  # root mean square over repetitions of ‖f̂ - f*‖, for each n
    experts: tuple[float, ...]  # root mean square over repetitions of ‖η̂ - η̄‖, for each n
    function_rate: PowerLaw  # power law of ‖f̂ - f*‖
    experts_rate: PowerLaw  # power law of ‖η̂ - η̄‖
    misfit: float  # ‖f_Ḡ - f*‖, zero where the kinds agree
    predicted_function: float | None  # √(ν rank I) where the kinds agree, else None
    predicted_experts: float | None  # √(ν tr (I⁺)_ηη) where the kinds agree, else None
    condition: float | None  # largest over smallest positive root of I; None if the kinds differ
    failed: int  # fits that did not converge
    fits: int


@dataclass(frozen=True)
class AttentionComparison:
    """All curves of a comparison, with its settings."""

    curves: tuple[StudentCurve, ...]
    tokens: int
    dim: int
    noise: float
    repetitions: int
    seed: int

    def curve(self, family: Family, teacher: AttentionKind, student: AttentionKind) -> StudentCurve:
        """The curve of a family, teacher and student."""
        for curve in self.curves:
            if (curve.family, curve.teacher, curve.student) == (family, teacher, student):
                return curve
        raise KeyError(f"no curve of {family=}, {teacher=}, {student=}")

    def sample_ratio(self, family: Family) -> float:
        """Samples softmax needs for one of sigmoid at equal expert error: ratio of tr (I⁺)_ηη."""
        soft, sigmoid = (self.curve(family, kind, kind).predicted_experts for kind in KINDS)
        assert soft is not None
        assert sigmoid is not None
        return (soft / sigmoid) ** 2


def compare_attention(
    sizes: Sequence[int] = (1000, 3000, 10_000, 30_000),
    *,
    repetitions: int = 16,
    tokens: int = 3,
    dim: int = 2,
    scale: float = 3.0,
    noise: float = 0.1,
    families: Sequence[Family] = FAMILIES,
    others: bool = True,
    seed: int = 0,
) -> AttentionComparison:
    """Fit students of both kinds to teachers of both kinds.

    `scale` is the standard deviation of the entries of √D B, `noise` is √ν (0.1 in the paper); with
    `others`, students of the kind that their teacher is not are fitted too.
    """
    require(len(sizes) >= 2 and repetitions >= 1, f"need 2 sizes or more, got {sizes=}")
    require(noise > 0 and scale > 0, f"noise and scale are positive, got {noise=}, {scale=}")
    unknown = [family for family in families if family not in FAMILIES]
    require(not unknown, f"families are among {FAMILIES}, got {unknown}")
    generator = torch.Generator().manual_seed(seed)
    normals = torch.randn(dim * (dim + 1), dtype=torch.float64, generator=generator)
    bilinear, value = normals[: dim**2], normals[dim**2 :]
    theta = torch.cat([bilinear * scale / math.sqrt(dim), value / value.norm()])
    curves = []
    for kind in KINDS:
        teacher = _Teacher(AttentionHead(kind, tokens, dim), theta, noise, seed)
        samples = [teacher.samples(n, repetitions) for n in sizes]
        curves += [
            _student_curve(teacher, _student_with_reference(teacher, family, student), samples)
            for family in families
            for student in KINDS
            if others or student == kind
        ]
    return AttentionComparison(tuple(curves), tokens, dim, noise, repetitions, seed)


@dataclass(frozen=True)
class _Teacher:
    """A head with its parameters, from which samples are drawn."""

    head: AttentionHead
    theta: Float[Tensor, " p"]
    noise: float
    seed: int

    def samples(self, n: int, repetitions: int) -> tuple[Tensor, Tensor]:
        """Inputs (R, n, N·D), uniform on the cube as in the paper, and targets (R, n)."""
        seeds = repetition_seeds(self.seed, n, repetitions)
        x = draw_inputs("uniform", n, self.head.tokens * self.head.dim, seeds)
        exact = self.head.value(self.theta.expand(repetitions, -1), x)
        return x, exact + self.noise * draw_noise(n, seeds)

    def population(self, stream: int) -> tuple[Tensor, Tensor]:
        """Draw the inputs (1, n, N·D) of a population, with f* at each."""
        size = self.head.tokens * self.head.dim
        x = draw_inputs("uniform", POPULATION_SIZE, size, self.seed + stream)[None]
        return x, self.head.value(self.theta[None], x)


@dataclass(frozen=True)
class _Student:
    """A family to fit, its Ḡ, and the slice of its experts in a parameter vector."""

    family: Family
    kind: AttentionKind
    regression: Regression
    experts: slice
    reference: Float[Tensor, " p"]
    misfit: float = 0.0


def _student_with_reference(teacher: _Teacher, family: Family, kind: AttentionKind) -> _Student:
    """Build the student with its Ḡ: the teacher, or the fit of a large noiseless sample."""
    head = replace(teacher.head, kind=kind)
    if family == "head":
        student = _Student(family, kind, head, slice(head.dim**2, None), teacher.theta)
    else:
        model = head.mixture()
        gate = slice(model.n_experts * (model.router_dim + 1), None)
        start = head.as_mixture(teacher.theta).flatten()
        student = _Student(family, kind, ModelRegression(model), gate, start)
    if kind == teacher.head.kind:
        return student
    problem = LeastSquares(student.regression, *teacher.population(0))
    minimum = levenberg_marquardt(problem, student.reference[None], iterations=400)
    misfit = math.sqrt(minimum.loss.item() / POPULATION_SIZE)
    return replace(student, reference=minimum.theta[0], misfit=misfit)


def _student_curve(
    teacher: _Teacher, student: _Student, samples: Sequence[tuple[Tensor, Tensor]]
) -> StudentCurve:
    """Errors of a student against n, their rates and the predicted constants."""
    fits = [_fit_errors(teacher, student, x, y) for x, y in samples]
    sizes = tuple(x.shape[1] for x, _ in samples)
    function, experts, failed = zip(*fits, strict=True)
    agree = student.kind == teacher.head.kind
    return StudentCurve(
        student.family,
        teacher.head.kind,
        student.kind,
        sizes,
        tuple(error.square().mean().sqrt().item() for error in function),
        tuple(error.square().mean().sqrt().item() for error in experts),
        fit_rate(sizes, function, teacher.seed),
        fit_rate(sizes, experts, teacher.seed),
        student.misfit,
        *(_asymptotic_constants(teacher, student) if agree else (None, None, None)),
        failed=sum(failed),
        fits=sum(len(x) for x, _ in samples),
    )


def _fit_errors(
    teacher: _Teacher, student: _Student, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, int]:
    """Fit all repetitions: ‖f̂ - f*‖, ‖η̂ - η̄‖, and the number that did not converge."""
    generator = torch.Generator().manual_seed(teacher.seed + x.shape[1])
    kick = torch.randn(len(x), len(student.reference), dtype=x.dtype, generator=generator)
    problem = LeastSquares(student.regression, x, y)
    minimum = levenberg_marquardt(problem, student.reference + START_RADIUS * kick)
    inputs, targets = teacher.population(1)
    distances = [
        (student.regression.value(theta[None], inputs) - targets).square().mean().sqrt()
        for theta in minimum.theta
    ]
    experts = (minimum.theta - student.reference)[:, student.experts].norm(dim=1)
    return torch.stack(distances), experts, int((~minimum.answered).sum())


def _asymptotic_constants(teacher: _Teacher, student: _Student) -> tuple[float, float, float]:
    """√(ν rank I), √(ν tr (I⁺)_ηη) and the condition number of I on its range."""
    problem = LeastSquares(student.regression, *teacher.population(0))
    first = torch.zeros(1, dtype=torch.long)
    information = problem.normal_equations(student.reference[None], first).gram[0] / POPULATION_SIZE
    roots, vectors = torch.linalg.eigh(information)
    informative = roots > LEAST_ROOT_SHARE * roots[-1]
    directions = vectors[student.experts][:, informative]
    trace = (directions.square() / roots[informative]).sum().item()
    rank, condition = int(informative.sum()), (roots[-1] / roots[informative][0]).item()
    return teacher.noise * math.sqrt(rank), teacher.noise * math.sqrt(trace), condition
