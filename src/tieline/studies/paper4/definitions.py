"""Attention as a mixture, the model, and the equations (8) of paper 4."""

import math

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from tieline.estimation import MoEModel, MoEParameters
from tieline.estimation.gates import GateName, LinkName
from tieline.routing import QuadraticRouter, Sigmoid, Softmax
from tieline.routing.attention_moe import attention_as_moe
from tieline.routing.gates import Gate
from tieline.studies.checks import at_least, at_most
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.mixtures import drawn, inputs
from tieline.studies.registry import claim


@claim(
    "p4-sec2",
    "section 2, (1)-(3)",
    "attention as a mixture of experts",
    statement="Each row of softmax or sigmoid self-attention is a mixture with quadratic scores X "
    "M Xᵀ and linear experts X P.",
    tested="All rows of a head over 5 tokens against the matrix formula, both kinds; and the "
    "mixture of a row evaluated at other sequences.",
)
def attention(run: Run) -> Evidence:
    """Rows by matrices and by mixtures."""
    tokens, width, inner = 5, 4, 3
    x, other = (run.normal(tokens, width, stream=s) for s in (1, 2))
    w_q, w_k, w_v = (run.normal(width, inner, stream=s) for s in (3, 4, 5))
    worst = []
    for kind in ("softmax", "sigmoid"):
        rows = {}
        for name, sequence in (("own", x), ("other", other)):
            scores = sequence @ w_q @ (sequence @ w_k).T / math.sqrt(inner)
            weights = scores.softmax(dim=1) if kind == "softmax" else scores.sigmoid()
            rows[name] = weights @ (sequence @ w_v)
        for i in range(tokens):
            mixture = attention_as_moe(x, w_q, w_k, w_v, row=i, kind=kind)
            worst.append(float((mixture.output - rows["own"][i]).abs().max()))
            worst.append(float((mixture(other.flatten()) - rows["other"][i]).abs().max()))
    return Evidence(
        [at_most("largest difference", max(worst), 1e-12)], paper=0, measured=max(worst)
    )


@claim(
    "p4-eq5",
    "(4), (5), (48)",
    "sigmoid gating regression",
    statement="The regression function is Σ σ(xᵀAx + b·x + c) E(x, η), or without b.",
    tested="Against the package's quadratic router and gates on 300 inputs: scores and links.",
)
def model(run: Run) -> Evidence:
    """Model against routing core."""
    worst = []
    x = inputs(run, 300, 3)
    scores: list[tuple[GateName, str]] = [("quadratic", "full"), ("partial", "partial")]
    links: list[tuple[LinkName, Gate]] = [("sigmoid", Sigmoid()), ("softmax", Softmax())]
    for gate, kind in scores:
        for link, layer in links:
            family = MoEModel(gate, link, "relu", 3, 4)
            params = drawn(run, family)
            router = core_router(params, kind)
            a, b = params.experts[:, :-1], params.experts[:, -1]
            f = (layer(router(x)) * torch.relu(x @ a.T + b)).sum(dim=1)
            worst.append(float((f - family.regression(params, x)).abs().max()))
    return Evidence(
        [at_most("largest difference", max(worst), 1e-12)], paper=0, measured=max(worst)
    )


def core_router(params: MoEParameters, kind) -> QuadraticRouter:
    """The routing core's quadratic router with these rows."""
    router = QuadraticRouter(3, params.n_experts, kind=kind).double()
    state = {"left": params.router[:, :9].reshape(-1, 3, 3), "linear": params.router[:, 9:],
             "constant": params.bias}  # fmt: skip
    for name, value in state.items():
        if isinstance(getattr(router, name, None), nn.Parameter):
            setattr(router, name, nn.Parameter(value, requires_grad=False))
    return router


def gated(theta: Tensor, x: Tensor) -> Tensor:
    """F(x; A, b, c, α, β) = σ(xᵀAx + b·x + c)(α·x + β) on the plane, θ of 4 + 2 + 1 + 2 + 1."""
    score = x @ theta[:4].reshape(2, 2) @ x + theta[4:6] @ x + theta[6]
    return score.sigmoid() * (theta[7:9] @ x + theta[9])


@claim(
    "p4-eq8",
    "(8)",
    "the equations behind slow polynomial experts",
    statement="For linear experts ∂²F/∂A∂c = ∂²F/∂b∂bᵀ, ∂²F/∂A∂β = ∂²F/∂b∂α and ∂²F/∂b∂β = "
    "∂²F/∂c∂α.",
    tested="Automatic second derivatives at 50 inputs on the plane, for linear experts and for a "
    "tanh expert.",
    seconds=3,
)
def equations(run: Run) -> Evidence:
    """Residuals of the three equations."""
    theta, x = run.normal(10, stream=1), inputs(run, 50, 2)
    second = vmap(jacrev(jacrev(gated)), (None, 0))(theta, x)

    def with_tanh(t: Tensor, point: Tensor) -> Tensor:
        score = point @ t[:4].reshape(2, 2) @ point + t[4:6] @ point + t[6]
        return score.sigmoid() * torch.tanh(t[7:9] @ point + t[9])

    other = vmap(jacrev(jacrev(with_tanh)), (None, 0))(theta, x)
    worst, every = residuals(second), residuals(other)
    return Evidence(
        [
            *(at_most(name, value, 1e-12) for name, value in worst.items()),
            *(at_most(f"{name}, tanh expert", value, 1e-12, part="corrected")
              for name, value in every.items()),
        ],
        paper=0,
        measured=max(worst.values()),
        note="All three hold for every function of the score and of α·x + β, so for every ridge "
        "expert; the first is one of the gate alone, and it is what makes Theorem 1 fail.",
    )  # fmt: skip


def residuals(second: Tensor) -> dict[str, float]:
    """Largest residual of each equation of (8)."""
    A, b, c, alpha, beta = slice(0, 4), slice(4, 6), 6, slice(7, 9), 9
    pairs = {
        "∂A∂c = ∂b∂b": second[:, A, c] - second[:, b, b].flatten(1),
        "∂A∂β = ∂b∂α": second[:, A, beta] - second[:, b, alpha].flatten(1),
        "∂b∂β = ∂c∂α": second[:, b, beta] - second[:, c, alpha],
    }
    return {name: float(value.abs().max()) for name, value in pairs.items()}


@claim(
    "p4-prop3",
    "Prop. 3",
    "a sigmoid that vanishes",
    statement="Two sigmoids tend to one only if the second has A = 0, b = 0 and c → +∞.",
    tested="Sup over the cube of |σ(s₁) + σ(s₂) - σ(s₁)| at c = +40 and c = -40, with A = 0 and "
    "with A ≠ 0.",
    expected=Verdict.FAILS,
)
def vanishing(run: Run) -> Evidence:
    """What is left of the second sigmoid."""
    x = inputs(run, 2000, 2)
    A = run.normal(2, 2, stream=1)
    bend = ((x @ A) * x).sum(dim=1)

    def left(sign: float, rows: Tensor) -> float:
        return float((rows + sign * 40).sigmoid().max())

    up, down, bent = left(1, 0 * bend), left(-1, 0 * bend), left(-1, bend)
    return Evidence(
        [
            at_most("second sigmoid at c = +40", up, 1e-12),
            at_most("at c = -40", down, 1e-12, part="corrected"),
            at_most("at c = -40 with A ≠ 0", bent, 1e-12, part="corrected"),
            at_least("at c = +40 it is", up, 1 - 1e-12, part="corrected"),
        ],
        paper="c → +∞",
        corrected="c → -∞, whatever A and b",
        measured=up,
    )
