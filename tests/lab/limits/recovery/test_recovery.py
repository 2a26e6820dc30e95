"""Recovery errors of students near and far from their teacher, and imitation masses."""

import pytest
import torch

from tests.lab.limits.problems import TEACHER, sample, signs, within
from tieline.core.errors import ParameterError, ShapeError
from tieline.lab.limits import MoESample, gaussian_inputs, recovery_errors, specialisation_gap

X = gaussian_inputs(20_000, 2, 1)


def drawn_from(student, teacher):
    return MoESample(student.scores(X), student.outputs(X), teacher.value(X))


@pytest.mark.parametrize("labels", ["same", "swapped"])
def test_a_copy_of_the_teacher_is_recovered_without_error(labels):
    student = TEACHER if labels == "same" else TEACHER.swapped()
    result = recovery_errors(drawn_from(student, TEACHER), TEACHER.scores(X), 0.1, 0.1)
    assert result.matching.permutation == ((0, 1) if labels == "same" else (1, 0))
    assert result.experts.value < 1e-25
    assert result.partition.value == 0
    assert result.student_mass == result.teacher_mass


def test_a_turned_wall_misses_twice_the_angle_over_pi():
    turned = recovery_errors(drawn_from(signs(0.4), signs(0.0)), signs(0.0).scores(X), 1e-6, 0.1)
    assert within(turned.partition, 2 * 0.4 / torch.pi)
    assert turned.experts.value == 0
    expected = turned.partition.value / (turned.teacher_mass.value + 0.1**2)
    assert turned.partition_ratio == pytest.approx(expected)


def test_wrong_experts_show_in_the_first_error_only():
    result = recovery_errors(
        drawn_from(signs(0.0, 0.5), signs(0.0)), signs(0.0).scores(X), 0.1, 0.1, eta=0.2
    )
    assert result.experts.value == pytest.approx(0.25)
    assert result.partition.value == 0
    mass = 2 * result.student_mass.value + 0.2 + 0.01
    assert result.expert_ratio == pytest.approx(0.25 / mass)


def test_imitation_masses_by_hand():
    scores = torch.zeros(4, 2).double()
    outputs = torch.tensor([[0.0, 1.0], [0.0, 0.3], [0.4, 0.0], [3.0, 0.0]]).double()
    drawn = MoESample(scores, outputs, torch.zeros(4).double())
    gap = specialisation_gap(drawn, torch.tensor([0, 0, 1, 1]), [0.01, 0.1, 1.0])
    assert gap.etas == (0.0, 0.25, 0.5)
    assert gap.masses[1].tolist() == [[0.5, 0.25], [0.0, 0.5]]
    swapped = specialisation_gap(drawn, torch.tensor([0, 0, 1, 1]), [0.01], permutation=(1, 0))
    assert swapped.etas == (0.5,)


def test_bad_input_is_refused():
    with pytest.raises(ShapeError, match="differ in shape"):
        recovery_errors(sample(n=10), torch.zeros(10, 3), 0.1, 0.1)
    with pytest.raises(ParameterError, match="eta=2"):
        recovery_errors(sample(n=10), torch.zeros(10, 2), 0.1, 0.1, eta=2.0)
    with pytest.raises(ParameterError, match=r"\[-1\.0\]"):
        specialisation_gap(sample(n=10), torch.zeros(10).long(), [-1.0])
