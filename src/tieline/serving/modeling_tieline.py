"""A Mixture-of-Experts model whose choice of experts is continuous at ties; runs without Tieline.

    AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

This file is part of the model's folder. It loads the model of transformers that `config.json`
describes and lets each router share the k places of a token among nearly tied experts. The rules
are in `config.json`, under "tieline": for each router its number of experts k, the width ε of the
band and how its family scores and weights. With selection scores c, the shares are

    projected    r = clip(c/ε - τ, 0, 1) with Σ r = k
    ramp         s(u) = u^a / (u^a + (1-u)^b),  u = 1 + (c - c_[k])/ε

and the weight of an expert is its weight by the router's own rule times its share. Far from a tie
nothing changes. The documentation of Tieline describes how a model is smoothed, and the costs.
"""

import inspect
import math
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

try:
    import transformers
    from transformers import PretrainedConfig, PreTrainedModel
except ImportError:  # the arithmetic below needs torch alone
    transformers: Any = None  # type: ignore[no-redef]
    PretrainedConfig = PreTrainedModel = object  # type: ignore[assignment,misc]

VARIANT = "tieline"
"""Variant in the names of the weight files."""

MARKER = "tieline_marker"
"""Name of a tensor that marks saved weights as those of a smoothed model."""

CHANGED = (
    "{kind} changed by Tieline ({changes}): it does not run as saved without it; load it with "
    "tieline.models.load_pretrained"
)
"""`model_type` of models with other changes, so that no other program loads them by accident."""

SKIPPING = ("grouped_mm", "batched_mm")
"""Implementations of experts that skip slots with an index beyond the last expert."""

FLAG = "_is_expert_parallel"
"""Attribute of transformers' experts that enables this."""


def selection_scores(rule: dict[str, Any], logits: Tensor, bias: Tensor | None) -> Tensor:
    """Return the selection scores (T, E), in float32 or the logits' own type."""
    if not rule["own_dtype"] and logits.dtype.itemsize < 4:
        logits = logits.float()
    if rule["ranked"] == "softmax":
        scores = logits.softmax(dim=-1)
    elif rule["ranked"] == "sigmoid":
        scores = logits.sigmoid()
    else:
        scores = without_underflow(logits) if rule["combine"] == "softmax" else logits
    return scores if bias is None else scores + bias


def without_underflow(logits: Tensor) -> Tensor:
    """Return logits; those whose softmax underflows in float32 are raised to a common floor."""
    least = math.log(torch.finfo(torch.float32).tiny * logits.shape[-1])
    floor = logits.amax(dim=-1, keepdim=True) + least
    return torch.where(logits.isfinite() & floor.isfinite(), logits.maximum(floor), logits)


def shared_experts(
    rule: dict[str, Any], scores: Tensor, slots: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return shares (T, K) and experts (T, K) by descending score; unused slots have share 0.

    K is `slots`, or by default the largest number of experts that a token uses.
    """
    scores = (scores.float() if scores.dtype.itemsize < 4 else scores).detach()
    if rule["gate"] == "ramp":
        share, ids = _ramp_columns(rule, scores)
        missing = max(0, (slots or 0) - rule["k_max"])
        return nn.functional.pad(share, (0, missing)), torch.cat(
            (ids, ids[:, :1].expand(-1, missing)), dim=1
        )
    k, width = rule["k"], torch.as_tensor(rule["epsilon"], dtype=scores.dtype, device=scores.device)
    caps = None
    if rule["groups"] and rule["groups"][1] < rule["groups"][0]:
        shares = _projected_shares(
            _saved_group_scores(rule, scores), rule["groups"][1], width, None
        )
        caps = shares.repeat_interleave(scores.shape[-1] // rule["groups"][0], dim=-1)
    share = _projected_shares(scores, k, width, caps)
    used = share != 0  # NaN counts as used, so that it is passed on
    if slots is None:
        slots = int(used.sum(dim=-1).max()) if len(share) else k
    ids = _ranked_scores(scores.masked_fill(~used, -torch.inf))[1][:, :slots]
    return share.gather(-1, ids), ids


def _ranked_scores(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores in descending order and their experts; the lower index first if equal."""
    ranked = scores.sort(dim=-1, descending=True, stable=True)
    return ranked.values, ranked.indices


def _saved_group_scores(rule: dict[str, Any], scores: Tensor) -> Tensor:
    """Return the score of each group: its largest score, or the sum of its two largest."""
    n_groups, _, scoring = rule["groups"]
    groups = scores.unflatten(-1, (n_groups, -1))
    return groups.amax(dim=-1) if scoring == "max" else groups.topk(2, dim=-1).values.sum(dim=-1)


def _projected_shares(scores: Tensor, k: int, epsilon: Tensor, caps: Tensor | None) -> Tensor:
    """Return the projection of c/ε onto shares between 0 and their caps that sum to k."""
    ranked = scores if caps is None else scores.masked_fill(caps == 0, -torch.inf)
    top = ranked.topk(k + 1, dim=-1, sorted=True).values
    settled = top[..., k - 1 : k] - top[..., k:] >= epsilon
    if caps is not None:
        settled = settled & ((caps == 0) | (caps == 1)).all(dim=-1, keepdim=True)
    share = (ranked < top[..., k - 1 : k]).logical_not().to(scores)
    if scores.device.type != "cpu" or torch.compiler.is_compiling():
        return torch.where(
            settled, share, _shares_near_ties(scores, epsilon, caps, k, scores.shape[-1])
        )
    rows = settled.logical_not().squeeze(-1)
    if bool(rows.any()):
        some = None if caps is None else caps[rows]
        share[rows] = _shares_near_ties(scores[rows], epsilon, some, k, None)
    return share


def _shares_near_ties(
    scores: Tensor, epsilon: Tensor, caps: Tensor | None, k: int, knees: int | None
) -> Tensor:
    """Return clip(c/ε - τ, 0, cap) of tokens near a tie."""
    y = ((scores - _pivot_score(scores, caps, k)) / epsilon).clamp(-1, 1)
    if caps is not None:
        return torch.minimum((y - _share_level(y, caps, k)).clamp(min=0), caps)
    if knees is None:
        knees = max(k, int((y > -1).sum(dim=-1).max()))
    few = y.topk(knees, dim=-1, sorted=True).values if knees < y.shape[-1] else y
    level = _share_level(few, torch.ones_like(few), k)
    return torch.minimum((y - level).clamp(min=0), torch.ones_like(y))


def _pivot_score(scores: Tensor, caps: Tensor | None, k: int) -> Tensor:
    """Return the score at which the caps, summed from the largest score down, reach k."""
    if caps is None:
        return scores.topk(k, dim=-1, sorted=True).values[..., -1:]
    values, order = _ranked_scores(scores)
    filled = caps.gather(-1, order).cumsum(dim=-1)
    index = (filled < k).sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    return values.gather(-1, index)


def _share_level(y: Tensor, caps: Tensor, k: int) -> Tensor:
    """Return the τ in [-1, 0] with Σ clip(y - τ, 0, cap) = k."""
    knees = torch.cat((y.clamp(-1, 0), (y - caps).clamp(-1, 0)), dim=-1)
    values, order = _ranked_scores(knees)
    slope = torch.where(order < y.shape[-1], 1, -1).cumsum(dim=-1).to(y)
    start = torch.minimum(y.clamp(min=0), caps).sum(dim=-1, keepdim=True)
    rise = (slope[..., :-1] * -values.diff(dim=-1)).cumsum(dim=-1)
    height = start + torch.cat((torch.zeros_like(start), rise), dim=-1)
    index = ((height <= k).sum(dim=-1, keepdim=True) - 1).clamp(min=0)
    missing = (k - height.gather(-1, index)) / slope.gather(-1, index).clamp(min=1)
    level = (values.gather(-1, index) - missing).clamp(-1, 0)
    share = torch.minimum((y - level).clamp(min=0), caps)
    inside = ((share > 0) & (share < caps)).sum(dim=-1, keepdim=True)
    return level + (share.sum(dim=-1, keepdim=True) - k) / inside.clamp(min=1) * (inside > 0)


def _smoothstep(u: Tensor, a: float, b: float) -> Tensor:
    """Return s(u) = u^a / (u^a + (1-u)^b), 0 below 0 and 1 above 1."""
    inside = (u > 0) & (u < 1)
    x = torch.where(inside, u, 0.5)
    rise = x**a
    return torch.where(inside, rise / (rise + (1 - x) ** b), u.clamp(0, 1))


def _ramp_columns(rule: dict[str, Any], scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ramp shares of the first k_max ranks, and their experts."""
    k, k_max, epsilon = rule["k"], rule["k_max"], rule["epsilon"]
    a, b, experts = rule["a"], rule["b"], scores.shape[-1]
    if rule["groups"]:
        of_groups = _saved_group_scores(rule, scores)
        below = of_groups - of_groups.topk(rule["groups"][1], dim=-1, sorted=True).values[..., -1:]
        share = _smoothstep(1 + below / epsilon, a, b)
        spread = share.repeat_interleave(experts // rule["groups"][0], dim=-1)
        span = scores.amax(dim=-1, keepdim=True) - scores.amin(dim=-1, keepdim=True)
        scores = scores - (span + epsilon) * (1 - spread)
    values, ids = (ranks[:, : min(k_max + 1, experts)] for ranks in _ranked_scores(scores))
    threshold, first = values[:, k - 1 : k], values[:, :k_max]
    if k_max == experts:
        return _smoothstep(1 + (first - threshold) / epsilon, a, b), ids
    width = (threshold - values[:, k_max:]).clamp(max=epsilon)
    crowded = width <= 0
    share = _smoothstep(1 + (first - threshold) / width.masked_fill(crowded, 1), a, b)
    chosen = (torch.arange(k_max, device=share.device) < k).to(share)
    return torch.where(crowded, chosen, share), ids[:, :k_max]


def combine_weights(rule: dict[str, Any], logits: Tensor, ids: Tensor, share: Tensor) -> Tensor:
    """Return the weights of the experts `ids` by the router's own rule, times their shares."""
    logits = logits.float() if logits.dtype.itemsize < 4 else logits
    share, chosen = share.to(logits), logits.gather(1, ids)
    if rule["combine"] == "sigmoid":
        weights = chosen.sigmoid() * share
        if rule["renormalise"]:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + rule["sum_offset"])
    elif rule["renormalise"]:
        weights = chosen.masked_fill(share == 0, -torch.inf).softmax(dim=-1) * share
        weights = weights / weights.sum(dim=-1, keepdim=True)
    else:
        weights = logits.log_softmax(dim=-1).gather(1, ids).exp() * share
    return weights if rule["scale"] is None else weights * rule["scale"]


def smooth_choice(
    rule: dict[str, Any], logits: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return combine weights, experts and shares (T, K) of tokens with logits (T, E)."""
    share, ids = shared_experts(rule, selection_scores(rule, logits, bias))
    return combine_weights(rule, logits, ids, share), ids, share


class SmoothRouter:
    """Forward hook that replaces weights and ids of a router's output (logits, weights, ids)."""

    def __init__(self, rule: dict[str, Any], experts: nn.Module | None) -> None:
        self.rule, self.config = rule, getattr(experts, "config", None)
        self.flagged = experts is not None and hasattr(experts, FLAG)
        if self.flagged:
            setattr(experts, FLAG, True)

    def __call__(self, router: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Return the output with smoothed weights and experts."""
        logits = output[0].reshape(-1, output[0].shape[-1])
        weights, ids, share = smooth_choice(
            self.rule, logits, self._selection_bias(router, args, kwargs)
        )
        if self._leaves_slots_out():
            ids = ids.masked_fill(share == 0, logits.shape[-1])
        new = [
            value.to(old).view(*old.shape[:-1], value.shape[-1])
            for value, old in ((weights, output[1]), (ids, output[2]))
        ]
        return (output[0], *new, *output[3:])

    def _selection_bias(self, router: nn.Module, args: Any, kwargs: Any) -> Tensor | None:
        """Return the selection bias of this call, or None."""
        bias = None
        if self.rule["bias"]:
            bias = attrgetter(self.rule["bias"])(router)
        if self.rule["bias_argument"]:
            bound = inspect.signature(type(router).forward).bind(router, *args, **kwargs)
            bias = bound.arguments.get(self.rule["bias_argument"])
        return None if bias is None else bias.detach().flatten()

    def _leaves_slots_out(self) -> bool:
        """Return whether the experts currently skip unused slots."""
        if not self.flagged:
            return self.rule["eager_skip"] == "always"
        name = getattr(self.config, "_experts_implementation", None) or "eager"
        return self.rule["eager_skip"] != "never" if name == "eager" else name in SKIPPING


def smooth_model(model: nn.Module, facts: dict[str, Any]) -> nn.Module:
    """Smooth the routers of a model by the rules of its configuration."""
    for rule in facts["rules"]:
        router = model.get_submodule(rule["name"])
        parent = model.get_submodule(rule["name"].rpartition(".")[0])
        experts = getattr(parent, "experts", None)
        handler = SmoothRouter(rule, experts if isinstance(experts, nn.Module) else None)
        router.register_forward_hook(
            lambda module, args, kwargs, output, handler=handler: handler(
                module, args, kwargs, output
            ),
            with_kwargs=True,
        )
    return model


class TielineConfig(PretrainedConfig):  # type: ignore[misc,valid-type]
    """Configuration of a smoothed model: the model's own configuration and the rules."""

    model_type = "tieline"

    def __init__(self, tieline: dict[str, Any] | None = None, **fields: Any) -> None:
        self.tieline = tieline
        super().__init__(**fields)


class TielineForCausalLM(PreTrainedModel):  # type: ignore[misc,valid-type]
    """Loader of a smoothed model: `from_pretrained` returns the model of transformers itself."""

    config_class = TielineConfig

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        """Load the model of the configuration and smooth its routers."""
        config = TielineConfig.from_pretrained(source) if config is None else config
        facts: Any = config.tieline
        if not isinstance(facts, dict) or "rules" not in facts:
            raise ValueError(f"{source}: config.json holds no rules of a smoothed model")
        inner = transformers.CONFIG_MAPPING[facts["config"]["model_type"]].from_dict(
            facts["config"]
        )
        model_class = getattr(transformers, inner.architectures[0])
        options.setdefault("variant", VARIANT)
        loaded = _smoothed_class(model_class).from_pretrained(
            source, *args, config=inner, **options
        )
        smooth_model(loaded[0] if isinstance(loaded, tuple) else loaded, facts)
        return loaded


def _smoothed_class(model_class: Any) -> Any:
    """Return a subclass that ignores the marker tensor when loading and raises when saved."""
    ignored = [*(model_class._keys_to_ignore_on_load_unexpected or []), f"^{MARKER}$"]
    members = {"_keys_to_ignore_on_load_unexpected": ignored, "save_pretrained": _refuse_saving}
    members["__module__"] = model_class.__module__
    return type(model_class.__name__, (model_class,), members)


def _refuse_saving(model: Any, *args: Any, **options: Any) -> Any:
    """Raise, because the saved model would lose its rules."""
    raise ValueError(
        "a smoothed model is saved by Tieline: load it by tieline.models.load_pretrained"
    )
