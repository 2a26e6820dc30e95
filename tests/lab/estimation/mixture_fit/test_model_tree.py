"""Trees of linear models: they find what they can express, by weights and not by rows."""

import torch

from tests.lab.estimation.tables import piecewise, steps
from tieline.lab.estimation.mixture_fit import linear_tree, weighted_quantiles


def tensors(x, y):
    return torch.tensor(x), torch.tensor(y).reshape(len(x), -1)


def test_a_jump_is_found_where_it_is():
    x, y = tensors(*steps(400, 0.0)[:2])
    leaf = linear_tree(x, y, torch.ones(400).double(), 2, cuts=99)
    wrong = (leaf == 1) != (x[:, 0] >= 0)
    assert wrong.double().mean() < 0.02  # the nearest of 99 quantiles
    assert x[wrong].abs().max() < 0.05 if wrong.any() else True


def test_quadrants_of_two_features_are_found():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2000, 4, dtype=torch.float64, generator=random)
    region = (x[:, 1] > 0).long() + 2 * (x[:, 3] > 0).long()
    models = torch.randn(4, 4, dtype=torch.float64, generator=random) * 3
    y = (x * models[region]).sum(dim=1, keepdim=True)
    leaf = linear_tree(x, y, torch.ones(2000).double(), 4, cuts=31)
    for leaf_index in range(4):
        inside = region[leaf == leaf_index]
        assert (inside == inside.mode().values).double().mean() > 0.9


def test_a_row_of_weight_two_is_two_rows_in_any_order():
    x, y = tensors(*piecewise(150, 3, 3, 0.3)[:2])
    weight = torch.randint(1, 4, (150,), generator=torch.Generator().manual_seed(1)).double()
    order = torch.randperm(150, generator=torch.Generator().manual_seed(2))
    repeats = torch.arange(150).repeat_interleave(weight.long())
    leaf = linear_tree(x, y, weight, 4)
    mixed = linear_tree(x[order], y[order], weight[order], 4)
    copied = linear_tree(x[repeats], y[repeats], torch.ones(len(repeats)).double(), 4)
    assert torch.equal(mixed, leaf[order])
    assert torch.equal(copied, leaf[repeats])


def test_targets_that_are_linear_are_not_split():
    x = torch.randn(200, 3, dtype=torch.float64)
    leaf = linear_tree(x, x.sum(dim=1, keepdim=True), torch.ones(200).double(), 4, ridge=0.0)
    shares = torch.bincount(leaf, minlength=4).double() / 200
    y = x.sum(dim=1)
    for (
        leaf_index
    ) in leaf.unique():  # whatever rounding splits, every leaf has the one linear model
        inside = leaf == leaf_index
        design = torch.cat([x[inside], torch.ones(int(inside.sum()), 1).double()], dim=1)
        coefficients = torch.linalg.lstsq(design, y[inside]).solution
        assert torch.allclose(coefficients[:3], torch.ones(3).double(), atol=1e-6)
    assert shares.sum() == 1


def test_leaves_are_not_smaller_than_their_models():
    x, y = tensors(*piecewise(60, 5, 4, 0.1)[:2])
    leaf = linear_tree(x, y, torch.ones(60).double(), 20)
    assert torch.bincount(leaf).min() >= 6
    assert len(leaf.unique()) <= 10


def test_weighted_quantiles_by_repetition():
    values, weight = torch.tensor([3.0, 1.0, 2.0]).double(), torch.tensor([1.0, 2.0, 1.0]).double()
    levels = torch.tensor([0.25, 0.5, 0.51, 0.75, 0.76, 1.0]).double()
    assert weighted_quantiles(values, weight, levels).tolist() == [1, 1, 2, 2, 3, 3]
