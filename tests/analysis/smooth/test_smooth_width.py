"""The width chosen for each target, and targets that cannot be reached."""

import pytest

from tieline import TielineError
from tieline.analysis.smooth import chosen_scale
from tieline.analysis.smooth_repair import RepairRow, RepairTable
from tieline.core.statistics import Estimate
from tieline.measure.nearest_ramp import flip_reduction
from tieline.run.condition import noise_perturbation


def table(moved, after):
    """A table of one row whose flip part is 1 before and `after` after."""
    nothing = Estimate(0.0, 0.0)
    kls = (Estimate(1.0, 0.1), nothing, Estimate(after, 0.1), nothing)
    row = RepairRow("router bf16", *kls, *[nothing] * 6)
    sizes = {"experts_by_layer": {}, "tokens": 0, "sequences": 0}
    counts = dict.fromkeys(("experts_before", "experts_after", "loss", "loss_change"), nothing)
    return RepairTable(rows=(row,), moved=Estimate(moved, 0.1), **counts, **sizes)


def test_a_point_is_chosen_by_what_it_moves_or_repairs():
    tables = {c: table(0.01 * c, 1 / flip_reduction(c)) for c in (1.0, 4.0, 16.0)}
    assert chosen_scale(tables, factor=None, max_moved=0.02) == pytest.approx(2.0)
    scale = chosen_scale(tables, factor=flip_reduction(4.0), max_moved=None)
    assert scale == pytest.approx(4.0)
    with pytest.raises(TielineError, match=r"max_moved 5: the largest KL.*is 0.16"):
        chosen_scale(tables, factor=None, max_moved=5.0)
    with pytest.raises(TielineError, match=r"max_moved 0.001: the least KL.*is 0.01"):
        chosen_scale(tables, factor=None, max_moved=0.001)
    with pytest.raises(TielineError, match="factor 900: the largest factor"):
        chosen_scale(tables, factor=900.0, max_moved=None)


def test_noise_is_named_as_for_smooth():
    assert noise_perturbation("bf16").name == "model bf16"
    assert noise_perturbation("router int8").name == "router int8"
