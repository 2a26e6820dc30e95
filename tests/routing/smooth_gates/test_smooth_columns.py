"""Columns of smooth top-k are the shares of `SmoothTopK`, expert by expert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import score_matrices
from tieline.core.errors import ShapeError
from tieline.routing import Groups, SmoothTopK
from tieline.routing.smooth_gates import smooth_columns


@settings(deadline=None, max_examples=60)
@given(score_matrices(), st.data(), st.sampled_from([0.125, 0.5, 2.0]), st.sampled_from([1.0, 4.0]))
def test_columns_are_the_shares_of_the_gate(scores, data, epsilon, b):
    experts = scores.shape[1]
    k = data.draw(st.integers(1, experts))
    k_max = data.draw(st.integers(k, experts))
    columns = smooth_columns(scores, k, epsilon=epsilon, k_max=k_max, b=b)
    gate = SmoothTopK(k, epsilon=epsilon, b=b, k_max=k_max)
    dense = torch.zeros_like(scores).scatter(1, columns.ids, columns.share)
    assert torch.allclose(dense, gate.share(scores), atol=1e-12)
    assert (columns.share.diff(dim=1) <= 1e-12).all()


@settings(deadline=None, max_examples=30)
@given(
    st.lists(st.integers(-20, 20), min_size=24, max_size=24),
    st.sampled_from(["max", "top2sum"]),
    st.sampled_from([0.25, 1.0]),
)
def test_columns_of_groups_are_the_shares_of_the_gate(entries, score, epsilon):
    scores = torch.tensor(entries, dtype=torch.float64).view(3, 8) / 8
    groups = Groups(4, 2, score)
    columns = smooth_columns(scores, 2, epsilon=epsilon, k_max=5, groups=groups)
    gate = SmoothTopK(2, epsilon=epsilon, k_max=5, groups=groups)
    dense = torch.zeros_like(scores).scatter(1, columns.ids, columns.share)
    assert torch.allclose(dense, gate.share(scores), atol=1e-12)


def test_more_slots_than_experts_are_refused():
    with pytest.raises(ShapeError, match="experts"):
        smooth_columns(torch.zeros(1, 4), 2, epsilon=0.1, k_max=5)
