"""A wrong value planted in what a claim of paper 3 rests on changes its verdict."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from tests.lab.claims.claim.test_claims_can_fail import (
    assert_planted_value_matters,
    by_cost,
    scaled,
    with_field,
)
from tieline.lab.claims.paper3 import manifolds
from tieline.lab.tropical import TropicalPolynomial, capacity_bound


def one_more(real):
    return lambda *args: real(*args) + 1


def every_coalition(real):
    return lambda W, b, k: comb(len(b), k)


def mixed_in(real):
    """A shared expert whose share of the output depends on the routed experts."""

    def call(x, layer, shared):
        output, mask = real(x, layer, shared)
        return (output if shared is None else 1.01 * output), mask

    return call


def recentring(real):
    """A shared expert that would centre the input."""
    return lambda x, layer, shared: real(x if shared is None else x - x.mean(axis=0), layer, shared)


def of_one(real):
    """Coalitions of a single expert."""
    return lambda scores, k: real(scores, 1)


def to_two_digits(real):
    """Crossings that were rounded."""
    return lambda *plane: (np.round(real(*plane)[0], 2), real(*plane)[1])


def without_last(real):
    """A hull that forgot a vertex."""

    def call(self):
        hull = real(self)
        return TropicalPolynomial(hull.exponents[:-1], hull.coefficients[:-1])

    return call


def in_half_precision(real):
    """Weights that were stored in float16."""
    return lambda x: real(x).astype(np.float16).astype(x.dtype)


def spread_out(real):
    """Lines that cross far from the site of their expert."""
    return lambda run, n_experts, width: real(run, n_experts, width, 40.0)


PLANTED = {
    # a power diagram throughout
    "p3-ex4.3": ("arrangements.share_not_nearest", lambda real: lambda weight, bias, x: (
        real(weight, 0 * bias, x)
    )),
    # biases of which the last one is lost
    "p3-rem4.4": ("arrangements.count_walls_between_winners", lambda real: lambda weight, bias: (
        real(weight[:-1], bias[:-1])
    )),
    "p3-rem4.13": ("tightness.zaslavsky", lambda real: lambda n, d: real(n, d + 1)),
    "p3-rem4.23": ("manifolds.sampled_regions", lambda real: lambda r, V, c: (
        real(r, V + 0.1 * r.standard_normal(V.shape), c + 0.1 * r.standard_normal(c.shape))
    )),
    # the upper bound for the expectation
    "p3-rem4.28": ("manifolds.crofton_pieces", lambda real: lambda n, k, h, length: (
        0.2 * manifolds.paper_effective_bound(n, k, h, 1, 8, length)
    )),
    "p3-rem5.2": ("splitting_and_centring.split_gain", lambda real: lambda n, k, d: (
        real(n, k, d // 10)
    )),
    "p3-rem5.4": ("splitting_and_centring.tangent_ranks", lambda real: lambda run, **sizes: (
        real(run, **sizes | {"splits": 1})
    )),
    "p3-secA-minimal": ("tightness.needed_inequalities", lambda real: lambda run, d: real(run, 5)),
    "p3-secF-chambers": ("tightness.permutation_chamber_shares", lambda real: lambda run: (
        1.0, *real(run)[1:]
    )),
    # steps that leave the pieces
    "p3-def3.1": ("algebra.bend_inside_pieces", lambda real: lambda points, margins, *rest: (
        real(points, 50 * margins, *rest)
    )),
    "p3-def3.5": ("algebra.TropicalPolynomial.essential", without_last),
    "p3-def3.2": ("algebra.zaslavsky", one_more),
    "p3-ex3.3": ("algebra.zaslavsky", lambda real: lambda n, d: real(n, 2)),
    "p3-def3.4": ("algebra.plus", lambda real: lambda a, b: a),
    "p3-def3.6": ("algebra.rational_form", lambda real: lambda net: [
        replace(form, denominator=form.numerator) for form in real(net)
    ]),
    "p3-sec3.5": ("algebra.elementary_symmetric", scaled(1.001)),
    "p3-prop4.2": ("arrangements.expected_cells", scaled(1.2)),
    "p3-thm4.5": ("arrangements.count_cells", one_more),
    "p3-thm4.5-cells": ("arrangements.count_cells", every_coalition),
    "p3-thm4.5-supports": ("arrangements.chosen_experts", of_one),
    "p3-ex4.6": ("arrangements.chosen_experts", of_one),
    "p3-rem4.7": ("arrangements.np.exp", in_half_precision),
    # offsets that were not looked at
    "p3-def4.8": ("arrangements.position_failures", lambda real: lambda V, c: (
        real(V, 1.0 + np.arange(len(c)) ** 2)
    )),
    # a term of the sum too few
    "p3-prop4.10": ("arrangements.zaslavsky", lambda real: lambda n, d: real(n, d - 1)),
    # one expert in place of N
    "p3-thm4.14": ("arrangements.capacity_bound", lambda real: lambda n, k, h, d: real(1, 1, h, d)),
    "p3-rem4.15": ("arrangements.placed_layer", spread_out),
    "p3-lem4.18": ("tightness.count_cells", every_coalition),
    "p3-ex4.9": ("arrangements.dense_layer", lambda real: lambda V, c: (
        real(V, c + 0.01 * np.arange(len(c)))
    )),
    "p3-rem4.11": ("arrangements.zonotope_counts", lambda real: lambda *args: (
        real(*args)._replace(vertices=real(*args).upper)
    )),
    "p3-cor4.12": ("arrangements.dense_regions", one_more),
    "p3-cor4.16": ("arrangements.placed_layer", spread_out),
    "p3-thm4.17": ("arrangements.sharp_bound", scaled(0.1)),
    "p3-thm4.19": ("tightness.sharp_bound", lambda real: capacity_bound),
    "p3-rem4.20": ("tightness.sharp_bound", lambda real: capacity_bound),
    # the coalition's neurons forgotten
    "p3-table1": ("tightness.paper_capacities", lambda real: lambda *args: (
        real(*args)._replace(top_k=real(*args).normalised)
    )),
    "p3-ex4.21": ("tightness.expected_regions", scaled(1.001)),
    "p3-asm4.22": ("manifolds.crossings_of", to_two_digits),
    # a half circle for a quarter
    "p3-rem4.25": ("manifolds.crofton_pieces", lambda real: lambda n, k, h, length: (
        real(n, k, h, 2 * length)
    )),
    # a dimension too many
    "p3-cor4.29": ("manifolds.zaslavsky", lambda real: lambda n, d: real(n, d + 1)),
    "p3-prop4.24": ("manifolds.zaslavsky", lambda real: lambda n, d: real(n, d + 1)),
    # biases forgotten
    "p3-thm4.26": ("manifolds.mean_pieces_along_segment", lambda real: lambda run, shape, n, **_: (
        real(run, shape, n)
    )),
    "p3-thm4.27": ("manifolds.crofton_pieces", scaled(1.2)),
    "p3-rem4.30": ("manifolds.dense_regions", one_more),
    "p3-thm5.1": ("splitting_and_centring.printed_splitting_law", scaled(1.01)),
    "p3-cor5.3": ("splitting_and_centring.zaslavsky", one_more),
    "p3-def5.5": (
        "splitting_and_centring.saturation", with_field(smallest=lambda f: 2 * f.smallest)
    ),
    "p3-prop5.6": ("splitting_and_centring.cap_fraction", scaled(1.05)),
    "p3-eq3": ("splitting_and_centring.saturation", with_field(smallest=lambda f: f.smallest / 2)),
    "p3-def5.8": ("splitting_and_centring.shared_expert_mixture", mixed_in),
    "p3-prop5.9": ("splitting_and_centring.shared_expert_mixture", mixed_in),
    "p3-rem5.10": ("splitting_and_centring.shared_expert_mixture", recentring),
}  # fmt: skip


@pytest.mark.parametrize("name", by_cost(PLANTED))
def test_a_planted_value_changes_the_verdict(name, monkeypatch, no_axis_checks):
    assert_planted_value_matters(name, "paper3", PLANTED, monkeypatch)
