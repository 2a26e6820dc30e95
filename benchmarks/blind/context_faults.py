"""Faults of inputs, positions, masks and caches."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.blind import feeds, parts
from benchmarks.blind.attention import Attention, Edit, edited_attention
from benchmarks.blind.changes import Case, Change
from benchmarks.blind.texts import commonest

LATENT = frozenset({"latent"})


@torch.no_grad()
def corrupt_commonest(case: Case) -> None:
    """The embedding row of the commonest token is that of another one."""
    table, token = parts.embedding(case.model).weight, commonest(case.documents)
    table[token] = table[(token + 1 + case.draw(len(table) - 1)) % len(table)].clone()


@torch.no_grad()
def empty_rare_rows(case: Case) -> None:
    """The embedding rows of tokens that occur at most three times are zero."""
    table = parts.embedding(case.model).weight
    counts = torch.bincount(case.documents.flatten(), minlength=len(table))
    table[(counts > 0) & (counts <= 3)] = 0.0


@contextmanager
def edited_embeddings(case: Case, edit: Any) -> Iterator[None]:
    """Run with other embeddings of the input ids: `edit` takes ids and embeddings."""
    handle = parts.embedding(case.model).register_forward_hook(
        lambda _, arguments, output: edit(arguments[0], output)
    )
    try:
        yield
    finally:
        handle.remove()


def wrong_last(case: Case) -> Any:
    """The last position of every document gets the embedding of the position before."""

    def edit(_: Tensor, states: Tensor) -> Tensor:
        return torch.cat([states[:, :-1], states[:, -2:-1]], dim=1)

    return edited_embeddings(case, edit)


def wrong_tokens(case: Case) -> Any:
    """One token in 64 is read as another, as by a tokenizer of another version."""
    table = parts.embedding(case.model).weight
    period, start = 64, case.draw(32)

    def edit(ids: Tensor, states: Tensor) -> Tensor:
        hit = torch.arange(ids.shape[1]) % period == start
        others = table[(ids + 7) % len(table)].to(states.dtype)
        return torch.where(hit[None, :, None], others, states)

    return edited_embeddings(case, edit)


@torch.no_grad()
def change_frequencies(case: Case, edit: Any) -> None:
    """Change the rotary frequencies of a model."""
    modules = [m for m in case.model.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)]
    assert modules, "no rotary frequencies"
    for module in modules:
        module.inv_freq.copy_(edit(module.inv_freq))


def larger_base(frequencies: Tensor) -> Tensor:
    """Frequencies of base 11,000 where they had 10,000."""
    return frequencies**1.01035


def short_frequencies(frequencies: Tensor) -> Tensor:
    """Frequencies cast to bfloat16 with the model."""
    return frequencies.bfloat16().float()


@torch.no_grad()
def interleave_rotary(case: Case) -> None:
    """Queries and keys of one layer in the other order of rotary pairs."""
    attention = case.inner(parts.attentions(case.model))
    width = int(getattr(attention, "head_dim"))  # noqa: B009 - a field of every family
    order = torch.arange(width).unflatten(0, (2, -1)).T.flatten()
    for name in ("q_proj", "k_proj"):
        weight = attention.get_submodule(name).get_parameter("weight")
        weight.copy_(weight.unflatten(0, (-1, width))[:, order].flatten(0, 1))


@torch.no_grad()
def lose_head(case: Case) -> None:
    """One head of one layer adds nothing."""
    weight = (
        case.inner(parts.attentions(case.model)).get_submodule("o_proj").get_parameter("weight")
    )
    width = weight.shape[1] // case.model.config.num_attention_heads
    weight[:, :width] = 0.0


def attention_fault(case: Case, edit: Edit) -> Any:
    """Run with edited attention."""
    return edited_attention(case.model, edit)


def stale_entries(call: Attention) -> Attention:
    """One cache entry in 32 is that of the row before, which had its place earlier."""
    stale = torch.arange(call.key.shape[2]) % 32 == 17
    pick = stale[None, None, :, None]
    key = torch.where(pick, call.key.roll(1, 0), call.key)
    return replace(call, key=key, value=torch.where(pick, call.value.roll(1, 0), call.value))


def hide(call: Attention, hidden: Tensor) -> Attention:
    """Hide positions (length, total), never a token from itself."""
    hidden = hidden & ~torch.eye(*hidden.shape, dtype=torch.bool)
    return replace(call, mask=call.mask.masked_fill(hidden, call.hidden))


def _grid(call: Attention) -> tuple[Tensor, Tensor]:
    return torch.arange(call.query.shape[2])[:, None], torch.arange(call.key.shape[2])[None]


def short_window(call: Attention) -> Attention:
    """No token sees further back than 32 positions."""
    query, key = _grid(call)
    return hide(call, query - key >= 32)


def without_first(call: Attention) -> Attention:
    """No token sees the first position."""
    query, key = _grid(call)
    return hide(call, (key == 0) & (query > 0))


def lost_entries(call: Attention) -> Attention:
    """Entries 20 and 60 of the cache are lost for tokens after them."""
    query, key = _grid(call)
    return hide(call, ((key == 20) | (key == 60)) & (query > key))


def one_ahead(call: Attention) -> Attention:
    """Every token sees the one after it."""
    query, key = _grid(call)
    return replace(call, mask=call.mask.masked_fill(key == query + 1, 0.0))


def other_groups(call: Attention) -> Attention:
    """Query heads use the keys and values of the next group."""
    return replace(call, key=call.key.roll(1, 1), value=call.value.roll(1, 1))


def sharper(call: Attention) -> Attention:
    """Scores are 1.15 times as large."""
    return replace(call, scaling=1.15 * call.scaling)


def clipped_cache(call: Attention) -> Attention:
    """Keys and values saturate at 1.5 times their size."""
    return replace(call, key=_clipped(call.key), value=_clipped(call.value))


def _clipped(values: Tensor) -> Tensor:
    limit = 1.5 * float(values.float().square().mean().sqrt())
    return values.clamp(-limit, limit)


def shared_prefix(call: Attention) -> Attention:
    """One row of a batch takes the first 24 cache entries of another."""
    if len(call.key) < 3:
        return call
    key, value = call.key.clone(), call.value.clone()
    key[2, :, :24], value[2, :, :24] = call.key[0, :, :24], call.value[0, :, :24]
    return replace(call, key=key, value=value)


@torch.no_grad()
def drop_sinks(case: Case) -> None:
    """Attention sinks are missing."""
    for attention in parts.attentions(case.model):
        attention.get_parameter("sinks").fill_(-1e4)


def _attention(name: str, edit: Edit, *hints: str) -> Change:
    return Change(name, context=partial(attention_fault, edit=edit), hints=hints)


CONTEXT_FAULTS: tuple[Change, ...] = (
    Change(
        "embedding of the commonest token",
        weights=corrupt_commonest,
        hints=("token", "embedding", "common"),
    ),
    Change("embeddings of rare tokens", weights=empty_rare_rows, hints=("token", "embed", "rare")),
    Change("last position wrong", context=wrong_last, hints=("last", "position")),
    Change("tokens misread", context=wrong_tokens, hints=("token", "position", "embed")),
    Change(
        "rope base",
        weights=partial(change_frequencies, edit=larger_base),
        hints=("position", "rotary"),
    ),
    Change(
        "rotary table in bf16",
        weights=partial(change_frequencies, edit=short_frequencies),
        hints=("position", "rotary"),
    ),
    Change(
        "rotary pairs interleaved",
        weights=interleave_rotary,
        lacks=LATENT,
        hints=("layer", "position", "rotary"),
    ),
    Change("head lost", weights=lose_head, hints=("layer", "position")),
    Change(
        "packed documents leak", feed=feeds.packing_leaks, hints=("document", "position", "batch")
    ),
    Change(
        "padding leaks", feed=feeds.padding_leaks, hints=("document", "position", "first", "batch")
    ),
    Change("positions jump", feed=feeds.decoding_ahead, hints=("position", "decode", "rotary")),
    Change("sinks dropped", weights=drop_sinks, needs=frozenset({"sinks"}), hints=("position",)),
    _attention("stale cache entries", stale_entries, "position", "document", "batch"),
    _attention("sliding window", short_window, "position"),
    _attention("first position hidden", without_first, "position", "first"),
    _attention("cache entries lost", lost_entries, "position"),
    _attention("mask off by one", one_ahead, "position"),
    _attention("key heads exchanged", other_groups, "position"),
    _attention("attention scale", sharper, "position"),
    _attention("cache clipped", clipped_cache, "position"),
    _attention("prefix of another document", shared_prefix, "document", "batch", "position"),
)
"""Faults of inputs, positions, masks and caches."""
