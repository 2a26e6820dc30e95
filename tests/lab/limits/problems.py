"""Two-cell mixtures with their truths, shared by the tests of the limits."""

import math

import torch
from hypothesis import assume
from hypothesis import strategies as st

from tieline.lab.limits import TwoCells, evaluate, gaussian_inputs, two_cells

COVARIANCE = torch.tensor([[1.0, 0.3], [0.3, 2.0]], dtype=torch.float64)
STUDENT = two_cells(
    normal=[1.0, 0.5], offset=0.3, slopes=[[1.0, 0.0], [0.0, 1.0]], intercepts=[0.2, -0.1]
)
SLOPES, INTERCEPTS = [[1.0, 0.5], [-1.0, 0.3]], [0.5, 0.1]
TEACHER = two_cells(normal=[1.0, -0.2], offset=-0.1, slopes=SLOPES, intercepts=INTERCEPTS)
SAME_WALL = two_cells(normal=[-2.0, -1.0], offset=-0.6, slopes=SLOPES, intercepts=INTERCEPTS)


def sample(student=STUDENT, teacher=TEACHER, n=100_000, seed=0, covariance=COVARIANCE):
    x = gaussian_inputs(n, student.dim, seed, covariance)
    return evaluate(student.scores, student.outputs, teacher.value, x)


def signs(angle, size=1.0):
    """±size on the sides of a wall through the origin at that angle: misrouting costs 4 size²."""
    normal = [math.cos(angle), math.sin(angle)]
    return two_cells(normal=normal, slopes=[[0.0, 0.0]] * 2, intercepts=[size, -size])


def within(estimate, truth, errors=4.0):
    assert estimate.stderr > 0
    return abs(estimate.value - truth) <= errors * estimate.stderr


numbers = st.integers(-16, 16).map(lambda n: n / 8)


@st.composite
def mixtures(draw, dim=2):
    def tensor(size):
        return torch.tensor([draw(numbers) for _ in range(size)], dtype=torch.float64)

    # not the constructor: its type checker samples items, but strategies must be deterministic
    experts = tensor(2 * (dim + 1)).reshape(2, dim + 1)
    normal, offset = tensor(dim), tensor(1)[0] / 2
    assume(normal.norm() > 0.3)
    return TwoCells(normal, offset, experts)


def line(offset=0.0, levels=(1.0, -1.0), slopes=(0.0, 0.0), scale=1.0) -> TwoCells:
    """A mixture on the line with its wall at x = -offset."""
    return two_cells(
        normal=[scale], offset=scale * offset, slopes=[[s] for s in slopes], intercepts=levels
    )
