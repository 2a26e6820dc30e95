"""Small mixtures trained on a target with a large mean, with and without a shared expert.

    y = c (1 + a·x) + residual(x),   f = Σ_{top k} g_e(x) h_e(x) (+ shared affine expert)

Remark 5.10 is about training: experts that must carry the mean of the target make the router keep
a few of them. `coalitions_by_carrier` trains the same starts three ways and counts the coalitions
in use, exp of their entropy: without a shared expert, with one that starts at zero, and with one
that is the affine least-squares fit of the target from the start.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.ranking import topk_mask
from tieline.lab.claims.claim import ClaimRun

__all__ = ["CARRIERS", "coalitions_by_carrier"]

CARRIERS = ("none", "from zero", "fitted")
DIM, EXPERTS, HIDDEN, CHOSEN = 8, 8, 8, 2
MEAN, SLOPE = 10.0, 3.0
"""Constant of the target and length of its slope; the residual has a deviation of about one."""


def coalitions_by_carrier(
    run: ClaimRun, mixtures: int = 6, tokens: int = 192
) -> dict[str, Float[Tensor, " mixtures"]]:
    """Coalitions in use after training, by kind of shared expert, for paired starts.

    Args:
        run: mode and seed.
        mixtures: pairs, each with its own data, target and start.
        tokens: inputs of each.
    """
    x = run.normal(mixtures, tokens, DIM, stream=60).float()
    slope = run.normal(mixtures, DIM, 1, stream=61).float() * SLOPE / math.sqrt(DIM)
    inner = run.normal(mixtures, DIM, 16, stream=62).float()
    outer = run.normal(mixtures, 16, 1, stream=63).float() / 4
    y = MEAN + x @ slope + torch.tanh(x @ inner) @ outer
    steps = run.size(250, 1_200)
    return {kind: _trained_coalitions(run, x, y, kind, steps) for kind in CARRIERS}


def _start(run: ClaimRun, mixtures: int) -> dict[str, Tensor]:
    """The start of every kind: normal weights, no shared expert."""
    shapes = {"router": (EXPERTS, DIM), "inner": (EXPERTS, DIM, HIDDEN), "outer": (EXPERTS, HIDDEN)}
    scale = {"router": DIM, "inner": DIM, "outer": HIDDEN}
    drawn = {
        name: run.normal(mixtures, *shape, stream=70 + number).float() / math.sqrt(scale[name])
        for number, (name, shape) in enumerate(shapes.items())
    }
    zeros = {"bend": (EXPERTS, HIDDEN), "lift": (EXPERTS,), "shared": (DIM + 1, 1)}
    return drawn | {name: torch.zeros(mixtures, *shape) for name, shape in zeros.items()}


def _trained_coalitions(
    run: ClaimRun, x: Tensor, y: Tensor, kind: str, steps: int, rate: float = 0.03
) -> Float[Tensor, " mixtures"]:
    wide = torch.cat((x, torch.ones_like(x[..., :1])), dim=-1)
    start = _start(run, len(x))
    if kind == "fitted":
        start["shared"] = torch.linalg.lstsq(wide, y).solution
    parameters = {name: value.clone().requires_grad_() for name, value in start.items()}
    parameters["shared"].requires_grad_(kind != "none")
    trained = [value for value in parameters.values() if value.requires_grad]
    optimiser = torch.optim.Adam(trained, lr=rate)
    for _ in range(steps):
        error = _output(parameters, x, wide) - y
        optimiser.zero_grad()
        error.square().mean(dim=(1, 2)).sum().backward()
        optimiser.step()
    with torch.no_grad():
        chosen = topk_mask(x @ parameters["router"].mT, CHOSEN)
    return _effective(chosen)


def _output(parameters: dict[str, Tensor], x: Tensor, wide: Tensor) -> Tensor:
    """Σ g_e h_e + shared, for all mixtures at once."""
    scores = x @ parameters["router"].mT
    kept = topk_mask(scores, CHOSEN)
    gates = scores.masked_fill(~kept, -torch.inf).softmax(dim=-1)
    hidden = torch.einsum("sni,seih->sneh", x, parameters["inner"]) + parameters["bend"][:, None]
    values = torch.einsum("sneh,seh->sne", hidden.relu(), parameters["outer"])
    routed = (gates * (values + parameters["lift"][:, None])).sum(dim=-1, keepdim=True)
    return routed + wide @ parameters["shared"]


def _effective(chosen: Tensor) -> Float[Tensor, " mixtures"]:
    """Exp of the entropy of the coalitions of each mixture."""
    codes = (chosen.long() << torch.arange(chosen.shape[-1])).sum(dim=-1)
    numbers = []
    for row in codes:
        share = torch.unique(row, return_counts=True)[1].double() / len(row)
        numbers.append(torch.exp(-(share * share.log()).sum()))
    return torch.stack(numbers)
