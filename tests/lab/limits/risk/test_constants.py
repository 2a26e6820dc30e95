"""Constants by hand, and refusal of invalid bounds."""

import math

import pytest

from tieline.core.errors import ParameterError
from tieline.lab.limits import boundary_constant, coarea_constant, soft_to_hard_constant


def test_the_soft_to_hard_constant_by_hand():
    value = soft_to_hard_constant(B_f=2.0, B_Y=3.0, n_experts=5, C=0.5, alpha=1.0)
    assert value == 4 * 2 * 5 * 4 * 0.5
    half = soft_to_hard_constant(B_f=1.0, B_Y=0.0, n_experts=2, C=1.0, alpha=0.5)
    assert half == pytest.approx(4 * math.sqrt(math.pi) / 2, rel=1e-15)


def test_the_other_constants_by_hand():
    assert coarea_constant(B_f=2.0, B_Y=3.0, n_experts=5, C_margin=0.5) == 4 * 2 * 5 * 4 * 1.5
    both = boundary_constant(B=1.0, B_stu=3.0)
    assert (both.paper, both.sharp) == (20.0, 16.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"B_f": 0.0}, "B_f=0"),
        ({"B_Y": -1.0}, "B_Y=-1"),
        ({"n_experts": 1}, "n_experts=1"),
        ({"C": 0.0}, "C=0"),
        ({"alpha": -0.5}, "alpha=-0.5"),
    ],
)
def test_bounds_that_are_none_are_refused(change, message):
    good = {"B_f": 1.0, "B_Y": 1.0, "n_experts": 2, "C": 1.0, "alpha": 1.0}
    with pytest.raises(ParameterError, match=message):
        soft_to_hard_constant(**{**good, **change})


def test_other_bad_bounds_are_refused():
    with pytest.raises(ParameterError, match="C_margin=-1"):
        coarea_constant(B_f=1.0, B_Y=1.0, n_experts=2, C_margin=-1.0)
    with pytest.raises(ParameterError, match="B_stu=-2"):
        boundary_constant(B=1.0, B_stu=-2.0)
