"""Two-cell mixtures: evaluation, relabelling, refusals."""

import pytest
import torch
from hypothesis import given

from tests.lab.limits.problems import STUDENT, mixtures
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import check_covariance, gaussian_inputs, two_cells

X = gaussian_inputs(200, 2, 3)


@given(mixtures())
def test_swapping_labels_changes_no_value_and_parameters_make_the_round_trip(cells):
    assert torch.equal(cells.swapped().value(X), cells.value(X))
    again = STUDENT.with_flat(cells.flat())
    assert torch.equal(again.value(X), cells.value(X))
    assert torch.equal(again.scores(X).diff(dim=1), cells.scores(X).diff(dim=1))


@given(mixtures())
def test_the_value_is_that_of_the_expert_with_the_higher_score(cells):
    for x, value in zip(X[:20], cells.value(X[:20]), strict=True):
        first, second = cells.scores(x[None])[0]
        expert = cells.experts[0 if first >= second else 1]
        assert torch.isclose(value, expert[:2] @ x + expert[2])


def test_a_point_on_the_wall_belongs_to_the_first_expert():
    cells = two_cells(normal=[1.0], slopes=[[0.0], [0.0]], intercepts=[3.0, 5.0])
    assert cells.value(torch.zeros(1, 1, dtype=torch.float64)) == 3.0


def test_inputs_have_the_covariance_asked_for_and_the_same_seed_gives_the_same():
    sigma = torch.tensor([[2.0, -0.5], [-0.5, 1.0]], dtype=torch.float64)
    x = gaussian_inputs(100_000, 2, 0, sigma)
    assert torch.allclose(x.T @ x / len(x), sigma, atol=0.04)
    assert torch.equal(x[:5], gaussian_inputs(100_000, 2, 0, sigma)[:5])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normal": [0.0, 0.0]}, "not 0"),
        ({"slopes": [[1.0], [2.0]]}, r"\(2, 2\)"),
        ({"intercepts": [1.0]}, "two intercepts"),
        ({"intercepts": [1.0, float("inf")]}, "finite"),
    ],
)
def test_malformed_mixtures_are_refused(change, message):
    good = {"normal": [1.0, 0.0], "slopes": [[1.0, 0.0], [0.0, 1.0]]}
    with pytest.raises((ParameterError, ShapeError), match=message):
        two_cells(**{**good, **change})


def test_covariances_that_are_none_are_refused_with_their_eigenvalue():
    with pytest.raises(ParameterError, match="least eigenvalue is -1"):
        check_covariance(torch.tensor([[1.0, 2.0], [2.0, 1.0]]), 2)
    with pytest.raises(ParameterError, match="symmetric"):
        check_covariance(torch.tensor([[1.0, 0.5], [0.0, 1.0]]), 2)
    with pytest.raises(ShapeError, match=r"\(3, 3\)"):
        check_covariance(torch.eye(2), 3)
    with pytest.raises(ParameterError, match="n=0"):
        gaussian_inputs(0, 2, 0)
