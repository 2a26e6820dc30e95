"""The list of layers to keep: sufficient, no longer than needed, largest damage first."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.analysis.remedies import float32_extra_bytes, keep_list
from tieline.core.errors import ParameterError

damages = st.lists(st.integers(0, 20), min_size=1, max_size=6)


@given(damages, st.integers(1, 10))
def test_at_equal_cost_no_shorter_list_recovers_as_much(values, tenths):
    damage_by_layer = {f"layer {i}": float(value) for i, value in enumerate(values)}
    keep = keep_list(damage_by_layer, dict.fromkeys(damage_by_layer, 8), tenths / 10)
    total = sum(values)
    recovered = sum(damage_by_layer[name] for name in keep.layers)
    assert keep.recovered == (recovered / total if total else 0)
    assert keep.bytes == 8 * len(keep.layers)
    assert keep.bytes_all == 8 * len(values)
    if total:
        assert recovered >= tenths / 10 * total - 1e-9
        for some in itertools.combinations(values, max(0, len(keep.layers) - 1)):
            assert sum(some) < tenths / 10 * total or not keep.layers


def test_cheap_layers_come_before_dear_ones_of_the_same_damage():
    keep = keep_list({"a": 1.0, "b": 1.0, "c": 0.0}, {"a": 100, "b": 10, "c": 1}, 0.5)
    assert keep.layers == ("b",)
    assert keep.bytes == 10


def test_bytes_are_what_float32_takes_beyond_the_format():
    router = torch.nn.Linear(10, 4)
    assert float32_extra_bytes(router, "bf16") == 44 * 2
    assert float32_extra_bytes(router, "int8") == 44 * 3
    assert float32_extra_bytes(router, "int4") == 44 * 7 // 2


@pytest.mark.parametrize("share", [0.0, 1.5, -1.0])
def test_a_share_is_a_share(share):
    with pytest.raises(ParameterError, match="share of damage"):
        keep_list({"a": 1.0}, {"a": 1}, share)
