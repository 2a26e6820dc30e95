"""Every weight of a router is named for each library, by the library's own rule, and nothing else.

The rules are those of compressed-tensors 0.20.0 (`match_name`), AutoRound 0.16.1
(`resolve_layer_config`), GPTQModel 7.7.0 (`dynamic_get`) and transformers' bitsandbytes quantiser,
which is installed and asked itself.
"""

import re

import pytest
from torch import nn
from transformers.quantizers.quantizers_utils import should_convert_module

from tests.models.tiny import SUPPORTED, tiny_model
from tieline.models import find_routers
from tieline.models.ignore_lists import ignore_lists, router_weights

MODELS = {}


def model_of(family: str) -> nn.Module:
    return MODELS.setdefault(family, tiny_model(family))


def head_of(model: nn.Module) -> set[str]:
    head = model.get_output_embeddings()
    return {name for name, module in model.named_modules() if head is not None and module is head}


FAMILIES = ["olmoe", "deepseek_v3", "llama4", "dbrx", "longcat_flash", "zaya", "gemma4"]


@pytest.mark.parametrize("family", FAMILIES)
def test_lists_name_the_routers_and_nothing_else(family):
    model = model_of(family)
    names = [name for name, _ in model.named_modules()]
    routers, head, lists = set(router_weights(model)), head_of(model), ignore_lists(model)
    rules = [rule.removeprefix("re:") for rule in lists["llm-compressor"]["ignore"]]
    assert {n for n in names if any(n == r or re.match(r, n) for r in rules)} == routers | head
    rules = lists["auto-round"]["layer_config"]
    assert {n for n in names if any(re.search(rule, n) for rule in rules)} == routers
    rules = [rule.removeprefix("-:") for rule in lists["gptqmodel"]["dynamic"]]
    assert {n for n in names if any(re.match(rule, n) for rule in rules)} == routers


@pytest.mark.parametrize("family", FAMILIES)
def test_bitsandbytes_leaves_routers_and_head_alone(family):
    model = model_of(family)
    skipped = ignore_lists(model)["bitsandbytes"]["llm_int8_skip_modules"]
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    left = {name for name in linear if not should_convert_module(name, skipped)}
    assert left == (set(router_weights(model)) | head_of(model)) & linear


def test_a_block_that_routes_is_not_left_out_with_its_experts():
    assert router_weights(model_of("dbrx"))[0].endswith("ffn.router.layer")


def test_routers_without_linear_layers_stand_for_themselves():
    model = model_of("olmoe")
    assert router_weights(model) == list(find_routers(model))


def test_a_pattern_that_fits_more_gives_way_to_names():
    model = model_of("olmoe")
    routers = list(find_routers(model))
    block = routers[0].rsplit(".", 1)[0]
    model.get_submodule(block).add_module("extra", nn.Linear(2, 2))
    try:
        assert len(ignore_lists(model)["gptqmodel"]["dynamic"]) == 1
    finally:
        del model.get_submodule(block).extra


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(SUPPORTED) - set(FAMILIES)))
def test_all_families(family):
    test_lists_name_the_routers_and_nothing_else(family)
    test_bitsandbytes_leaves_routers_and_head_alone(family)
