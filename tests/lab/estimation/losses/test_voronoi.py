"""Losses of papers 2 and 4 by hand arithmetic, by plain sums, and by their laws."""

import math

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.estimation import MoEParameters, quadratic_parameters, voronoi_loss, voronoi_losses

TRUTH = MoEParameters(router=[[1, 0], [0, 0]], bias=[0.2, 0], experts=[[1, -1, 0.5], [-1, 1, 0]])
FIT = MoEParameters(
    router=[[1.1, 0.1], [0.8, -0.1], [0.05, 0]],
    bias=[-0.4, -0.6, 0.1],
    experts=[[1.2, -1, 0.5], [0.9, -1.1, 0.6], [-1, 0.9, 0.1]],
)
e, s = math.exp, math.sqrt
MASSES = abs(e(-0.4) + e(-0.6) - e(0.2)) + abs(e(0.1) - 1)


def sigma(c):
    return 1 / (1 + e(-c))


def test_the_example_of_the_losses_of_paper_2_by_hand():
    third = voronoi_loss(FIT, TRUTH, kind="L3", paper=2)
    assert third.value == pytest.approx(0.765631865614, abs=6e-13)
    assert third.cells == ((0, 1), (2,))
    assert third.empty == ()
    by_hand = (
        MASSES
        + e(-0.4) * (s(0.02) + 0.2)
        + e(-0.6) * (s(0.05) + s(0.03))
        + e(0.1) * (0.05 + s(0.02))
    )
    assert third.value == pytest.approx(by_hand, rel=1e-13)
    assert voronoi_loss(FIT, TRUTH, kind="L1", paper=2, r=1).value == third.value
    second = MASSES + e(-0.4) * (0.02 + 0.04) + e(-0.6) * (0.05 + 0.03) + e(0.1) * (0.05 + s(0.02))
    assert voronoi_loss(FIT, TRUTH, kind="L2", paper=2).value == pytest.approx(second, rel=1e-13)
    cubed = (
        MASSES
        + e(-0.4) * (0.02**1.5 + 0.008)
        + e(-0.6) * (0.05**1.5 + 0.03**1.5)
        + e(0.1) * (0.05**3 + 0.02**1.5)
    )
    value = voronoi_loss(FIT, TRUTH, kind="L1", paper=2, r=3).value
    assert value == pytest.approx(cubed, rel=1e-13)


def test_losses_of_paper_4_by_hand():
    truth = quadratic_parameters(
        A=[[[0, 0], [0, 0]], [[1, 0], [0, -1]]],
        b=[[0, 0], [0.5, 0]],
        c=[0.3, -0.2],
        experts=[[1, 0, 0], [0, 1, 0.5]],
    )
    fit = quadratic_parameters(
        A=[[[0.1, 0], [0, 0.2]], [[0, -0.1], [0, 0]], [[1.1, 0], [0.2, -1]]],
        b=[[0, 0.3], [0.1, 0], [0.5, 0.1]],
        c=[-0.5, -0.7, -0.1],
        experts=[[1.1, 0, 0.2], [0.9, 0.1, 0], [0, 1, 0.3]],
    )
    mass = abs(sigma(-0.5) + sigma(-0.7) - sigma(0.3))
    loose = (0.05 + 0.09 + 0.05) + (0.01 + 0.01 + 0.02)
    tight = s(0.05) + 0.1 + 0.1 + 0.2
    first = voronoi_loss(fit, truth, kind="L1", paper=4)
    assert first.cells == ((0, 1), (2,))
    assert first.value == pytest.approx(mass + loose + tight, rel=1e-12)
    polynomial = mass + (0.05 + 0.09 + 0.01 + 0.04) + (0.01 + 0.01 + 0.02 + 0)
    polynomial += 0.05 + 0.01 + 0.01 + 0 + 0.04
    second = voronoi_loss(fit, truth, kind="L2", paper=4, r=2)
    assert second.value == pytest.approx(polynomial, rel=1e-12)
    weak = (s(0.05) + 0.3 + 0.8 + s(0.05)) + (0.1 + 0.1 + 1.0 + s(0.02)) + tight
    assert voronoi_loss(fit, truth, kind="L3", paper=4).value == pytest.approx(weak, rel=1e-12)

    partial = [MoEParameters(p.router[:, :4], p.bias, p.experts) for p in (fit, truth)]
    tight -= 0.1
    strong = mass + (0.05 + 0.05) + (0.01 + 0.02) + tight
    assert voronoi_loss(*partial, kind="L4", paper=4).value == pytest.approx(strong, rel=1e-12)
    weak -= 0.3 + 0.1 + 0.1
    assert voronoi_loss(*partial, kind="L5", paper=4).value == pytest.approx(weak, rel=1e-12)


def test_matrices_lists_and_single_precision_say_the_same():
    lists = ([[1.5, 0.25], [0.0, 0.5]], [0.5, 0.25], [[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    floats = MoEParameters(*(torch.tensor(part) for part in lists))
    for kind in ("L1", "L2", "L3"):
        a = voronoi_loss(MoEParameters(*lists), TRUTH, kind=kind, paper=2).value
        assert a == voronoi_loss(floats, TRUTH, kind=kind, paper=2).value
    square = [[[1.0, 2.0], [3.0, 4.0]], [[0.0, 1.0], [1.0, 0.0]]]
    flat = [[1.0, 2, 3, 4], [0, 1, 1, 0]]
    rest = ([0.1, 0.2], [[1.0, 0], [0, 1.0]])
    zero = MoEParameters([[0.0] * 4] * 2, *rest)
    values = {voronoi_loss(MoEParameters(r, *rest), zero, "L5", 4).value for r in (square, flat)}
    assert len(values) == 1


def test_an_empty_cell_costs_its_mass_in_paper_2_and_nothing_in_paper_4():
    single_expert = MoEParameters([[1, 0]], [0.2], [[1, -1, 0.5]])
    loss = voronoi_loss(single_expert, TRUTH, kind="L3", paper=2)
    assert loss.value == pytest.approx(1, rel=1e-14)
    assert loss.empty == (1,)
    truth = quadratic_parameters([[[0]], [[1]]], [0, 1], [[1, 0], [0, 1]], b=[[0], [0]])
    half = truth.take([0])
    for kind in ("L1", "L2", "L3"):
        loss = voronoi_loss(half, truth, kind=kind, paper=4)
        assert (loss.value, loss.empty) == (0, (1,))


def test_an_atom_between_two_cells_belongs_to_the_first():
    truth = MoEParameters([[1.0], [-1.0]], [0.0, 0.0], [[0.0], [0.0]])
    middle = MoEParameters([[0.0]], [0.0], [[0.0]])
    assert voronoi_loss(middle, truth, kind="L3", paper=2).cells == ((0,), ())


@pytest.mark.parametrize(("paper", "kind"), [(2, "L1"), (2, "L2"), (2, "L3"), (4, "L1"), (4, "L3")])
def test_a_truth_is_at_distance_zero_from_its_renumbering_only(paper, kind):
    generator = torch.Generator().manual_seed(3)
    truth = MoEParameters(
        *(torch.randn(*shape, generator=generator) for shape in ((4, 6), (4,), (4, 3)))
    )
    assert voronoi_loss(truth.take([2, 0, 3, 1]), truth, kind, paper).value == 0
    moved = MoEParameters(truth.router, truth.bias + 1e-3, truth.experts)
    assert voronoi_loss(moved, truth, kind, paper).value > 1e-4


def test_a_batch_holds_the_loss_of_each_of_its_fits():
    generator = torch.Generator().manual_seed(5)
    fits = MoEParameters(
        *(torch.randn(2, 3, *shape, generator=generator) for shape in ((5, 6), (5,), (5, 3)))
    )
    truth = fits[0, 0].take([0, 2, 4])
    for paper, kind in ((2, "L1"), (2, "L2"), (4, "L1"), (4, "L2"), (4, "L3")):
        batch = voronoi_losses(fits, truth, kind, paper, r=2)
        for i in range(2):
            for j in range(3):
                single_loss = voronoi_loss(fits[i, j], truth, kind, paper, r=2)
                assert batch.values[i, j].item() == pytest.approx(single_loss.value, rel=1e-14)
                assert batch.empty[i, j] == len(single_loss.empty)


@pytest.mark.parametrize(
    ("kind", "paper", "r", "message"),
    [("L4", 2, 1, "L1, L2, L3"), ("L9", 4, 1, "L5"), ("L1", 3, 1, "2 and 4"), ("L1", 2, 0, "r is")],
)
def test_unknown_losses_are_refused(kind, paper, r, message):
    with pytest.raises(TielineError, match=message):
        voronoi_loss(FIT, TRUTH, kind=kind, paper=paper, r=r)


def test_shapes_that_do_not_fit_are_refused():
    wide = MoEParameters([[1.0, 2, 3]], [0.0], [[1.0, 2, 3]])
    with pytest.raises(TielineError, match="differ in length"):
        voronoi_loss(wide, TRUTH, kind="L3", paper=2)
    with pytest.raises(TielineError, match="voronoi_losses"):
        voronoi_loss(FIT.expand(2), TRUTH, kind="L3", paper=2)
    with pytest.raises(TielineError, match="d² \\+ d"):
        voronoi_loss(wide, wide, kind="L3", paper=4)
    with pytest.raises(TielineError, match="finite"):
        voronoi_loss(MoEParameters([[math.nan, 0]], [0], [[1, 2, 3]]), TRUTH, kind="L3", paper=2)
    deep = quadratic_parameters([[[1.0]]], [0.0], [[1.0, 2, 3]], b=[[0.0]])
    with pytest.raises(TielineError, match="polynomial"):
        voronoi_loss(deep, deep, kind="L2", paper=4)
