"""Sections 5 and A.5.4: how long a random perturbation stays near ties."""

import math

import torch
from torch import Tensor

from tieline.geometry.occupation import flat_occupation, occupation_bounds, sampled_occupation
from tieline.geometry.ties import tie_flat
from tieline.studies.checks import at_least, at_most, near, within
from tieline.studies.claim import Check, Evidence, Run
from tieline.studies.figure import chart, dots, line
from tieline.studies.paper1.problems import router
from tieline.studies.registry import claim


@claim(
    "p1-propA.31",
    "Prop. A.31",
    "time near one flat",
    statement="E ∫ 1{dist(x_t, S) < ε} dt <= K_n ε^n ∫ t^(-n/2) e^(-b/t) dt, in closed form for "
    "n = 1, 2 and more.",
    tested="The expected time by drawing a uniform time and the path at it, against the exact "
    "value and both bounds, n = 1, 2, 3; and a start within ε, where the bound is infinite.",
)
def one_flat(run: Run) -> Evidence:
    """Sampled, exact and bounded times."""
    weight, bias = router(run, 5, 7)
    eps, horizon = 0.3, 4.0
    checks: list[Check] = []
    values: list[tuple[float, float, float]] = []
    n_draws = run.size(200_000, 2_000_000)
    for n in (1, 2, 3):
        flat = tie_flat(weight, bias, tuple(range(n + 1)))
        x0 = flat.nearest + 0.8 * flat.basis[:, 0]
        found = flat_occupation(flat, x0, eps=eps, horizon=horizon)
        time = horizon * torch.rand(n_draws, dtype=torch.float64, generator=run.generator(n))
        x = x0 + time.sqrt()[:, None] * run.normal(n_draws, 7, stream=10 + n)
        share = (((x - flat.nearest) @ flat.basis).norm(dim=1) < eps).double().mean().item()
        error = horizon * math.sqrt(share * (1 - share) / n_draws)
        exact = found.exact or math.nan
        checks += [
            within(f"sampled and exact, n = {n}", horizon * share, error, exact, resolution=0.1),
            at_most(f"exact and the paper's bound, n = {n}", exact, float(found.paper)),
            at_most(
                f"exact and the finite bound, n = {n}",
                exact,
                float(found.bound),
                1e-9,
                part="corrected",
            ),
        ]
        values.append((exact, float(found.bound), float(found.paper)))
    checks += _from_within(weight, bias)
    return Evidence(
        checks,
        paper=values[1][2],
        corrected=values[1][1],
        measured=values[1][0],
        note="For n >= 2 the bound is infinite when the start is within ε of the flat, and says "
        "nothing; min(T, bound) does.",
    )


def _from_within(weight: Tensor, bias: Tensor) -> list[Check]:
    """A start on the flat itself, n = 2: the paper's bound is infinite, no path stays beyond T."""
    flat = tie_flat(weight, bias, (0, 1, 2))
    found = flat_occupation(flat, flat.nearest, eps=0.3, horizon=4.0)
    return [
        near("the paper's bound from within ε", float(found.paper), math.inf, part="corrected"),
        at_most("the finite one", float(found.bound), 4.0, part="corrected"),
    ]


def _near_ties(run: Run, order: int, paths: int) -> tuple[list[Check], list[float]]:
    weight, bias = router(run, 5, 7)
    x0, checks, row = run.normal(7, stream=3), [], []
    for eps in (0.4, 0.2, 0.1):
        bounds = occupation_bounds(x0, weight, bias, order=order, eps=eps, horizon=4.0)
        found = sampled_occupation(
            x0, weight, bias, 2, order=order, eps=eps, horizon=4.0, paths=paths, seed=run.seed
        )
        value, error = found.value or 0.0, found.standard_error or 0.0
        checks.append(
            at_most(
                f"time and bound, n = {order}, ε = {eps}", value - 4 * error, float(bounds.paper)
            )
        )
        checks.append(
            at_most(
                f"time and finite bound, n = {order}, ε = {eps}",
                value - 4 * error,
                float(bounds.bound),
                part="corrected",
            )
        )
        row += [value, float(bounds.bound), float(bounds.paper)]
    return checks, row


@claim(
    "p1-thm5.3",
    "Thm 5.3, A.32",
    "time near order-n ties",
    statement="The expected time within ε of Γ^(n) is at most the sum over flats of the bounds of "
    "Prop. A.31: 2ΣKε√T for n = 1, ΣKε²E_1(b/T) for n = 2.",
    tested="Simulated paths of a drawn router, by exact distance to Γ^(n), n = 1, 2, three widths.",
    seconds=3,
)
def many_flats(run: Run) -> Evidence:
    """Simulated time under both bounds."""
    paths = run.size(400, 8_192)
    (first, ones), (second, twos) = (_near_ties(run, n, paths) for n in (1, 2))
    widths = [0.4, 0.2, 0.1]
    share = [two / one for one, two in zip(ones[::3], twos[::3], strict=True)]
    return Evidence(
        [
            *first,
            *second,
            at_least("share of order 2 falls with ε", share[0], share[2], part="corrected"),
        ],
        paper=ones[-1],
        corrected=ones[-2],
        measured=ones[-3],
        figure=chart(
            "ε",
            "expected time",
            [
                line("paper, n = 1", widths, ones[2::3], dashed=True),
                line("finite bound, n = 1", widths, ones[1::3]),
                dots("simulated, n = 1", widths, ones[::3]),
                line("finite bound, n = 2", widths, twos[1::3]),
                dots("simulated, n = 2", widths, twos[::3]),
            ],
            x_scale="log",
            y_scale="log",
        ),
    )
