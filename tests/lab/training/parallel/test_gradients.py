"""Norms, sums and counts over ranks."""

import pytest

from tests.lab.training.parallel.tasks import empty_counts, fresh_model, norm_of_parts, sum_of_used


@pytest.mark.parametrize("expert_ranks", [1, 2])
def test_the_norm_counts_every_part_once(pair, expert_ranks):
    squares = sum(p.detach().double().square().sum().item() for p in fresh_model().parameters())
    for found in pair.run(norm_of_parts, expert_ranks):
        assert found == pytest.approx(squares**0.5, rel=1e-12)


def test_a_parameter_that_one_rank_uses_has_its_gradient_everywhere_and_an_idle_one_none(pair):
    assert pair.run(sum_of_used, 1) == [(3.0, None), (3.0, None)]


def test_a_batch_without_a_token_is_refused(pair):
    for said in pair.run(empty_counts):
        assert "no rank has a token" in said
