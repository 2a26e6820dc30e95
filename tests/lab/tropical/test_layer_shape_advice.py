"""The advisor: every number against its own function, and the ranges that void one."""

import json
import math

import pytest
import torch

from tieline.core.errors import ParameterError
from tieline.core.numerics import round_to
from tieline.core.ranking import stable_topk
from tieline.lab.geometry import gaussian_gap_density
from tieline.lab.tropical import (
    capacity_bound,
    expected_cells,
    expected_regions,
    group_coalitions,
    sharp_bound,
    wall_density,
)
from tieline.lab.tropical.layer_shape_advice import (
    PRESETS,
    QUANTITIES,
    LayerShape,
    advise,
    gaussian_rounding_flips,
)
from tieline.measure.rounding_flips import emulated_choice

SMALL = LayerShape(16, 4, 20, 64)


def values(row):
    return {name: entry.value for name, entry in row.entries.items()}


def test_every_number_is_that_of_its_function():
    entries = values(advise(SMALL, 5).rows[0])
    assert entries == {
        "parameters": 16 * 3 * 20 * 64 + 16 * 64,
        "active": 4 * 3 * 20 * 64 + 16 * 64,
        "flops": 2 * (4 * 3 * 20 * 64 + 16 * 64),
        "coalitions": 1820,
        "paper_bound": capacity_bound(16, 4, 20, 5),
        "sharp_bound": sharp_bound(16, 4, 20, 5),
        "expected_cells": pytest.approx(expected_cells(16, 4, 5)),
        "expected_regions": pytest.approx(expected_regions(16, 4, 20, 5)),
        "over_dense": pytest.approx(
            expected_regions(16, 4, 20, 5) / capacity_bound(1, 1, 80, 5), rel=1e-9
        ),
        "switches": pytest.approx(wall_density(16, 4) / math.pi),
        "kinks": pytest.approx(80 / math.pi),
        "gap_density": gaussian_gap_density(16, 4),
        "bf16_flips": gaussian_rounding_flips(16, 4),
        "paper_gain": 1,
        "binomial_gain": 1,
        "bound_gain": 1,
        "expected_gain": 1,
        "m_max": 4,
    }


def test_a_split_keeps_memory_and_active_neurons_and_changes_the_gains():
    base, fine = advise(SMALL, 3, (1, 2)).rows
    assert (fine.shape.n_experts, fine.shape.k, fine.shape.width) == (32, 8, 10)
    router = 16 * 64
    a, b = values(base), values(fine)
    assert b["parameters"] - a["parameters"] == b["active"] - a["active"] == router
    ratio = math.comb(32, 8) / math.comb(16, 4)
    assert b["bound_gain"] == pytest.approx(ratio)
    assert b["bound_gain"] == pytest.approx(b["paper_bound"] / a["paper_bound"])
    assert b["binomial_gain"] == pytest.approx(ratio / 2**3)
    assert b["paper_gain"] == pytest.approx((16 * math.e / 4) ** 4 / 2**3.5)
    assert b["expected_gain"] == pytest.approx(b["expected_regions"] / a["expected_regions"])
    assert b["m_max"] == a["m_max"] == 6


def test_example_4_21_is_seven_times_dense_and_not_1820_times():
    entries = values(advise(LayerShape(16, 4, 5, 64), 5).rows[0])
    assert entries["paper_bound"] == 39_494_000
    assert round(entries["expected_regions"]) == 154_641
    assert entries["over_dense"] == pytest.approx(7.126, abs=1e-3)


def test_entries_outside_their_range_say_so():
    base, fine = advise(SMALL, 5, (1, 5)).rows
    assert "no router on R^5" in base.entries["coalitions"].note
    assert "H/m = 4 < d_eff" in fine.entries["m_max"].note
    assert "H/m = 4 < d_eff" in fine.entries["paper_gain"].note
    assert base.entries["paper_gain"].note == base.entries["m_max"].note == ""
    coarse = advise(LayerShape(1024, 128, 8, 64), 2).rows[0].entries["bf16_flips"]
    assert "10 %" in coarse.note
    grouped = advise(PRESETS["deepseek-v3"], 4)
    assert "group-limited" in grouped.rows[0].entries["expected_cells"].note
    assert grouped.rows[0].entries["coalitions"].value == group_coalitions(256, 8, 8, 4)
    assert any("4 of 8 groups" in note for note in grouped.notes)
    reached = advise(LayerShape(4, 2, 8, 16), 3).rows[0].entries["coalitions"]
    assert reached.note == ""


def test_numbers_beyond_float64_keep_their_logarithm():
    entry = advise(LayerShape(2048, 1024, 4096, 4096), 4).rows[0].entries["coalitions"]
    assert entry.value is None
    assert entry.log10 == pytest.approx(math.log10(math.comb(2048, 1024)))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_advised_on_and_told_as_plain_data(name):
    document = json.loads(
        json.dumps(advise(PRESETS[name], 4, (1, 2), name).to_dict(), allow_nan=False)
    )
    assert document["source"] == name
    assert list(document["rows"][1]["entries"]) == list(document["quantities"]) == list(QUANTITIES)
    assert all(q["valid"] and q["meaning"] and q["kind"] for q in document["quantities"].values())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: LayerShape(4, 4, 8), "nothing is routed"),
        (lambda: LayerShape(4, 2, 0), "1 <= width"),
        (lambda: LayerShape(4, 2, 1 << 50), "width <= 1,099"),
        (lambda: LayerShape(4, 2, 8, shared=-1), "0 <= shared"),
        (lambda: LayerShape(100_000, 50_000, 8), "at most 65,536 experts"),
        (lambda: advise(LayerShape(60_000, 30_000, 8), 1, (1, 8)), "splits included"),
        (lambda: LayerShape(6, 2, 8, n_groups=4), "equal groups"),
        (lambda: advise(SMALL, 3, (3,)), "divide the expert width 20, got 3"),
        (lambda: advise(SMALL, 65), "d_eff <= hidden"),
        (lambda: advise(SMALL, 3, ()), "at least one"),
        (lambda: advise(SMALL, 3, (2, 2)), "must differ"),
        (lambda: gaussian_rounding_flips(4, 4), "1 <= k < E"),
        (lambda: gaussian_rounding_flips(4, 2, spread=0.0), "spread > 0"),
        (lambda: gaussian_rounding_flips(4, 2, "int8"), "scaled per token"),
    ],
)
def test_shapes_out_of_range_are_refused(call, message):
    with pytest.raises(ParameterError, match=message):
        call()


@pytest.mark.parametrize(
    ("n", "k", "precision"), [(16, 2, "bf16"), (32, 8, "bf16"), (8, 2, "fp8_e4m3")]
)
def test_rounding_flips_normal_scores_as_often_as_predicted(n, k, precision):
    scores = torch.randn(60_000, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ranked = stable_topk(scores, n)
    choice = emulated_choice(round_to(ranked.values, precision), k, ranked.indices)
    share, flips = choice.flipped.double().mean().item(), gaussian_rounding_flips(n, k, precision)
    assert abs(share - flips) < 3 * math.sqrt(flips / 60_000) + flips**2


def test_rounding_knows_no_scale_but_for_a_factor_of_two():
    plain = gaussian_rounding_flips(16, 4)
    assert gaussian_rounding_flips(16, 4, spread=8.0) == pytest.approx(plain, rel=1e-12)
    assert 0.5 < gaussian_rounding_flips(16, 4, spread=1.5) / plain < 2
