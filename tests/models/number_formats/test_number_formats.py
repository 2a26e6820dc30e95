"""Formats against their definition: the nearest number of the grid, with the scale that is said."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.numerics import round_to
from tieline.models import rounding_buffers
from tieline.models.number_formats import FORMATS, GROUP_SIZE, Rounding

CASTS = {"bf16": "bf16", "fp16": "fp16"}
SCALED = ["fp8_e4m3", "fp8_e5m2", "int8", "int8_group", "int4", "int4_group"]


@given(st.sampled_from(["bf16", "fp16"]), st.integers(0, 99), st.sampled_from([1e-9, 1.0, 1e6]))
def test_plain_formats_are_those_of_the_geometry(name, seed, size):
    x = size * torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(FORMATS[name].weights(x).double(), round_to(x, name))


@given(st.sampled_from(["fp8_e4m3", "fp8_e5m2", "int8", "int4"]), st.integers(0, 99))
def test_scaled_formats_round_in_units_of_their_scale(name, seed):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed))
    largest = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0}[name]
    scale = x.abs().amax(dim=1, keepdim=True) / largest
    if name.startswith("fp8"):
        expected = round_to(x / scale, name).float() * scale
    else:
        expected = (x / scale).round() * scale
    assert torch.allclose(FORMATS[name].weights(x), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("axis", [-1, -2])
def test_rounding_twice_changes_nothing_more_and_zeros_stay(name, axis):
    rounding = FORMATS[name].weights
    x = torch.randn(2, 40, 70)
    x[0] = 0
    once = rounding(x, axis)
    assert torch.allclose(rounding(once, axis), once, atol=1e-6)
    assert (once[0] == 0).all()
    assert once.shape == x.shape


def test_groups_have_scales_of_their_own_and_the_last_may_be_short():
    x = torch.ones(1, GROUP_SIZE + 3)
    x[0, GROUP_SIZE:] = 1e-3
    x[0, 0] = 100
    assert torch.allclose(FORMATS["int8_group"].weights(x)[0, GROUP_SIZE:], torch.tensor(1e-3))
    assert (FORMATS["int8"].weights(x)[0, GROUP_SIZE:] == 0).all()


def test_a_plain_format_saturates():
    x = torch.tensor([1e6, -1e6])
    assert FORMATS["fp16"].weights(x).tolist() == [65504.0, -65504.0]
    assert Rounding(torch.float8_e4m3fn)(x).tolist() == [448.0, -448.0]


def test_tf32_keeps_ten_bits_to_nearest_even():
    x = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-10, -(1 + 2**-12), 0.0, 3e38])
    expected = [1.0, 1 + 2**-9, 1 + 2**-10, -1.0, 0.0]
    assert FORMATS["tf32"].weights(x).tolist()[:5] == expected
    y = torch.randn(10_000) * torch.randn(10_000).exp()
    error = ((FORMATS["tf32"].weights(y) - y) / y).abs()
    assert 2**-12 < float(error.max()) <= 2**-11


def test_bf16_in_rounds_what_goes_in_and_not_what_comes_out():
    kept, rounded = FORMATS["bf16_in"], FORMATS["bf16"]
    x = torch.randn(100)
    assert torch.equal(kept.weights(x), rounded.weights(x))
    assert kept.results is None
    assert not kept.plain


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("shape", "axis"), [((6, 40, 48), -1), ((6, 40, 48), -2), ((90, 33), -1)])
def test_pieces_are_the_whole_in_numbers_and_layout(name, shape, axis, monkeypatch):
    monkeypatch.setattr(rounding_buffers, "PIECE", 300)
    monkeypatch.setattr(rounding_buffers, "POOLED", 1)
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    rounding, rooms, addresses = FORMATS[name].weights, rounding_buffers.RoundingBuffers(), []
    for scale in (1.0, 3.0):  # the second time into the memory of the first
        with rooms.borrow() as room:
            rounded = rounding_buffers.rounded_in_pieces(scale * values, rounding, axis, room)
        expected = rounding(scale * values, axis)
        assert torch.equal(rounded, expected)
        assert rounded.stride() == expected.stride()
        addresses.append(rounded.data_ptr())
    assert addresses[0] == addresses[1]


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("turn", [lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[:0]])
def test_rounding_in_place_is_rounding(name, turn, monkeypatch):
    monkeypatch.setattr(rounding_buffers, "PIECE", 64)
    values = turn(torch.randn(9, 5, 8, generator=torch.Generator().manual_seed(1)))
    if len(values):
        values[0, :2, :4] = torch.tensor([torch.inf, -torch.inf, 3.4e38, -3.4e38])
        values[1, 0, 0] = torch.nan
    rounding = FORMATS[name].weights
    expected, address = rounding(values), values.data_ptr()
    rounding_buffers.round_in_place(values, rounding)
    assert torch.equal(values.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))
    assert values.data_ptr() == address
