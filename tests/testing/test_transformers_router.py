import pytest
import torch

from tests.models.tiny import CHOSEN, EXPERTS, SUPPORTED, tiny_model
from tieline.core.errors import UnsupportedModelError
from tieline.models import find_routers
from tieline.testing import assert_router, family_router

SHOWN = ("mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3", "lfm2_moe")
NO_RULE = {
    "axk2",
    "dbrx",
    "deepseek_v4",
    "diffusion_gemma",
    "ernie4_5_moe",
    "ernie4_5_vl_moe",
    "gemma4",
    "inkling",
    "jetmoe",
    "llama4",
    "longcat_flash",
    "mistral4",
    "mistral_large4",
    "phimoe",
    "zaya",
}
"""Families whose rule `RouterRule` does not state."""

OTHER_INPUT = {"afmoe", "laguna", "muse_spark"}
"""Routers that take three axes, cap their logits or multiply them."""


def first_router(family):
    return next(iter(find_routers(tiny_model(family)).values()))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in SHOWN else pytest.mark.slow)
        for family in sorted(set(SUPPORTED) - NO_RULE - OTHER_INPUT)
    ],
)
def test_every_family_routes_by_its_rule(family):
    router, rule = family_router(first_router(family))
    experts, k = EXPERTS, CHOSEN
    assert_router(router, rule, [(experts, k)], names=NAMES)


NAMES = ("normal", "negative", "huge", "equal", "tied", "masked", "one-nan", "no-rows", "one-row")


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(NO_RULE))
def test_a_family_without_a_rule_is_refused(family):
    with pytest.raises(UnsupportedModelError, match="none of RouterRule"):
        family_router(first_router(family))


def test_another_module_is_refused():
    with pytest.raises(UnsupportedModelError, match="no router"):
        family_router(torch.nn.Linear(2, 2))
