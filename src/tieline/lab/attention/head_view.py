"""The attention heads of a model as mixtures of experts, the keys of a query (paper 4).

    p_j = softmax_j(s q·k_j)                     weights of a query's N keys
    effective     exp(−Σ p_j log p_j)            keys that carry the mass
    for90         keys that hold 90 % of it
    top           largest weight
    gap           s_[1] − s_[2]: distance of the two best keys from a tie, in units of scores
    mass          Σ_j σ(s_j − log N)             what sigmoid weights would sum to
    change        ‖o_σ − o‖ / ‖o‖                how far sigmoid would move the head's output

Queries are a sample, evenly spaced over each sequence from the `FIRST_QUERY`-th on. The change of
the loss is that of the whole model with sigmoid attention in every layer and unchanged weights.

`observing_attention` passes the queries, keys and values of every attention layer to a callback
while the model computes by SDPA. Models whose attention is more than a softmax of the scores
(sinks, capped scores, biases of positions), or that take no attention functions, are refused.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.predictions import next_token_losses
from tieline.core.records import Result
from tieline.core.setting_fields import takes_settings
from tieline.core.statistics import Estimate, SequenceSums
from tieline.lab.attention.model_attention import (
    NOT_HONOURED,
    SIGMOID,
    set_attention_function,
)
from tieline.lab.command_settings import AttentionSettings, TextOptions
from tieline.models.demo import DEMO
from tieline.models.model import Model, ModelSource
from tieline.run.corpus import default_sequence_length, stacked_batches, text_and_origin, tokenise
from tieline.run.forward import forward, only_running

Progress = Callable[[str, int, int], None]

FIRST_QUERY = 8
"""Position of the first sampled query; earlier ones see too few keys."""

QUERIES_PER_SEQUENCE = 32
"""Number of queries sampled from a sequence."""

NEAR_GAP = 0.1
"""Gap of two scores below which the two best keys nearly tie: their weights differ by 10 %."""

MASS_SHARE = 0.9

OBSERVED_ATTENTION = "tieline_watched"
"""Name of the observed attention function in transformers."""

CALLBACK_ATTRIBUTE = "tieline_attention_sink"
"""Attribute of an attention module that holds its callback."""


class AttentionCall(NamedTuple):
    """Arguments of one call of an attention layer."""

    query: Tensor  # (B, H, N, d)
    key: Tensor  # (B, H / g, M, d)
    value: Tensor  # (B, H / g, M, d_v)
    visible: Tensor  # which keys each query sees, (B or 1, 1 or H, N, M)
    scale: float  # factor of the scores


AttentionCallback = Callable[[str, AttentionCall], None]


def _observed_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Pass the call to the module's callback, then compute it by SDPA."""
    for name, reason in NOT_HONOURED.items():
        if options.get(name) is not None:
            raise UnsupportedModelError(f"attention with {name!r} is not looked at: {reason}")
    callback = module.__dict__.get(CALLBACK_ATTRIBUTE)
    if callback is not None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        visible = attention_mask
        if visible is None:  # the keys up to the query
            visible = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril()
        elif visible.dtype != torch.bool:
            visible = visible == 0
        callback(AttentionCall(query, key, value, visible, scale))
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **options
    )


@contextmanager
def observing_attention(model: nn.Module, callback: AttentionCallback) -> Iterator[list[str]]:
    """Call `callback` with the name and the arguments of every attention layer that runs.

    The callback is called before the attention is computed and must not change anything.
    """
    before = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    layers = {n: m for n, m in model.named_modules() if n.endswith(("self_attn", "attention"))}
    set_attention_function(model, OBSERVED_ATTENTION)
    for name, module in layers.items():
        module.__dict__[CALLBACK_ATTRIBUTE] = partial(callback, name)
    try:
        yield list(layers)
    finally:
        for module in layers.values():
            del module.__dict__[CALLBACK_ATTRIBUTE]
        set_attention_function(model, before)


AttentionInterface.register(OBSERVED_ATTENTION, _observed_forward)
AttentionMaskInterface.register(OBSERVED_ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class HeadView:
    """Statistics of one head, as means over the sampled queries.

    Attributes:
        layer: name of the attention layer.
        head: its number.
        queries: number of sampled queries.
        seen: keys that a query sees.
        effective: keys that carry the mass, the exponential of the entropy.
        for90: keys that hold 90 % of the mass.
        top: largest weight.
        gap: median distance of the two best scores.
        near: share of queries with a gap below 0.1.
        mass: sum of the weights that sigmoid attention would give.
        change: distance of sigmoid's output from the head's own, relative.
    """

    layer: str
    head: int
    queries: int
    seen: float
    effective: float
    for90: float
    top: float
    gap: float
    near: float
    mass: float
    change: float


@dataclass(frozen=True, repr=False)
class AttentionView(Result):
    """The heads of a model as mixtures of experts.

    Attributes:
        model: name of the model.
        heads: one record per head.
        loss: mean loss, nats per token.
        sigmoid_change: change of the loss with sigmoid attention and unchanged weights.
        tokens: number of tokens that were run.
        sequences: number of sequences, the clusters of the standard errors.
        provenance: text and batch size.
    """

    format: ClassVar[str] = "tieline-attention"

    model: str
    heads: tuple[HeadView, ...]
    loss: Estimate
    sigmoid_change: Estimate
    tokens: int
    sequences: int
    provenance: dict[str, object]

    @property
    def metrics(self) -> dict[str, float]:
        """Means over heads by name, "loss" and "sigmoid_loss_change"."""
        names = ("seen", "effective", "for90", "top", "gap", "near", "mass", "change")
        count = max(1, len(self.heads))
        means = {n: sum(getattr(head, n) for head in self.heads) / count for n in names}
        losses = {"loss": self.loss.value, "sigmoid_loss_change": self.sigmoid_change.value}
        return means | {name: value for name, value in losses.items() if value is not None}


@takes_settings(AttentionSettings)
def attention_view(
    source: ModelSource = DEMO,
    *,
    settings: AttentionSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[TextOptions],
) -> AttentionView:
    """Measure a model's heads as mixtures of experts, and the effect of sigmoid attention.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself. A named model is loaded in float32.
        progress: called with stage, done and total while the work goes on.
    """
    settings = AttentionSettings.of(settings, options)
    content, origin = text_and_origin(settings.text)
    names, batch_size = ("device", "revision", "trust_remote_code"), settings.batch_size
    loading = {name: getattr(settings, name) for name in names}
    loaded = Model.open(source, "attention takes", dtype="fp32", **loading)
    model = loaded.module
    sequences = tokenise(
        loaded.tokenizer, content, settings.tokens, default_sequence_length(model)
    ).sequences
    id_batches = list(
        stacked_batches([row for row in sequences if len(row) > FIRST_QUERY + 1], batch_size)
    )
    require(
        bool(id_batches),
        f"the text is too short: a sequence needs more than {FIRST_QUERY + 1} tokens",
    )
    rows: dict[str, list[Tensor]] = defaultdict(list)

    def callback(name: str, call: AttentionCall) -> None:
        rows[name].append(head_rows(call).cpu())

    loss, change = _loss_and_change(model, id_batches, callback, progress)
    return AttentionView(
        model=loaded.name or type(model).__name__,
        heads=tuple(view for name, calls in rows.items() for view in _head_views(name, calls)),
        loss=loss,
        sigmoid_change=change,
        tokens=sum(ids.numel() for ids in id_batches),
        sequences=sum(len(ids) for ids in id_batches),
        provenance={"text": origin, "batch_size": batch_size},
    )


def _loss_and_change(
    model: nn.Module,
    id_batches: list[Tensor],
    callback: Callable[[str, AttentionCall], None],
    progress: Progress | None,
) -> tuple[Estimate, Estimate]:
    """Mean loss of the model, and its change by sigmoid attention."""
    loss, change = SequenceSums(), SequenceSums()
    before = getattr(getattr(model, "config", None), "_attn_implementation", "sdpa")
    settable = hasattr(model, "set_attn_implementation")
    require(settable, f"{type(model).__name__} takes no attention function", UnsupportedModelError)
    require(before != SIGMOID, "the model has sigmoid attention already: nothing to compare with")
    with only_running(model):
        for number, ids in enumerate(id_batches):
            with observing_attention(model, callback):
                softmax_loss = next_token_losses(forward(model, ids).logits, ids)
            set_attention_function(model, SIGMOID)
            try:
                new = next_token_losses(forward(model, ids).logits, ids)
            finally:
                set_attention_function(model, before)
            loss.add(softmax_loss)
            change.add(new - softmax_loss)
            if progress is not None:
                progress("attention", number + 1, len(id_batches))
    return loss.mean(), change.mean()


@torch.no_grad()
def head_rows(call: AttentionCall) -> Float[Tensor, "heads queries 8"]:
    """Statistics of each sampled query of each head, in float64.

    In order: keys seen, effective keys, keys for 90 % of the mass, largest weight, gap of the two
    best scores, whether it is below `NEAR_GAP`, mass of sigmoid weights, change of the output.
    """
    length, groups = call.query.shape[2], call.query.shape[1] // call.key.shape[1]
    count = min(QUERIES_PER_SEQUENCE, length - FIRST_QUERY)
    positions = torch.linspace(FIRST_QUERY, length - 1, count).long()
    query = call.query[:, :, positions].double()
    keys, values = (x.repeat_interleave(groups, dim=1).double() for x in (call.key, call.value))
    visible = call.visible[:, :, positions].expand(*query.shape[:3], -1)
    scores = (query @ keys.mT * call.scale).masked_fill(~visible, -torch.inf)
    weights, number = scores.softmax(dim=-1), visible.sum(dim=-1).double()
    ordered, best = weights.sort(dim=-1, descending=True).values, scores.topk(2).values
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(dim=-1)
    held = (ordered.cumsum(dim=-1) < MASS_SHARE).sum(dim=-1) + 1.0
    gap = best[..., 0] - best[..., 1]
    sigmoid = (scores - number.log().unsqueeze(-1)).sigmoid()
    softmax_output, other = weights @ values, sigmoid @ values
    moved = (other - softmax_output).norm(dim=-1) / softmax_output.norm(dim=-1).clamp(min=1e-30)
    near = (gap < NEAR_GAP).double()
    columns = (number, entropy.exp(), held, ordered[..., 0], gap, near, sigmoid.sum(-1), moved)
    return torch.stack(columns, dim=-1).transpose(0, 1).flatten(1, 2)


def _head_views(name: str, calls: list[Tensor]) -> list[HeadView]:
    """Average over the queries of each head; the gap is a median."""
    views = []
    for head, rows in enumerate(torch.cat(calls, dim=1)):
        usable = rows[rows[:, 0] >= 2]
        means = dict(zip(_COLUMNS, usable.mean(dim=0).tolist(), strict=True))
        means["gap"] = usable[:, _COLUMNS.index("gap")].median().item()
        views.append(HeadView(name, head, len(usable), **means))
    return views


_COLUMNS = [f.name for f in fields(HeadView)][3:]
