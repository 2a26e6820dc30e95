"""Matching by brute force over permutations, and Lemma 5.16 as printed against its correction."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.limits.problems import STUDENT, TEACHER, mixtures
from tests.strategies import score_matrices
from tieline.core.errors import ParameterError
from tieline.lab.limits import (
    MoESample,
    confident_expert,
    gaussian_inputs,
    match_experts,
    misrouting_bound,
    specialisation_gap,
)

X = gaussian_inputs(2000, 2, 1)
FAR = TEACHER.with_experts(torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, -2.0]]).double())
LABELS = FAR.cell(X)


def drawn_from(student, teacher=FAR):
    return MoESample(student.scores(X), student.outputs(X), teacher.value(X))


@given(score_matrices().filter(lambda s: len(s) > 1), st.randoms(use_true_random=False))
def test_the_matching_has_the_least_misrouted_mass_of_all_permutations(scores, random):
    experts = scores.shape[1]
    labels = torch.tensor([random.randrange(experts) for _ in scores])
    drawn = MoESample(scores, scores, scores[:, 0])
    leader = confident_expert(drawn, 0.5, 0.2).tolist()
    masses = [
        sum(j >= 0 and j != order[k] for j, k in zip(leader, labels.tolist(), strict=True))
        for order in itertools.permutations(range(experts))
    ]
    matching = match_experts(drawn, labels, 0.5, 0.2)
    assert matching.misrouted.value == pytest.approx(min(masses) / len(scores))
    for k, j in itertools.product(range(experts), repeat=2):
        both = sum(a == j and b == k for a, b in zip(leader, labels.tolist(), strict=True))
        assert matching.agreement[k, j].item() == pytest.approx(both / len(scores))


def test_swapped_students_are_matched_back():
    assert match_experts(drawn_from(FAR), LABELS, 0.01, 0.1).permutation == (0, 1)
    swapped = match_experts(drawn_from(FAR.swapped()), LABELS, 0.01, 0.1)
    assert swapped.permutation == (1, 0)
    assert swapped.misrouted.value == 0


def test_lemma_5_16_as_printed_fails_for_the_teacher_under_the_swap():
    drawn = drawn_from(FAR)
    eta = specialisation_gap(drawn, LABELS, [1.0]).etas[0]
    swap = misrouting_bound(drawn, LABELS, 0.01, 0.1, gamma=1.0, eta=eta, permutation=(1, 0))
    assert eta == 0
    assert swap.admissible
    assert swap.interior.value < 1e-2
    assert swap.paper_bound > 0.2 > 20 * swap.interior.value
    assert swap.misrouted.value == swap.imitated.value > 0.9
    assert swap.corrected_bound.value == 0


@given(mixtures(), st.sampled_from([0.02, 0.3]), st.permutations([0, 1]))
def test_the_corrected_bound_holds_for_every_student_and_permutation(student, tau, order):
    bounded = student.with_experts(student.experts * torch.tensor([0.0, 0.0, 1.0]).double())
    drawn = drawn_from(bounded)
    result = misrouting_bound(drawn, LABELS, tau, 0.1, gamma=0.7, eta=0.0, permutation=order)
    assert result.admissible  # 4 ε B_stu <= 0.8 < √0.7
    assert result.interior.value >= result.corrected_bound.value - 1e-12


def test_the_corrected_bound_by_hand():
    scores = torch.tensor([[9.0, 0.0], [9.0, 0.0], [0.0, 9.0], [0.0, 0.0]]).double()
    outputs = torch.tensor([[1.0, 0.0], [0.1, 0.0], [0.0, 0.0], [0.0, 0.0]]).double()
    drawn = MoESample(scores, outputs, torch.zeros(4).double())
    labels = torch.tensor([1, 1, 1, 0])
    result = misrouting_bound(drawn, labels, 1.0, 0.1, gamma=0.5, eta=0.1, permutation=(0, 1))
    assert result.misrouted.value == 0.5
    assert result.imitated.value == 0.25
    assert result.corrected_bound.value == pytest.approx(0.5 / 4 * 0.25)
    assert result.exception == pytest.approx(0.2)
    assert result.paper_bound == pytest.approx(0.5 / 4 * 0.3)


def test_bad_bounds_are_refused():
    drawn = drawn_from(STUDENT)
    with pytest.raises(ParameterError, match=r"gamma=0\.0"):
        misrouting_bound(drawn, LABELS, 1.0, 0.1, gamma=0.0, eta=0.0, permutation=(0, 1))
    with pytest.raises(ParameterError, match=r"\[0, 0\]"):
        misrouting_bound(drawn, LABELS, 1.0, 0.1, gamma=1.0, eta=0.0, permutation=(0, 0))
    with pytest.raises(ParameterError, match=r"eta=1\.0"):
        misrouting_bound(drawn, LABELS, 1.0, 0.1, gamma=1.0, eta=1.0, permutation=(0, 1))
