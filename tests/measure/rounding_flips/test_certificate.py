"""The bound of a score's error holds for every order of summation, and is near what occurs."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.core.ranking import topk_mask
from tieline.measure.rounding_flips import (
    UNIT_ROUNDOFF,
    certified_by_router,
    certified_choices,
    score_error_bound,
)


def drawn(tokens=300, experts=8, dim=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, dim, generator=generator).bfloat16()
    return x, torch.randn(experts, dim, generator=generator).bfloat16()


def summed(x, weight, order):
    """Scores by adding one product after another in float32."""
    total = torch.zeros(len(x), len(weight))
    for i in order:
        total = total + x[:, i, None].float() * weight[:, i].float()
    return total


def test_no_order_of_summation_exceeds_the_bound():
    x, weight = drawn()
    exact, bound = score_error_bound(x, weight, exact_products=True)
    for seed in range(4):
        order = torch.randperm(64, generator=torch.Generator().manual_seed(seed)).tolist()
        assert ((summed(x, weight, order).double() - exact).abs() <= bound).all()


def test_stored_scores_may_be_off_by_their_rounding():
    x, weight = drawn()
    unit = UNIT_ROUNDOFF["bfloat16"]
    exact, bound = score_error_bound(x, weight, output_unit=unit, exact_products=True)
    error = (summed(x, weight, range(64)).bfloat16().double() - exact).abs()
    assert (error <= bound).all()
    assert (error > score_error_bound(x, weight, exact_products=True)[1]).any()


def test_certified_choices_are_those_of_every_score_within_the_bound():
    x, weight = drawn()
    unit = UNIT_ROUNDOFF["bfloat16"]
    exact, bound = score_error_bound(x, weight, output_unit=unit)
    chosen = topk_mask(exact, 2)
    worst = torch.where(chosen, exact - bound, exact + bound)
    unchanged = (topk_mask(worst, 2) == chosen).all(dim=-1)
    sure = certified_choices(x, weight, 2, output_unit=unit)
    assert torch.equal(sure, unchanged)
    assert 0 < sure.sum() < len(sure)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("units", [(2.0**-24, 0.0), (2.0**-24, 2.0**-8), (2.0**-11, 2.0**-11)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_the_short_cut_certifies_no_token_that_the_bound_does_not(kind, units, size):
    unit, output = units
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(6, 48, generator=generator).to(kind)
    x = size * torch.randn(400, 48, generator=generator)
    # half of the tokens are moved to where two experts are within a few units of each other
    scores, rise = x[:200] @ weight.T.float(), weight.float()
    top = scores.topk(3, dim=1)
    between = rise[top.indices[:, 1]] - rise[top.indices[:, 2]]
    gaps = top.values[:, 1] - top.values[:, 2]
    nearness = torch.logspace(-8, 0, 200)
    x[:200] -= ((1 - nearness) * gaps / between.square().sum(1))[:, None] * between
    x = x.to(kind)
    exact, bound = score_error_bound(x, weight, unit=unit, output_unit=output)
    chosen = topk_mask(exact, 2)
    low = (exact - bound).masked_fill(~chosen, torch.inf).amin(1)
    high = (exact + bound).masked_fill(chosen, -torch.inf).amax(1)
    certified = certified_choices(x, weight, 2, unit=unit, output_unit=output)
    assert torch.equal(certified, low > high)
    assert certified.any()
    assert kind == torch.bfloat16 or not certified.all()  # its grid is too coarse for near ties


def test_nothing_is_certified_where_the_bound_ends():
    x, weight = drawn(dim=256)
    assert not certified_choices(x, weight, 2, unit=UNIT_ROUNDOFF["bfloat16"]).any()


def test_a_roundoff_that_is_none_is_refused():
    with pytest.raises(TielineError, match="need 0 < u < 1"):
        score_error_bound(*drawn(), unit=0.0)


def test_a_bias_can_make_and_break_ties():
    x, weight = drawn(experts=3)
    scores = x.double() @ weight.double().T
    bias = torch.tensor([100.0, 0.0, 0.0])  # expert 0 is always first
    first_bias = bias.clone()
    first_bias[1] = (scores[0, 2] - scores[0, 1]).item()  # now tied for the second seat
    assert certified_by_router(x, weight, bias, 2)[0]
    assert not certified_by_router(x, weight, first_bias, 2)[0]


def test_a_bias_may_be_added_anywhere_in_the_sum():
    x, weight = drawn(tokens=2000)
    bias = 1e5 + torch.randn(8, generator=torch.Generator().manual_seed(3))
    sure = certified_by_router(x, weight, bias, 2)
    exact = topk_mask(x.double() @ weight.double().T + bias.double(), 2)
    flips = 0
    for index in (0, 30, 64):
        first, last = range(index), range(index, 64)
        total = summed(x, weight, first) + bias
        for i in last:
            total = total + x[:, i, None].float() * weight[:, i].float()
        same = (topk_mask(total, 2) == exact).all(dim=-1)
        assert same[sure].all()
        flips += int((~same).sum())
    assert flips > 0
    assert 0.3 < sure.double().mean() < 1
    assert certified_by_router(x, weight, None, 2).sum() > sure.sum()
