"""Weights of experts that are in by a share, against the formulas of families with their own."""

import pytest
import torch

from tests.models.tiny import tiny_model
from tieline.models import find_routers
from tieline.models.families import family_of
from tieline.models.smooth_router import column_weights

IDS = torch.tensor([[4, 1, 6]])
SHARE = torch.tensor([[1.0, 0.5, 0.0]])
SMALL = torch.full((1, 8), -14.0)  # so small a sigmoid that what is added to a sum matters
MASS = torch.sigmoid(torch.tensor(-14.0)).item()


def weights(family, logits, **settings):
    router = next(iter(find_routers(tiny_model(family)).values()))
    for name, value in settings.items():
        setattr(router, name, value)
    return column_weights(family_of(router), router, logits, IDS, SHARE)[0].tolist()


@pytest.mark.parametrize(
    ("family", "added"), [("lfm2_moe", 1e-6), ("muse_spark", 1e-15), ("deepseek_v3", 1e-20)]
)
def test_sigmoids_are_divided_by_their_sum_and_what_the_family_adds(family, added):
    scale = {"routed_scaling_factor": 1.0}
    found = weights(family, SMALL, norm_topk_prob=True, **scale)
    expected = [MASS / (1.5 * MASS + added), 0.5 * MASS / (1.5 * MASS + added), 0.0]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["ernie4_5_moe", "ernie4_5_vl_moe"])
def test_a_sum_below_the_least_is_not_divided_by(family):
    """Softmax of equal logits: 1/8 each, 3/16 in all."""
    assert weights(family, SMALL, norm_min=0.5) == pytest.approx([0.25, 0.125, 0.0])
    assert weights(family, SMALL, norm_min=0.1) == pytest.approx([2 / 3, 1 / 3, 0.0])


def test_a_norm_of_any_order_divides():
    for order, size in ((1, 1.5), (2, 1.25**0.5)):
        found = weights("dbrx", SMALL, moe_normalize_expert_weights=order)
        assert found == pytest.approx([1 / size, 0.5 / size, 0.0])
    found = weights("dbrx", SMALL, moe_normalize_expert_weights=None)
    assert found == pytest.approx([0.125, 0.0625, 0.0])
