"""A wrong value planted in what a claim of paper 3 rests on changes its verdict."""

from dataclasses import replace
from math import comb

import numpy as np
import pytest

from tests.papers.registry.test_claims_can_fail import (
    assert_planted_value_matters,
    scaled,
    with_field,
)
from tieline.tropical import capacity_bound


def one_more(real):
    return lambda *args: real(*args) + 1


def every_coalition(real):
    return lambda W, b, k: comb(len(b), k)


def mixed_in(real):
    """A shared expert whose share of the output depends on the routed experts."""

    def call(x, parts, shared):
        output, mask = real(x, parts, shared)
        return (output if shared is None else 1.01 * output), mask

    return call


def recentring(real):
    """A shared expert that would centre the input."""
    return lambda x, parts, shared: real(x if shared is None else x - x.mean(axis=0), parts, shared)


PLANTED = {
    "p3-def3.2": ("algebra.zaslavsky", one_more),
    "p3-ex3.3": ("algebra.zaslavsky", lambda real: lambda n, d: real(n, 2)),
    "p3-def3.4": ("algebra.plus", lambda real: lambda a, b: a),
    "p3-def3.6": ("algebra.rational_form", lambda real: lambda net: [
        replace(form, denominator=form.numerator) for form in real(net)
    ]),
    "p3-sec3.5": ("algebra.elementary_symmetric", scaled(1.001)),
    "p3-prop4.2": ("routing.expected_cells", scaled(1.2)),
    "p3-thm4.5": ("routing.count_cells", one_more),
    "p3-thm4.5-cells": ("routing.count_cells", every_coalition),
    "p3-lem4.18": ("tightness.count_cells", every_coalition),
    "p3-ex4.9": ("arrangements.dense", lambda real: lambda V, c: (
        real(V, c + 0.01 * np.arange(len(c)))
    )),
    "p3-rem4.11": ("arrangements.zonotope_counts", lambda real: lambda *args: (
        real(*args)._replace(vertices=real(*args).upper)
    )),
    "p3-cor4.12": ("arrangements.dense_regions", one_more),
    "p3-cor4.16": ("arrangements.placed", lambda real: lambda run, n, h: real(run, n, h, 40.0)),
    "p3-thm4.17": ("arrangements.sharp_bound", scaled(0.1)),
    "p3-thm4.19": ("tightness.sharp_bound", lambda real: capacity_bound),
    "p3-ex4.21": ("tightness.expected_regions", scaled(1.001)),
    "p3-prop4.24": ("manifolds.zaslavsky", lambda real: lambda n, d: real(n, d + 1)),
    "p3-thm4.26": ("manifolds.crofton", scaled(1.2)),
    "p3-thm4.27": ("manifolds.crofton", scaled(1.2)),
    "p3-rem4.30": ("manifolds.dense_regions", one_more),
    "p3-thm5.1": ("tightness.law", scaled(1.01)),
    "p3-cor5.3": ("tightness.zaslavsky", one_more),
    "p3-def5.5": ("centring.saturation", with_field(smallest=lambda f: 2 * f.smallest)),
    "p3-prop5.6": ("centring.cap_fraction", scaled(1.05)),
    "p3-eq3": ("centring.saturation", with_field(smallest=lambda f: f.smallest / 2)),
    "p3-prop5.9": ("centring.mixture", mixed_in),
    "p3-rem5.10": ("centring.mixture", recentring),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_value_changes_the_verdict(name, monkeypatch, no_axis_checks):
    assert_planted_value_matters(name, "paper3", PLANTED, monkeypatch)
