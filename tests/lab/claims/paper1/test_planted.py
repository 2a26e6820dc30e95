"""A wrong value planted in what a claim of paper 1 rests on changes its verdict."""

import math
from dataclasses import replace

import pytest
import torch

from tests.lab.claims.claim.test_claims_can_fail import (
    assert_planted_value_matters,
    by_cost,
    decided,
    scaled,
    with_argument,
    with_field,
)
from tieline.lab.geometry import ball_volume
from tieline.routing import TopK


def hard(real):
    """A layer that was not smoothed."""
    return lambda k, **options: TopK(k)


def without_ball(real):
    """A leading term that lost the volume of the normal ball."""
    return lambda *, codim, **rest: real(codim=codim, **rest) / ball_volume(codim)


def past_the_wall(real):
    """Exits that were interpolated to six digits."""
    shift = 1e-6 * torch.arange(64, dtype=torch.float64)
    return lambda exits, epsilon: real(
        replace(exits, scores=exits.scores + shift[: exits.scores.shape[1]]), epsilon
    )


def one_flat_of(number):
    """The tube of one flat in place of all."""
    return with_field(flats=lambda tube: tube.flats / number)


PLANTED = {
    "p1-rem4.5": ("tubes.tube_ratio", lambda real: lambda *args, orders, **rest: (
        real(*args, orders=(orders[0], orders[0] - 1), **rest)
    )),
    "p1-secB.1": ("tubes.edge_share", scaled(0.01)),
    # a count of flats that forgot the others
    "p1-rem5.4": ("diffusion.time_integral", lambda real: lambda order, b: 100.0**order),
    "p1-thmA.32-coarse": ("diffusion.time_integral", scaled(0.2)),
    "p1-def3.1": ("ties.stable_topk", lambda real: lambda scores, k: scores.flip(1).topk(k)),
    "p1-def3.2": ("ties.tie_order", scaled(2)),
    # the smallest scores chosen
    "p1-propA.2": ("ties.topk_mask", lambda real: lambda scores, k: real(-scores, k)),
    # squared distances
    "p1-propA.3": ("ties.distance_to_tie", lambda real: lambda *args: real(*args).square()),
    # an equation too few
    "p1-propA.6": ("ties.tie_flat", lambda real: lambda weight, bias, tied: (
        real(weight, bias, tied if len(tied) < 3 else tied[:-1])
    )),
    "p1-eqA.7": ("ties.kth_largest", lambda real: lambda s, k: -real(-s, k)),
    # a distance in scores, not in inputs
    "p1-def4.1": ("ties.nearest_tie_point", with_field(distance=lambda f: 1.1 * f.distance)),
    # the upper end for the lower
    # a cap of a quarter turn, whatever the normals
    "p1-lemA.16": ("ties.polyhedron_bound", lambda real: lambda *args: 0.5),
    "p1-lemA.17": ("ties.router_from_stream", lambda real: lambda *args: (
        torch.ones(5, 7, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    )),
    "p1-thm4.4-alpha": ("ties.slice_density", lambda real: lambda *a: min(0.5, real(*a))),
    # a formula without ω_n/ω_m
    "p1-thm4.4": ("tubes.tube_ratio", with_field(paper=lambda f: f.paper * 2 / math.pi)),
    "p1-propA.9": ("tubes.tube_fraction", scaled(1.0001)),
    "p1-propA.11": ("tubes._printed_beta", lambda real: lambda dim, offset, *rest: (
        real(dim, abs(offset), *rest)
    )),
    "p1-corA.12": ("tubes.tie_tube", one_flat_of(10)),
    "p1-thm4.2": ("tubes.tie_tube", one_flat_of(10)),
    # a codimension too few
    "p1-propA.13": ("tubes.tube_fraction", lambda real: lambda *, codim, **rest: (
        real(codim=codim - 1, **rest)
    )),
    "p1-propA.14": ("tubes.tube_leading_term", without_ball),
    "p1-propA.15": ("tubes.tube_leading_term", without_ball),
    # the gap in place of half the gap
    "p1-def4.6": ("tubes.linf_distance", scaled(2)),
    "p1-propA.20": ("tubes.linf_distance", scaled(2)),
    "p1-thm4.7": ("tubes.linf_distance", scaled(2)),
    # κ_J forgotten: √(2/3) for three and two orthonormal rows
    "p1-thmA.19": ("tubes.band_ratio", with_field(paper=lambda f: f.paper * math.sqrt(1.5))),
    "p1-propA.21": ("diffusion.face_exit", scaled(0.9)),
    # the union bound for that of the nearest face
    "p1-thmA.22": ("diffusion.exit_bounds", lambda real: lambda *args: (
        real(*args)._replace(lower=real(*args).upper)
    )),
    # no reflection
    "p1-corA.23": ("diffusion.face_exit", scaled(0.5)),
    "p1-lemA.25": ("diffusion.topk_mask", lambda real: lambda s, k: torch.ones_like(s) > 0),
    # a dimension too many
    "p1-lemA.27": ("diffusion.annulus_law", lambda real: lambda dim, *rest: real(dim + 1, *rest)),
    # the outer sphere first
    "p1-corA.28": ("diffusion.annulus_law", lambda real: lambda *args: 1 - real(*args)),
    # a variance for a standard deviation
    "p1-lemA.29": ("diffusion.math.sqrt", lambda real: lambda x: x),
    "p1-thmA.30": ("diffusion.exit_orders", past_the_wall),
    "p1-thm5.1": ("diffusion.exit_orders", past_the_wall),
    "p1-propA.31": ("diffusion.flat_occupation", with_argument("epsilon", 0.8)),
    # one flat of ten
    "p1-thm5.3": ("diffusion.occupation_bounds", with_field(
        paper=lambda f: f.paper / 10, bound=lambda f: f.bound / 10
    )),
    "p1-sec6-smoothstep": ("smoothing.smoothstep", with_argument(2, 0.98)),
    "p1-sec6-gate": ("smoothing.SmoothTopK", with_argument("epsilon", 1.1)),
    "p1-sec6-loss": ("smoothing.boundary_loss", scaled(-1)),
    "p1-propA.7": ("smoothing.SmoothTopK", hard),
    "p1-fig1": ("smoothing.SmoothTopK", hard),
    "p1-fig3": ("smoothing.SmoothTopK", hard),
    # the recipe of the other figure
    "p1-fig4": ("smoothing.smoothing_course", lambda real: lambda run, gate: real(run, "annealed")),
    "p1-fig5": ("smoothing.smoothing_course", lambda real: lambda run, gate: real(run, "smooth50")),
    # a tolerance in other units
    "p1-fig6-7": ("smoothing.near_counts", lambda real: lambda scores, k, grid: (
        real(scores, k, [1e-3 * tolerance for tolerance in grid])
    )),
    # SMEAR routed by tokens, as if it were causal
    "p1-secB.2": ("smoothing.smear_influence", lambda real: lambda run, by_token=False: (
        real(run, by_token=True)
    )),
    "p1-table1": ("tables.gain_in_errors", scaled(0.1)),
    # every seed counted twice
    "p1-table8": ("tables.gain_in_errors", with_argument(2, 2)),
    "p1-table3": ("tables.higher_accuracy", decided),
    "p1-table4": ("tables.lower_perplexity", decided),
    "p1-table6": ("tables.lower_perplexity", decided),
}  # fmt: skip


@pytest.mark.parametrize("name", by_cost(PLANTED))
def test_a_planted_value_changes_the_verdict(name, monkeypatch, no_axis_checks):
    assert_planted_value_matters(name, "paper1", PLANTED, monkeypatch)
