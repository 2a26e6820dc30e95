"""Every router is named for each library, and nothing else."""

import re

import pytest

from tests.hf.tiny import tiny_model
from tieline.hf import find_routers
from tieline.hf.ignore_lists import ignore_lists


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "llama4"])
def test_lists_name_the_routers_and_nothing_else(family):
    model = tiny_model(family)
    wanted = set(find_routers(model))
    lists = ignore_lists(model)
    assert set(lists["llm-compressor"]["ignore"]) == wanted
    assert set(lists["bitsandbytes"]["llm_int8_skip_modules"]) == wanted
    assert set(lists["auto-round"]["layer_config"]) == wanted
    rules = [rule.removeprefix("-:") for rule in lists["gptqmodel"]["dynamic"]]
    named = {name for name, _ in model.named_modules() for rule in rules if re.match(rule, name)}
    assert named == wanted
