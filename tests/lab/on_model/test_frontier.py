"""The frontier of a small model."""

import copy
from dataclasses import replace

import pytest

from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.smooth import SmoothingCalibration
from tieline.analysis.smooth_repair import repair_tables
from tieline.core.statistics import Estimate
from tieline.lab.command_settings import FrontierSettings
from tieline.lab.on_model.frontier import least_kl, measure_frontier
from tieline.models import smooth_
from tieline.models.smoothed_router import router_smoothing

IDS = batch(4, 24)
COARSE = "router fp8_e5m2"


@pytest.fixture(scope="module")
def pair():
    model = lively(tiny_model("olmoe"))
    for name, weight in model.named_parameters():
        if "experts" in name:
            weight.mul_(20)
    calibration = SmoothingCalibration.on_batches(model, [IDS], COARSE)
    smoothed = copy.deepcopy(model)
    smooth_(smoothed, epsilon=calibration.by_noise(1.0))
    return model, smoothed, calibration


@pytest.fixture(scope="module")
def frontier(pair):
    model, smoothed, calibration = pair
    settings = FrontierSettings(scales=(1.0, 8.0))
    return measure_frontier((model, smoothed), calibration, list(IDS), settings, budgets=(2.4,))


def test_more_repair_moves_the_model_more(frontier):
    narrow, wide = frontier.points_of("noise")
    assert narrow.table.moved.value < wide.table.moved.value
    assert narrow.table.experts_after.value < wide.table.experts_after.value
    assert wide.factor > narrow.factor
    assert frontier.noise == COARSE


def test_widths_follow_the_noise_or_the_budget(pair, frontier):
    _, smoothed, calibration = pair
    for point in frontier.points_of("noise"):
        assert point.epsilons == {n: point.scale * s for n, s in calibration.sigmas.items()}
    (even,) = frontier.points_of("budget")
    assert calibration.experts(even.epsilons, "projected") == pytest.approx(2.4, abs=0.02)
    widths = {n: router_smoothing(smoothed.get_submodule(n)).epsilon for n in calibration.sigmas}
    assert widths == calibration.by_noise(1.0)  # as before


def test_several_widths_are_measured_as_each_by_itself(pair):
    model, smoothed, calibration = pair
    of = {"perturbations": [calibration.noise], "batch_size": 3}
    scales = [calibration.by_noise(c) for c in (1.0, 4.0)]
    both = repair_tables(model, smoothed, list(IDS), scales, **of)
    alone = [repair_tables(model, smoothed, list(IDS), [width], **of)[0] for width in scales]
    assert list(both) == alone


def with_values(table, moved, after):
    row = replace(table.row(COARSE), before=Estimate(1.0, 0.1), before_floor=Estimate(0.0, 0.0))
    row = replace(row, after=Estimate(after, 0.1))
    return replace(table, rows=(row,), moved=Estimate(moved, 0.1))


def test_the_law_asks_for_nothing_where_nothing_is_repaired(frontier):
    row = with_values(frontier.points[0].table, 0.1, 2.0).row(COARSE)
    assert row.flip_factor == 0.5
    assert least_kl(row) is None
    assert least_kl(replace(row, after=Estimate(0.1, 0.0))) == pytest.approx(0.955, abs=0.01)
