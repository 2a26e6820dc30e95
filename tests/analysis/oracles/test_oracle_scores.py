"""Generated scores have the ties that they promise, and no others."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import seeds
from tieline.analysis.oracles import tie_free_scores, tie_heavy_scores
from tieline.core.errors import TielineError
from tieline.core.ranking import gap, ranked_scores

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(seeds, st.integers(2, 12), st.sampled_from(DTYPES), st.data())
def test_tie_free_scores_are_apart_in_their_dtype(seed, experts, dtype, data):
    k = data.draw(st.integers(1, experts))
    planted = tie_free_scores(20, experts, k, gap=0.25, seed=seed, dtype=dtype)
    assert planted.scores.dtype == dtype
    assert (-ranked_scores(planted.scores, experts).diff(dim=1)).min() >= 0.25
    assert not planted.tied.any()
    assert torch.equal(planted.gap, gap(planted.scores, k))


@given(seeds, st.integers(2, 12), st.floats(0, 1), st.data())
def test_tie_heavy_scores_have_the_order_across_the_threshold(seed, experts, share, data):
    k = data.draw(st.integers(1, experts - 1))
    order = data.draw(st.integers(1, experts - 1))
    planted = tie_heavy_scores(40, experts, k, share=share, order=order, gap=0.5, seed=seed)
    assert int(planted.tied.sum()) == round(share * 40)
    assert torch.equal(planted.tied, gap(planted.scores, k) == 0)
    steps = -ranked_scores(planted.scores, experts).diff(dim=1)
    assert torch.equal((steps == 0).sum(dim=1), order * planted.tied.long())
    assert steps[steps > 0].min() >= 0.5 if (steps > 0).any() else True


def test_seeds_decide():
    first, repeated, other = (tie_heavy_scores(9, 6, 2, seed=seed).scores for seed in (1, 1, 2))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)


def test_every_expert_is_chosen_by_some_token():
    scores = tie_free_scores(200, 6, 1).scores
    assert set(scores.argmax(dim=1).tolist()) == set(range(6))


def test_what_cannot_be_held_is_refused():
    with pytest.raises(TielineError, match="exactly"):
        tie_free_scores(4, 400, 2, gap=2**-7, dtype=torch.bfloat16)
    with pytest.raises(TielineError, match="exactly"):
        tie_free_scores(4, 8, 2, gap=0.1, dtype=torch.float32)
    with pytest.raises(TielineError, match="k < experts"):
        tie_heavy_scores(4, 3, 3)
    with pytest.raises(TielineError, match="order"):
        tie_heavy_scores(4, 3, 1, order=3)
    with pytest.raises(TielineError, match="share"):
        tie_heavy_scores(4, 3, 1, share=1.5)
    with pytest.raises(TielineError, match="1 <= k"):
        tie_free_scores(4, 3, 4)
