"""What is recommended follows from the numbers, and never contradicts itself."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.analysis.served_precision import (
    HARMLESS,
    SERVED,
    Recommendation,
    Serving,
    recommend,
    served_rounding,
    tolerated,
)
from tieline.core.statistics import Estimate
from tieline.models.number_formats import FORMATS


def serving(kl, replayed=0.0, error=1e-6, loss=0.0, sequences=32):
    estimates = [Estimate(value, error) for value in (0.04, kl, replayed, loss)]
    return Serving("bf16", *estimates, tokens=4096, sequences=sequences)


@pytest.mark.parametrize(
    ("kl", "replayed", "action"),
    [
        (5e-4, 1e-4, "nothing"),
        (5e-3, 1e-3, "repair routing"),
        (5e-3, 4.5e-3, "finer precision"),
        (5e-3, 3.9e-3, "repair routing"),
    ],
)
def test_the_kl_and_its_cause_decide(kl, replayed, action):
    recommendation = recommend(serving(kl, replayed))
    assert recommendation.action == action
    assert recommendation.is_sure


def test_an_interval_across_the_limit_is_unsure_and_follows_the_estimate():
    below, above = recommend(serving(8e-4, error=5e-4)), recommend(serving(1.5e-3, error=1e-3))
    assert (below.action, below.is_sure) == ("nothing", False)
    assert (above.action, above.is_sure) == ("repair routing", False)


def test_a_share_of_the_routing_near_its_limit_is_unsure():
    kl, replayed = Estimate(5e-3, 1e-4), Estimate(3.9e-3, 5e-4)
    near = replace(serving(5e-3), kl=kl, replayed=replayed)
    assert recommend(near) == Recommendation("repair routing", is_sure=False)


def test_one_sequence_has_no_interval_and_is_never_sure():
    assert not recommend(serving(1e-6, sequences=1)).is_sure


def test_a_loss_that_surely_rises_is_not_harmless():
    assert tolerated(Estimate(1e-5, 1e-7), Estimate(0.01, 1e-4), 32) == "no"
    assert tolerated(Estimate(1e-5, 1e-7), Estimate(0.0, 0.1), 32) == "yes"


def test_routers_that_do_not_choose_come_first():
    broken, dense = (
        replace(serving(1.0), routers=state) for state in ("equal scores", "all chosen")
    )
    assert recommend(broken).action == "mend router"
    assert recommend(dense).action == "no ties"


def test_an_unknown_floor_blames_nothing():
    unknown = Serving("bf16", Estimate(0.1, 0.0), Estimate(1.0, 0.0), tokens=64, sequences=8)
    assert recommend(unknown) == Recommendation("unknown cause", is_sure=False)


@given(st.floats(0, 0.1), st.floats(0, 0.1), st.floats(0, 0.01), st.integers(2, 64))
def test_what_is_sure_stays_with_a_smaller_error(kl, replayed, error, sequences):
    wide = recommend(serving(kl, replayed, error, sequences=sequences))
    narrow = recommend(serving(kl, replayed, error / 10, sequences=sequences))
    if wide.is_sure:
        assert narrow == wide


def test_nothing_is_recommended_just_below_the_limit():
    assert recommend(serving(HARMLESS * 0.99, error=0.0)).action == "nothing"
    assert recommend(serving(HARMLESS, error=0.0)).action != "nothing"


@pytest.mark.parametrize("precision", SERVED)
def test_every_served_precision_rounds_the_whole_model(precision):
    rounding = served_rounding(precision)
    assert rounding.part == "model"
    assert rounding.level in FORMATS
