"""Names of layers in sentences and tables."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.text import layer_label, short_names


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("model.layers.0.mlp.gate", "layer 0"),
        ("layers.12", "layer 12"),
        ("encoder.block.3.router", "encoder layer 3"),
        ("moe.gate", "layer 'moe.gate'"),
        ("blocks.1.layer.2.gate", "layer 'blocks.1.layer.2.gate'"),
    ],
)
def test_layers_are_called_by_their_numbers(name, label):
    assert layer_label(name) == label


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.mlp.gate", "model.layers.11.mlp.gate"], ["0", "11"]),
        (["encoder.0.gate", "decoder.0.gate"], ["encoder", "decoder"]),
        (["a.gate"], ["a.gate"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["x.1", "x.1.y"], ["x.1", "x.1.y"]),
        ([], []),
    ],
)
def test_short_names_drop_what_all_share(names, short):
    assert short_names(names) == short


@given(st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=5, unique=True))
def test_short_names_stay_different(names):
    assert len(set(short_names(names))) == len(names)
