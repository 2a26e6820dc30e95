"""Tokens until every expert has enough, against simulation."""

import math

import numpy as np
import pytest
from scipy.stats import poisson

from tests.trace.zoo import make_trace
from tieline.core.errors import TielineError
from tieline.measure.calibration_need import calibration_need, tokens_needed
from tieline.trace import summarise


def test_so_many_tokens_are_enough_as_often_as_promised():
    rng = np.random.default_rng(0)
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    need = tokens_needed("a", shares * 1000, 1000, least=20, confidence=0.9)
    assert need.expert == 3
    runs = rng.multinomial(math.ceil(need.needed), shares, size=4000).min(axis=1)
    assert 0.9 <= (runs >= 20).mean() <= 0.985
    fewer = rng.multinomial(int(0.7 * need.needed), shares, size=4000).min(axis=1)
    assert (fewer >= 20).mean() < 0.75


def test_the_rate_is_a_quantile_of_poisson():
    need = tokens_needed("a", [10], 100, least=5)
    assert poisson.sf(4, need.needed * 0.1) == pytest.approx(0.95)


def test_the_interval_holds_the_truth():
    rng, inside = np.random.default_rng(1), 0
    true = tokens_needed("a", [20_000, 980_000], 1_000_000, least=8).needed
    for _ in range(300):
        count = rng.poisson(0.02 * 2000)
        need = tokens_needed("a", [count, 2000 - count], 2000, least=8)
        inside += need.low <= true <= need.high
    assert inside >= 0.93 * 300


def test_the_interval_holds_where_many_experts_are_equal():
    """The fewest of 64 equal counts lies far below its mean."""
    rng, inside = np.random.default_rng(2), 0
    true = tokens_needed("a", [1000] * 64, 64_000, least=8).needed
    for _ in range(300):
        need = tokens_needed("a", rng.multinomial(6400, [1 / 64] * 64), 6400, least=8)
        assert need.high is not None
        inside += need.low <= true <= need.high
    assert inside >= 0.95 * 300


def test_an_expert_without_tokens_gives_a_lower_end():
    need = tokens_needed("a", [0, 50], 50, least=1)
    assert (need.needed, need.high) == (None, None)
    assert need.low > 25


def test_traces_and_summaries_give_the_same():
    trace = make_trace(tokens=60)
    needs = calibration_need(trace, 4)
    assert {x.name for x in needs} == {layer.name for layer in trace.layers}
    assert [x.needed for x in needs] == sorted((x.needed for x in needs), reverse=True)
    assert calibration_need(summarise(trace), 4) == needs


@pytest.mark.parametrize(("least", "confidence", "tokens"), [(0, 0.9, 5), (1, 1.0, 5), (1, 0.9, 0)])
def test_impossible_wishes_are_refused(least, confidence, tokens):
    with pytest.raises(TielineError):
        tokens_needed("a", [1, 2], tokens, least, confidence)
