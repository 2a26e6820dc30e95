"""The bound of a score's error holds for every order of summation, and is near what occurs."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.core.ranking import topk_mask
from tieline.measure.rounding_flips import UNIT_ROUNDOFF, certified_choices, score_error_bound


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
    kept = (topk_mask(worst, 2) == chosen).all(dim=-1)
    sure = certified_choices(x, weight, 2, output_unit=unit)
    assert torch.equal(sure, kept)
    assert 0 < sure.sum() < len(sure)


def test_nothing_is_certified_where_the_bound_ends():
    x, weight = drawn(dim=256)
    assert not certified_choices(x, weight, 2, unit=UNIT_ROUNDOFF["bfloat16"]).any()


def test_a_roundoff_that_is_none_is_refused():
    with pytest.raises(TielineError, match="need 0 < u < 1"):
        score_error_bound(*drawn(), unit=0.0)
