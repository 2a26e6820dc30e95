"""Rows in standard units, by weight and not by repetition."""

import numpy as np
import pytest
import torch

from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.regressor import distinct_rows, standardised

X = np.array([[1.0, 5.0], [1.0, 5.0], [0.0, 5.0], [3.0, 5.0], [2.0, 5.0]])
Y = np.array([[2.0], [2.0], [1.0], [7.0], [3.0]])


def family(expert="linear", power=2):
    return MoEModel("linear", "softmax", expert, 2, 2, power=power)


def test_equal_rows_become_one_and_rows_without_weight_none():
    x, y, weight = distinct_rows(X, Y, np.array([1.0, 2.0, 1.0, 0.0, 0.5]))
    assert x[:, 0].tolist() == [0, 1, 2]
    assert y[:, 0].tolist() == [1, 2, 3]
    assert weight.tolist() == [1, 3, 0.5]


def test_order_and_repetition_do_not_matter_at_all():
    random = np.random.default_rng(0)
    x, y = random.normal(size=(40, 3)), random.normal(size=(40, 2))
    weight = random.integers(0, 4, size=40)
    order = random.permutation(40)
    copies = np.repeat(order, weight[order])
    weighted = distinct_rows(x, y, weight.astype(float))
    repeated = distinct_rows(x[copies], y[copies], np.ones(len(copies)))
    for a, b in zip(weighted, repeated, strict=True):
        assert np.array_equal(a, b)


def test_standard_units_by_weight_and_a_constant_column_is_zero():
    weight = np.array([1.0, 1.0, 1.0, 1.0, 6.0])
    rows, scales = standardised(X, Y, weight, family())
    mass = weight / weight.sum()
    assert torch.allclose(
        (torch.tensor(mass)[:, None] * rows.x).sum(dim=0), torch.zeros(2).double()
    )
    assert (mass @ rows.x.numpy() ** 2)[0] == pytest.approx(1)
    assert mass @ rows.y[:, 0].numpy() ** 2 == pytest.approx(1)
    assert (rows.x[:, 1] == 0).all()
    assert rows.weight.mean() == pytest.approx(1)
    assert torch.allclose(scales.in_target_units(rows.y), torch.tensor(Y))


@pytest.mark.parametrize(("expert", "power", "low", "high"), [
    ("tanh", 2, -1, 1), ("relu", 2, 0, None), ("gelu", 2, 0, None), ("polynomial", 4, 0, None),
])  # fmt: skip
def test_targets_lie_where_the_experts_can_reach(expert, power, low, high):
    rows, _ = standardised(X, Y, np.ones(5), family(expert, power))
    assert rows.y.min() == low
    if high is not None:
        assert rows.y.max() == high


@pytest.mark.parametrize(("expert", "power"), [("linear", 2), ("two_layer", 2), ("polynomial", 3)])
def test_other_targets_have_mean_zero(expert, power):
    rows, _ = standardised(X, Y, np.ones(5), family(expert, power))
    assert rows.y.mean().abs() < 1e-15
