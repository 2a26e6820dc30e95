"""The comparison of sigmoid and softmax heads: rates and constants of both."""

import pytest

from tieline.core.errors import TielineError
from tieline.lab.estimation.attention_heads import KINDS, compare_attention


@pytest.fixture(scope="module")
def heads():
    return compare_attention((400, 1200, 3600), repetitions=24, families=("head",))


@pytest.mark.parametrize("kind", KINDS)
def test_students_of_the_right_kind_learn_at_the_square_root(heads, kind):
    curve = heads.curve("head", kind, kind)
    assert curve.failed == 0
    assert curve.misfit == 0
    assert -0.62 < curve.function_rate.slope < -0.40
    assert -0.62 < curve.experts_rate.slope < -0.40


@pytest.mark.parametrize("kind", KINDS)
def test_their_constants_are_those_of_the_information(heads, kind):
    curve = heads.curve("head", kind, kind)
    n = curve.sizes[-1]
    # the mean of 24 χ² of 6 degrees of freedom is off by √(2/(24·6)) = 12 %, its root by 6 %
    assert curve.function[-1] * n**0.5 == pytest.approx(curve.predicted_function, rel=0.25)
    assert curve.experts[-1] * n**0.5 == pytest.approx(curve.predicted_experts, rel=0.5)
    assert curve.predicted_function == pytest.approx(0.1 * 6**0.5)


def test_students_of_the_other_kind_keep_their_distance_but_find_their_own_minimum(heads):
    for teacher, student in (KINDS, KINDS[::-1]):
        curve = heads.curve("head", teacher, student)
        assert curve.misfit > 0.05
        assert curve.function[-1] == pytest.approx(curve.misfit, rel=0.05)
        assert -0.7 < curve.experts_rate.slope < -0.3
        assert curve.predicted_experts is None


def test_the_ratio_of_samples_is_that_of_the_constants(heads):
    soft, sigmoid = (heads.curve("head", kind, kind).predicted_experts for kind in KINDS)
    assert heads.sample_ratio("head") == pytest.approx((soft / sigmoid) ** 2)
    with pytest.raises(KeyError):
        heads.sample_ratio("mixture")


def test_a_seed_gives_the_same_again():
    first, second, other = (
        compare_attention((50, 100), repetitions=2, families=("head",), others=False, seed=seed)
        for seed in (3, 3, 4)
    )
    assert first == second
    assert first != other


@pytest.mark.parametrize(("wrong", "message"), [
    ({"sizes": (100,)}, "2 sizes or more"),
    ({"noise": 0.0}, "positive"),
    ({"families": ("tree",)}, "families are among"),
    ({"tokens": 1}, "2 tokens or more"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(wrong, message, no_axis_checks):
    with pytest.raises(TielineError, match=message):
        compare_attention(**{"sizes": (100, 200), "repetitions": 1, **wrong})
