"""Advice on the shape of a layer, with measurements on a model's own hidden states."""

from dataclasses import replace
from typing import Any, Unpack

import torch

from tieline.analysis.inspect import linear_choice_status
from tieline.core.errors import require
from tieline.core.setting_fields import takes_settings
from tieline.lab.command_settings import DEFAULT_MODEL_WIDTH, DesignOptions, DesignSettings
from tieline.lab.on_model.subject import Progress
from tieline.lab.tropical.collapse import RouterMeasurement, measure_router
from tieline.lab.tropical.layer_shape_advice import PRESETS, Advice, LayerShape, advise
from tieline.models.capture import capture
from tieline.models.configuration import text_config
from tieline.models.demo import DEMO
from tieline.models.families import find_routers
from tieline.models.linear_routers import linear_router_bias, linear_weights
from tieline.models.model import Model, ModelSource, read_shape
from tieline.run.corpus import (
    Text,
    default_sequence_length,
    stacked_batches,
    text_and_origin,
    tokenise,
)
from tieline.run.forward import forward, only_running
from tieline.trace.record import LayerTrace, RoutingTrace

MAX_INPUT_BYTES = 1 << 30
"""Largest total size of the recorded router inputs."""


@takes_settings(DesignSettings)
def design(
    *,
    settings: DesignSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[DesignOptions],
) -> Advice:
    """Compare a layer at several granularities, and measure a model's layers if `measure` is set.

    Args:
        settings: the options; keyword arguments change single ones.
        progress: called with stage, done and total.
    """
    settings = DesignSettings.of(settings, options)
    shape, source = _layer_from_settings(settings)
    changes = {"hidden": settings.hidden, "shared": settings.shared}
    shape = replace(shape, **{name: new for name, new in changes.items() if new is not None})
    advice = advise(shape, settings.d_eff, tuple(settings.split), source, progress)
    if not settings.measure:
        return advice
    names = ("text", "tokens", "batch_size", "seed", "device", "revision", "trust_remote_code")
    choices = {name: getattr(settings, name) for name in names}
    layers = measure_design(settings.model, progress=progress, **choices)
    return replace(advice, measured=layers)


def _layer_from_settings(settings: DesignSettings) -> tuple[LayerShape, str]:
    """Return the layer shape that the settings describe, and the name of its source."""
    preset, model, matrices = settings.preset, settings.model, settings.matrices
    if preset:
        require(preset in PRESETS, f"no preset {preset!r}: one of {', '.join(PRESETS)}")
        return PRESETS[preset], preset
    if model is not None:
        trusted = settings.trust_remote_code
        shape = read_shape(model, revision=settings.revision, trust_remote_code=trusted)
        return LayerShape(**shape._asdict(), matrices=matrices), str(model)
    n_experts, k, width = settings.n_experts, settings.k, settings.expert_width
    assert n_experts is not None
    assert k is not None
    assert width is not None
    return LayerShape(
        n_experts, k, width, DEFAULT_MODEL_WIDTH, matrices=matrices
    ), "the given layer"


def list_presets() -> list[str]:
    """Return a line for each published shape."""
    return [
        f"{name:16} {shape.k} of {shape.n_experts} experts, width {shape.width}, model width "
        f"{shape.hidden}"
        for name, shape in PRESETS.items()
    ]


def measure_design(
    source: ModelSource = DEMO,
    *,
    text: Text = None,
    tokens: int = 4096,
    batch_size: int = 8,
    seed: int = 0,
    progress: Progress | None = None,
    **loading: Any,
) -> tuple[RouterMeasurement, ...]:
    """Measure coalitions between hidden states, saturation and centring, layer by layer.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        text: what to run: a str, the Path of a file, or None for the text in the box.
        tokens: how many tokens of it.
        batch_size: sequences per forward pass.
        seed: of the pairs of tokens.
        progress: called with stage, done and total.
        loading: `dtype`, `device`, `revision` and `trust_remote_code` of a named model.
    """
    content, _ = text_and_origin(text)
    loaded = Model.open(source, "design takes", **loading)
    require(loaded.stream is None, "measuring a design needs the whole model in memory")
    model = loaded.module
    cut = tokenise(loaded.tokenizer, content, tokens, default_sequence_length(model))
    require(cut.tokens >= 3, f"pairs of hidden states need three tokens, the text has {cut.tokens}")
    names = tuple(find_routers(model))
    size = 4 * len(names) * cut.tokens * getattr(text_config(model), "hidden_size", 0)
    require(size <= MAX_INPUT_BYTES, f"the inputs of {cut.tokens:,} tokens exceed 1 GiB")
    with only_running(model), capture(model, keep="inputs", epsilons=()) as recorder:
        for ids in stacked_batches(cut.sequences, batch_size):
            forward(model, ids)
            if progress is not None:
                progress("forward", recorder.n_tokens, cut.tokens)
        trace = recorder.trace()
    weights = linear_weights(model, trace)
    return tuple(_measured_router(model, trace, layer, weights, seed) for layer in trace.layers)


def _measured_router(
    model: Any, trace: RoutingTrace, layer: LayerTrace, weights: dict[str, Any], seed: int
) -> RouterMeasurement:
    """Return the measured ties and switches of one router, or the reason for none."""
    status = linear_choice_status(layer, weights)
    if status == "ok" and not layer.facts.affine:
        status = "not answerable: its scores are not affine in its input"
    if status != "ok":
        return RouterMeasurement(layer.name, status)
    bias = torch.zeros(layer.facts.n_experts, dtype=torch.float64)
    bias = bias + linear_router_bias(model.get_submodule(layer.name), len(bias))
    bias = bias + (0.0 if layer.bias is None else layer.bias)
    selection_bias = bias if bool(bias.any()) else None
    return measure_router(trace, layer, weights[layer.name], selection_bias, seed)
