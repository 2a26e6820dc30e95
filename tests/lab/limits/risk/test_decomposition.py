"""Interior and boundary of the risk, and the control of each cell (Lemma 5.5, Prop. 5.8)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.limits.problems import COVARIANCE, STUDENT, TEACHER, mixtures, sample, within
from tests.strategies import score_matrices
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import (
    MoESample,
    ambiguous,
    cell_control,
    confident_expert,
    gaussian_decomposition,
    gaussian_inputs,
    risk_decomposition,
)

X = gaussian_inputs(500, 2, 1)
LABELS = TEACHER.cell(X)


def drawn_from(student):
    return MoESample(student.scores(X), student.outputs(X), TEACHER.value(X))


@given(
    score_matrices().filter(lambda s: len(s) > 1),
    st.sampled_from([0.01, 0.2, 0.49]),
    st.sampled_from([0.3, 2.0]),
)
def test_ambiguity_is_the_size_of_the_largest_weight(scores, epsilon, tau):
    drawn = MoESample(scores, scores, scores[:, 0])
    weights = (scores / tau).softmax(dim=1)
    unsure, leader = ambiguous(drawn, tau, epsilon), confident_expert(drawn, tau, epsilon)
    for i, row in enumerate(weights):
        clear = abs(row.max().item() - (1 - epsilon)) > 1e-9
        assert not clear or bool(unsure[i]) == (row.max().item() <= 1 - epsilon)
        assert leader[i].item() == (-1 if unsure[i] else int(row.argmax()))


@given(mixtures(), st.sampled_from([0.05, 0.5]), st.sampled_from([0.02, 0.3]))
def test_parts_add_up_and_the_layer_obeys_both_constants(student, tau, epsilon):
    decomposition = risk_decomposition(drawn_from(student), tau, epsilon)
    assert decomposition.interior.value + decomposition.boundary.value == pytest.approx(
        decomposition.total.value
    )
    assert 0 <= decomposition.boundary.value <= decomposition.sharp_bound.value + 1e-12
    assert decomposition.sharp_bound.value <= decomposition.paper_bound.value + 1e-12
    assert (
        decomposition.mass.value
        == ambiguous(drawn_from(student), tau, epsilon).double().mean().item()
    )


def test_the_sampled_parts_are_those_of_the_quadrature():
    decomposition = risk_decomposition(sample(n=200_000), 0.2, 0.1)
    exact = gaussian_decomposition(STUDENT, TEACHER, 0.2, 0.1, COVARIANCE)
    assert within(decomposition.interior, exact.interior)
    assert within(decomposition.boundary, exact.boundary)
    assert within(decomposition.mass, exact.mass)


@given(mixtures(), st.sampled_from([0.05, 0.5]), st.sampled_from([0.02, 0.3]))
def test_the_control_of_a_cell_holds_for_every_student_and_labelling(student, tau, epsilon):
    for permutation in (None, (1, 0)):
        for control in cell_control(drawn_from(student), LABELS, tau, epsilon, permutation):
            assert control.slack.value >= -1e-12
            slack = control.left.value - control.right.value
            assert control.slack.value == pytest.approx(slack, abs=1e-12)


def test_the_control_by_hand():
    scores = torch.tensor([[3.0, 0.0], [0.0, 3.0], [0.1, 0.0], [3.0, 0.0]]).double()
    outputs = torch.tensor([[2.0, 0.0], [5.0, 1.0], [0.0, 0.0], [4.0, 0.0]]).double()
    drawn = MoESample(scores, outputs, torch.tensor([1.0, 1.0, 0.0, 9.0]).double())
    first, second = cell_control(drawn, torch.tensor([0, 0, 0, 1]), 1.0, 0.1)
    p = 1 / (1 + math.exp(-3))
    assert first.mass.value == 0.25
    assert first.left.value == pytest.approx((2 * p - 1) ** 2 / 4)
    assert first.right.value == pytest.approx((1 / 2 - 4 * 25 * 0.01) / 4)
    assert second.mass.value == 0


def test_bad_tolerances_and_labels_are_refused():
    drawn = drawn_from(STUDENT)
    with pytest.raises(ParameterError, match=r"epsilon=0\.5"):
        ambiguous(drawn, 1.0, 0.5)
    with pytest.raises(ShapeError, match="need 500 labels, got 3"):
        cell_control(drawn, LABELS[:3], 1.0, 0.1)
    with pytest.raises(ParameterError, match="got 0 … 2"):
        cell_control(drawn, LABELS + LABELS, 1.0, 0.1)
