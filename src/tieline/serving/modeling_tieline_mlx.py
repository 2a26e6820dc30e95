"""A smoothed Mixture-of-Experts model in mlx-lm; runs without Tieline.

    mlx_lm.generate --model FOLDER --trust-remote-code --prompt ...

This file is part of the model's folder: `config.json` names it under "model_file". It builds the
model of mlx-lm that "tieline" in `config.json` describes, and lets each router share the k places
of a token among nearly tied experts, by the formulas of `modeling_tieline.py`. Routers with groups,
a selection bias or a scale, and blocks with more than a gate and experts, raise an error.
"""

import importlib
import math
from typing import Any

import mlx.core as mx  # pyright: ignore[reportMissingImports]

MARKER = "tieline_marker"
EXTRA_SLOTS, FEW_EXPERTS = 8, 16
SMALLEST = 2.0**-126
"""The smallest normal number of float32."""


class ModelArgs:
    """Reads the settings of mlx-lm's own model, with the rules of its routers."""

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Any:
        """Return the settings in "tieline", as an instance of the model's own class."""
        facts = config["tieline"]
        for rule in facts["rules"]:
            refuse_unserved(rule)
        inner = dict(facts["config"])
        for name, value in (inner.get("rope_parameters") or {}).items():
            inner.setdefault(name, value)  # mlx-lm reads the base of the rotation there alone
        if "num_local_experts" in inner:
            inner.setdefault("num_experts", inner["num_local_experts"])
        inner.setdefault("head_dim", inner["hidden_size"] // inner["num_attention_heads"])
        module = importlib.import_module(f"mlx_lm.models.{inner['model_type']}")
        settings = module.ModelArgs.from_dict(inner)
        settings.tieline = facts["rules"], module
        return settings


def refuse_unserved(rule: dict[str, Any]) -> None:
    """Raise for a rule with groups, a bias or a scale, which are not supported here."""
    for field in ("groups", "bias", "bias_argument", "scale"):
        if rule[field] is not None:
            raise ValueError(
                f"mlx-lm cannot run this smoothed model: its router {rule['name']!r} has "
                f"{field}={rule[field]!r}"
            )


def Model(settings: Any) -> Any:  # noqa: N802 - the name that mlx-lm looks for
    """Build the model of mlx-lm with smoothed blocks."""
    rules, module = settings.tieline

    class SmoothedModel(module.Model):
        """The model, without the marker tensor of its weights."""

        def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
            """Return the weights in mlx-lm's form, without the marker."""
            rest = {name: value for name, value in weights.items() if name != MARKER}
            return super().sanitize(rest) if hasattr(module.Model, "sanitize") else rest

    model = SmoothedModel(settings)
    blocks = {
        _layer_number(name): block
        for name, block in model.named_modules()
        if "gate" in block and "switch_mlp" in block
    }
    for rule in rules:
        smooth_block(blocks.get(_layer_number(rule["name"])), rule)
    return model


def _layer_number(name: str) -> int:
    """Return the first number in a module's name."""
    return next(int(part) for part in name.split(".") if part.isdigit())


def smooth_block(block: Any, rule: dict[str, Any]) -> None:
    """Make a block of experts choose by the rule."""
    children = sorted(block.children()) if block else []
    if children != ["gate", "switch_mlp"]:
        raise ValueError(
            f"mlx-lm cannot run this smoothed model: the block of {rule['name']!r} is made of "
            f"{', '.join(children) or 'nothing'}, where a gate and switch_mlp alone are known"
        )

    base: Any = type(block)

    class SmoothedBlock(base):
        """The block with smoothed routing."""

        def __call__(self, x: Any) -> Any:
            tokens = x.reshape(-1, x.shape[-1])
            weights, ids = smooth_choice(rule, self.gate(tokens))
            outputs = self.switch_mlp(tokens, ids) * weights[..., None]
            return outputs.sum(axis=-2).astype(x.dtype).reshape(x.shape)

    block.__class__ = SmoothedBlock


def smooth_choice(rule: dict[str, Any], logits: Any) -> tuple[Any, Any]:
    """Return combine weights and experts (T, K) of tokens with logits (T, E)."""
    logits = logits.astype(mx.float32)
    scores = selection_scores(rule, logits)
    share = ramp_shares(rule, scores) if rule["gate"] == "ramp" else projected_shares(rule, scores)
    experts = logits.shape[-1]
    slots = experts if experts <= FEW_EXPERTS else min(experts, rule["k"] + EXTRA_SLOTS)
    slots = max(slots, rule["k_max"]) if rule["gate"] == "ramp" else slots
    ids = mx.argsort(-mx.where(share > 0, scores, -math.inf), axis=-1)[:, :slots]
    return combine_weights(rule, logits, ids, mx.take_along_axis(share, ids, axis=-1)), ids


def selection_scores(rule: dict[str, Any], logits: Any) -> Any:
    """Return the selection scores (T, E)."""
    if rule["ranked"] == "softmax":
        return mx.softmax(logits, axis=-1, precise=True)
    if rule["ranked"] == "sigmoid":
        return mx.sigmoid(logits)
    if rule["combine"] != "softmax":
        return logits
    floor = logits.max(axis=-1, keepdims=True) + math.log(SMALLEST * logits.shape[-1])
    return mx.maximum(logits, floor)


def projected_shares(rule: dict[str, Any], scores: Any) -> Any:
    """Return the projection (T, E) of c/ε onto shares between 0 and 1 that sum to k."""
    k, experts = rule["k"], scores.shape[-1]
    threshold = mx.sort(scores, axis=-1)[:, experts - k : experts - k + 1]
    y = mx.clip((scores - threshold) / rule["epsilon"], -1, 1)
    knees = mx.concatenate([mx.clip(y, -1, 0), mx.clip(y - 1, -1, 0)], axis=-1)
    order = mx.argsort(-knees, axis=-1)
    values = mx.take_along_axis(knees, order, axis=-1)
    slope = mx.cumsum(mx.where(order < experts, 1.0, -1.0), axis=-1)
    start = mx.clip(y, 0, 1).sum(axis=-1, keepdims=True)
    rise = mx.cumsum(slope[:, :-1] * (values[:, :-1] - values[:, 1:]), axis=-1)
    height = start + mx.concatenate([mx.zeros_like(start), rise], axis=-1)
    index = mx.maximum((height <= k).sum(axis=-1, keepdims=True) - 1, 0)
    steep = mx.maximum(mx.take_along_axis(slope, index, axis=-1), 1)
    missing = (k - mx.take_along_axis(height, index, axis=-1)) / steep
    level = mx.clip(mx.take_along_axis(values, index, axis=-1) - missing, -1, 0)
    share = mx.clip(y - level, 0, 1)
    inside = ((share > 0) & (share < 1)).sum(axis=-1, keepdims=True)
    excess = (share.sum(axis=-1, keepdims=True) - k) / mx.maximum(inside, 1) * (inside > 0)
    return mx.clip(y - level - excess, 0, 1)


def ramp_shares(rule: dict[str, Any], scores: Any) -> Any:
    """Return the ramp shares (T, E) of the first k_max ranks; 0 for others."""
    k, k_max, experts = rule["k"], rule["k_max"], scores.shape[-1]
    order = mx.argsort(-scores, axis=-1)
    values = mx.take_along_axis(scores, order, axis=-1)
    threshold, rank = values[:, k - 1 : k], mx.arange(experts)
    width = mx.full(threshold.shape, rule["epsilon"])
    if k_max < experts:
        width = mx.minimum(threshold - values[:, k_max : k_max + 1], rule["epsilon"])
    crowded = width <= 0
    u = 1 + (values - threshold) / mx.where(crowded, 1, width)
    share = mx.where(crowded, (rank < k).astype(mx.float32), smoothstep(u, rule["a"], rule["b"]))
    share = share * (rank < k_max)
    return mx.take_along_axis(share, mx.argsort(order, axis=-1), axis=-1)


def smoothstep(u: Any, a: float, b: float) -> Any:
    """Return s(u) = u^a / (u^a + (1-u)^b), 0 below 0 and 1 above 1."""
    inside = (u > 0) & (u < 1)
    x = mx.where(inside, u, 0.5)
    rise = x**a
    return mx.where(inside, rise / (rise + (1 - x) ** b), mx.clip(u, 0, 1))


def combine_weights(rule: dict[str, Any], logits: Any, ids: Any, share: Any) -> Any:
    """Return the weights of the experts `ids` by the router's own rule, times their shares."""
    chosen = mx.take_along_axis(logits, ids, axis=-1)
    if rule["combine"] == "sigmoid":
        weights = mx.sigmoid(chosen) * share
        if rule["renormalise"]:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + rule["sum_offset"])
        return weights
    if rule["renormalise"]:
        used = mx.where(share == 0, -math.inf, chosen)
        weights = mx.softmax(used, axis=-1, precise=True) * share
        return weights / weights.sum(axis=-1, keepdims=True)
    peak = logits.max(axis=-1, keepdims=True)
    total = mx.exp(logits - peak).sum(axis=-1, keepdims=True)
    return mx.exp(chosen - peak) / total * share
