"""The dendrogram of experts: heights by hand, copies merged first, the right number found."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.estimation.mixture_fit import expert_dendrogram


def mixture(gates, slopes, noise=0.0):
    """Gates, feature and targets of experts h_i = slope_i x in one dimension."""
    n = len(gates)
    generator = torch.Generator().manual_seed(0)
    x = 1 + torch.rand(n, 1, dtype=torch.float64, generator=generator)
    y = (gates * torch.tensor(slopes, dtype=torch.float64)).sum(dim=1, keepdim=True) * x
    y = y + noise * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    return gates, x, y, torch.ones(n).double()


def hard(n, shares):
    """Gates that are one, in these shares of the rows."""
    counts = torch.tensor([round(n * share) for share in shares])
    region = torch.arange(len(shares)).repeat_interleave(counts)
    return torch.nn.functional.one_hot(region, len(shares)).double()


def test_heights_and_merging_by_hand():
    gates, x, y, weight = mixture(hard(100, [0.5, 0.3, 0.2]), [0.0, 1.0, 4.0])
    x = torch.ones_like(x)  # constant experts 0, 1 and 4
    y = (gates * torch.tensor([0.0, 1.0, 4.0]).double()).sum(dim=1, keepdim=True)
    dendrogram = expert_dendrogram(gates, x, y, weight, parameters=2)
    # d(0,1) = .5 .3 / .8 = .1875; merged output .375, mass .8; then .8 .2 (4 - .375)²
    assert dendrogram.experts == (3, 2, 1)
    assert dendrogram.merged == ((0, 1), (0, 1))
    assert dendrogram.heights == pytest.approx((0.1875, 0.16 * 3.625**2), rel=1e-6)
    assert dendrogram.errors == pytest.approx(
        (0, 0.1875, 0.1875 + 0.16 * 3.625**2), rel=1e-6, abs=1e-7
    )
    assert dendrogram.errors[2] == pytest.approx(y.var(correction=0).item(), rel=1e-6)
    assert dendrogram.chosen == 3  # an exact fit that is left costs most


def test_an_expert_in_two_copies_is_one():
    gates = hard(600, [0.25, 0.25, 0.25, 0.25])
    dendrogram = expert_dendrogram(*mixture(gates, [1.0, -2.0, 1.0, 3.0], noise=0.1), 2)
    assert dendrogram.merged[0] == (0, 2)
    assert dendrogram.chosen == 3


def test_as_many_as_there_are_if_all_differ():
    gates = hard(600, [0.25, 0.25, 0.25, 0.25])
    assert expert_dendrogram(*mixture(gates, [1.0, -2.0, 5.0, 3.0], noise=0.1), 2).chosen == 4


def test_an_expert_without_rows_is_merged_first():
    gates = hard(300, [0.5, 0.0, 0.5])
    dendrogram = expert_dendrogram(*mixture(gates, [1.0, 70.0, -1.0], noise=0.1), 2)
    assert dendrogram.heights[0] == pytest.approx(0, abs=1e-9)
    assert dendrogram.chosen == 2


def test_experts_that_all_agree_are_one():
    gates = hard(400, [0.25, 0.25, 0.25, 0.25])
    assert expert_dendrogram(*mixture(gates, [2.0, 2.0, 2.0, 2.0], noise=0.5), 2).chosen == 1


def test_weights_are_repetitions():
    gates, x, y, _ = mixture(hard(60, [0.5, 0.25, 0.25]), [1.0, 2.0, 4.0], noise=0.3)
    weight = torch.randint(1, 4, (60,), generator=torch.Generator().manual_seed(0)).double()
    copies = torch.arange(60).repeat_interleave(weight.long())
    weighted = expert_dendrogram(gates, x, y, weight / weight.mean(), 2)
    repeated = expert_dendrogram(
        gates[copies], x[copies], y[copies], torch.ones(len(copies)).double(), 2
    )
    assert weighted.heights == pytest.approx(repeated.heights)
    assert weighted.errors == pytest.approx(repeated.errors)


def test_one_expert_has_no_dendrogram():
    with pytest.raises(TielineError, match="two experts or more are needed, got 1"):
        expert_dendrogram(*mixture(hard(10, [1.0]), [1.0]), 2)
