"""The number of experts, by cross-validation and by the dendrogram."""

import numpy as np
import pytest
import torch

from tests.lab.estimation.tables import piecewise
from tieline.lab.estimation.mixture_fit import (
    MOST_ROWS,
    FitSettings,
    WeightedRows,
    cross_validation_curve,
    fit_dendrogram,
    sample_rows,
)
from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.regressor import standardised

FAMILY = MoEModel("linear", "softmax", "linear", 2, 1)


def table(regions, n=600, noise=0.1, seed=3):
    x, y, _ = piecewise(n, 2, regions, noise, seed=seed)
    return standardised(x, y[:, None], np.ones(n), FAMILY)[0]


def folds(n, count=3):
    chunks = torch.arange(n).chunk(count)
    return [(torch.cat([*chunks[:i], *chunks[i + 1 :]]), chunks[i]) for i in range(count)]


@pytest.mark.parametrize("regions", [1, 3])
def test_cross_validation_takes_the_smallest_number_that_is_as_good(regions):
    rows = table(regions, n=300)
    curve = cross_validation_curve(
        FAMILY, rows, 4, folds(300, 2), FitSettings(starts=1, max_iter=30)
    )
    assert curve.experts == (1, 2, 3, 4)
    assert curve.chosen == regions
    best = min(range(4), key=curve.errors.__getitem__)
    limit = curve.errors[best] + curve.standard_errors[best]
    assert curve.errors[curve.chosen - 1] <= limit
    assert all(error > limit for error in curve.errors[: curve.chosen - 1])


def test_no_more_experts_than_rows_of_a_fold():
    rows = table(1, n=6)
    curve = cross_validation_curve(FAMILY, rows, 9, folds(6), FitSettings(starts=1, max_iter=2))
    assert curve.experts == (1, 2, 3, 4)


@pytest.mark.parametrize("regions", [2, 3])
def test_the_dendrogram_finds_how_many_there_are(regions):
    dendrogram = fit_dendrogram(FAMILY, table(regions), 5, FitSettings(starts=2, max_iter=60))
    assert dendrogram.experts == (5, 4, 3, 2, 1)
    assert dendrogram.chosen == regions


def test_many_rows_are_sampled():
    n = MOST_ROWS + 10
    rows = WeightedRows(
        torch.rand(n, 1).double(), torch.rand(n, 1).double(), torch.rand(n).double()
    )
    few = sample_rows(rows, 0)
    assert len(few.x) == MOST_ROWS
    assert few.weight.mean() == pytest.approx(1)
    assert torch.equal(few.x, sample_rows(rows, 0).x)
    assert not torch.equal(few.x, sample_rows(rows, 1).x)
    assert sample_rows(few, 0) is few
