"""Random mixtures for the claims of papers 2 and 4, changes of them, and checks of both."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tieline.lab.claims.claim import ClaimRun
from tieline.lab.claims.evidence import Check, Evidence, at_least, at_most, corrected, qualified
from tieline.lab.estimation import (
    MoEModel,
    MoEParameters,
    quotient_loss,
    quotient_losses,
    regression_distance,
    voronoi_loss,
)
from tieline.lab.estimation.derivative_tests import (
    SPLIT_THRESHOLD,
    RankTest,
    generic_atoms,
    split_test,
)
from tieline.lab.estimation.identifiability import information
from tieline.lab.estimation.model import router_directions


def drawn_mixture(
    run: ClaimRun, model: MoEModel, stream: int = 1, router: float = 1.0
) -> MoEParameters:
    """Draw normal parameters; router rows times `router`, the last bias of a softmax 0."""
    params = model.unflatten(run.normal(model.n_parameters, stream=stream))
    bias = params.bias - params.bias[-1] if model.link == "softmax" else params.bias
    return MoEParameters(router * params.router, bias, params.experts)


def sparse_mixture(run: ClaimRun, model: MoEModel, stream: int = 1) -> MoEParameters:
    """Draw parameters with a zero router row for the first expert."""
    params = drawn_mixture(run, model, stream)
    rows = params.router.clone()
    rows[0] = 0
    return MoEParameters(rows, params.bias, params.experts)


def largest_gap(model: MoEModel, first: MoEParameters, other: MoEParameters, x: Tensor) -> float:
    """Largest |f - f'| over inputs; the two may differ in the number of experts."""
    f = [model.with_experts(p.n_experts).regression(p, x) for p in (first, other)]
    return float((f[0] - f[1]).abs().max())


def split_scale(
    model: MoEModel, truth: MoEParameters, size: float = 0.5, coordinate: int | None = None
) -> MoEParameters:
    """Split the first expert into two of half the mass, φ times 1 ± size; f is the same.

    For experts of some degree p, whose whole row is scaled, or with the strength at an index
    `coordinate` of η, as in two-layer experts. The sigmoid link needs a zero first row.
    """
    order = [0, *range(truth.n_experts)]
    router, bias, experts = (
        truth.router[order],
        truth.bias[order].clone(),
        truth.experts[order].clone(),
    )
    bias[:2] = half_mass(model, bias[0])
    factors = torch.tensor([1 + size, 1 - size], dtype=torch.float64)
    if coordinate is None:
        experts[:2] *= factors.unsqueeze(-1) ** (1 / (model.ridge.degree or 1))
    else:
        experts[:2, coordinate] *= factors
    return MoEParameters(router, bias, experts)


def split_gap(
    run: ClaimRun,
    model: MoEModel,
    truth: MoEParameters,
    size: float,
    coordinate: int | None = None,
) -> float:
    """Largest |f - f*| on 2,000 inputs of the split by `split_scale`."""
    split = split_scale(model, truth, size, coordinate)
    return largest_gap(model, split, truth, run.uniform(2000, model.d))


def half_mass(model: MoEModel, bias: Tensor) -> Tensor:
    """Return the bias that halves the mass of an expert."""
    return bias - math.log(2) if model.link == "softmax" else torch.logit(bias.sigmoid() / 2)


def longer_rows(truth: MoEParameters, factor: float, copies: int = 0) -> MoEParameters:
    """Scale the router rows of a softmax mixture, and split the first atom into copies.

    f is the same for the vanilla cosine router, which does not depend on the length of a row.
    """
    order = [0] * copies + [*range(truth.n_experts)]
    bias = truth.bias[order].clone()
    bias[: copies + 1] -= math.log(copies + 1)
    return MoEParameters(factor * truth.router[order], bias, truth.experts[order])


def shift_rows(model: MoEModel, truth: MoEParameters, step: Tensor) -> MoEParameters:
    """Shift all directions v(β) = β/(‖β‖ + τ1) by `step`; the same f under softmax."""
    tau = model.tau[0]
    v = router_directions("perturbed", truth.router, tau) + step
    rows = tau * v / (1 - torch.linalg.vector_norm(v, dim=-1, keepdim=True))
    return MoEParameters(rows, truth.bias, truth.experts)


def twisted_quadratic(truth: MoEParameters, size: float = 0.3) -> MoEParameters:
    """Add `size` to A_12 and subtract it from A_21 in quadratic scores of the plane; the same f."""
    rows = truth.router.clone()
    rows[:, 1] += size
    rows[:, 2] -= size
    return MoEParameters(rows, truth.bias, truth.experts)


INVISIBLE = 1e-7
"""Largest residual of a split that leaves f unchanged; other splits are above 5e-6."""
FLOOR = 1e-5
"""A ratio ‖f - f*‖ / loss above this counts as bounded away from zero."""

Pair = tuple[MoEModel, MoEParameters, MoEParameters]


def dependent_functions(test: RankTest) -> int:
    """Number of dependent functions, including those that vanish."""
    return test.functions - test.rank + len(test.zero)


def split_checks(
    run: ClaimRun, family: Callable[[str], MoEModel], cases: Mapping[str, str]
) -> list[Check]:
    """Check the split test of each expert, as our own statements.

    `family` maps an expert to its model on the plane, `cases` maps it to "identifiable", "up to
    scale" or "not identifiable".
    """
    x, checks = run.uniform(800, 2), []
    for expert, verdict in cases.items():
        model = family(expert)
        tests = [split_test(model, generic_atoms(model, 2, s), x, seed=run.seed) for s in (0, 1)]
        best, across = (max(getattr(t, f) for t in tests) for f in ("minimum", "up_to_scale"))
        name = f"{expert}: least visible split"
        if verdict == "identifiable":
            checks += corrected(at_least(name, best, SPLIT_THRESHOLD))
            continue
        checks += corrected(at_most(name, best, INVISIBLE))
        rule = at_least if verdict == "up to scale" else at_most
        limit = SPLIT_THRESHOLD if verdict == "up to scale" else INVISIBLE
        checks += corrected(rule(f"{expert}: the same across its scale", across, limit))
    return checks


def same_function_evidence(
    pairs: Mapping[str, Pair],
    x: Tensor,
    kind: str,
    paper: int,
    others: Sequence[Check] = (),
    **fields: Any,
) -> Evidence:
    """Evidence against identifiability: pairs of different measures with one function.

    `pairs` gives by name a model and two of its parameters, compared on inputs x. The loss is
    `kind` of `paper`; `others` are further checks, `fields` further fields of the evidence.
    """
    checks, gaps, loss = [], [], f"L_{kind.removeprefix('L')}"
    for name, (model, first, other) in pairs.items():
        gaps.append(largest_gap(model, first, other, x))
        raw = voronoi_loss(other, first, kind, paper).value
        distance = quotient_loss(model, other, first, kind, paper).value
        checks += [
            at_least(f"{name}: functions differ by", gaps[-1], 1e-6 * raw),
            *corrected(
                at_most(f"{name}: functions agree to", gaps[-1], 1e-12),
                at_least(f"{name}: {loss} of the two", raw, 1e-3),
                at_most(f"{name}: quotient {loss}", distance, 1e-9),
            ),
        ]
    return Evidence.of(*checks, *others, paper="G = G*", measured=max(gaps), **fields)


def least_ratio(
    run: ClaimRun, model: MoEModel, truth: MoEParameters, kind: str, paper: int
) -> float:
    """Least ‖f - f*‖ / quotient loss over random and over the flattest directions of size 1e-3.

    The flattest directions are the eigenvectors of the information matrix, its null space apart.
    """
    x = run.uniform(2000, model.d, stream=21)
    jacobian = model.jacobian(truth, x)
    _, vectors = torch.linalg.eigh(jacobian.T @ jacobian / len(x))
    flat = information(model, truth).nullity
    random = run.normal(64, model.n_parameters, stream=22)
    steps = torch.cat((vectors[:, flat:].T, random / random.norm(dim=1, keepdim=True)))
    fits = model.unflatten(truth.flatten() + 1e-3 * steps)
    distance = regression_distance(model, fits, model, truth, n=2000).value
    loss = quotient_losses(model, fits, truth, kind, paper).values
    return float((distance / loss.clamp_min(1e-300)).min())


def split_ratio(
    model: MoEModel, truth: MoEParameters, steps: Tensor, kind: str, paper: int
) -> float:
    """Least ‖f - f*‖ / quotient loss over splits of the first expert into two of half its mass.

    The rows of `steps` are changes of (router row, expert), of which a split has length 0.05: added
    to one of the two experts and subtracted from the other.
    """
    steps = 0.05 * steps / steps.norm(dim=1, keepdim=True)
    pair = truth.take([0, *range(truth.n_experts)]).expand(len(steps))
    router, bias, experts = pair.router.clone(), pair.bias.clone(), pair.experts.clone()
    bias[:, :2] = half_mass(model, truth.bias[0])
    width = router.shape[-1]
    for i, sign in ((0, 1), (1, -1)):
        router[:, i] += sign * steps[:, :width]
        experts[:, i] += sign * steps[:, width:]
    fits, wider = MoEParameters(router, bias, experts), model.with_experts(truth.n_experts + 1)
    distance = regression_distance(wider, fits, model, truth, n=2000).value
    return float((distance / quotient_losses(model, fits, truth, kind, paper).values).min())


def flat_bound_evidence(gap: float, loss: float, least: float, along: str, apart: str) -> Evidence:
    """Evidence that ‖f - f*‖ >= c·loss fails along a flat direction, and holds apart from it.

    `gap` is the largest |f - f*| along the direction and `loss` the loss there; `least` is the
    least ratio with what `apart` names held fixed.
    """
    return Evidence.of(
        at_least(f"ratio along {along}", gap / loss, FLOOR),
        qualified(at_least(f"least ratio, {apart}", least, FLOOR)),
        corrected(at_most(f"|f - f*| along {along}", gap, 1e-12)),
        paper="c > 0",
        measured=f"{gap / loss:.2g} along {along}, {least:.2g} apart from it",
    )
