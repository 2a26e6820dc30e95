"""Shapes of routed layers from configurations, without weights."""

import pytest
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)

from tieline.core.errors import TielineError, UnsupportedModelError
from tieline.models.configuration import RoutedShape, routed_shape
from tieline.models.model import read_shape


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (MixtralConfig(), RoutedShape(8, 2, 14336, 4096)),
        (DeepseekV3Config(), RoutedShape(256, 8, 2048, 7168, 1, 8, 4)),
        (OlmoeConfig(intermediate_size=1024), RoutedShape(64, 8, 1024, 2048)),
        (Qwen3MoeConfig(), RoutedShape(128, 8, 768, 2048)),
        (GptOssConfig(num_local_experts=32), RoutedShape(32, 4, 2880, 2880)),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_published_families_tell_their_shape(config, shape):
    assert routed_shape(config) == shape


def test_presets_are_the_defaults_of_their_configurations():
    from tieline.lab.tropical.layer_shape_advice import PRESETS

    for name, config in (("mixtral-8x7b", MixtralConfig()), ("deepseek-v3", DeepseekV3Config())):
        shape = routed_shape(config)._asdict()
        assert {field: getattr(PRESETS[name], field) for field in shape} == shape


def test_the_model_in_the_box_tells_its_shape():
    assert read_shape() == RoutedShape(16, 2, 64, 128)


def test_dense_models_and_missing_ones_are_refused():
    with pytest.raises(UnsupportedModelError, match="names no n_experts"):
        routed_shape(LlamaConfig())
    with pytest.raises(TielineError, match="no-such-folder"):
        read_shape("/no-such-folder/at-all")
