"""The routes of a trace as dense arrays: documents side by side, layers at their places.

A program that keeps an array for *all* layers of a model writes a dense layer as zeros (vLLM,
SGLang, verl) or as -1 (NeMo-RL). The place of a layer is the number in its name; names without one
number each keep their order and leave no layer between them.
"""

import re
from collections.abc import Sequence

import numpy as np

from tieline.core.errors import TraceError, require
from tieline.trace.record import MOST_LAYERS, RoutingTrace

MOST_IDS = 1 << 32
"""Largest number of ids of a padded batch."""


def layer_numbers(trace: RoutingTrace, layers: int | None = None) -> list[int]:
    """Return the place of each layer among all layers of the model.

    Args:
        trace: the trace.
        layers: number of layers of the model; checked if given.
    """
    digits = [re.findall(r"(?:^|\.)(\d{1,4})(?=\.|$)", layer.name) for layer in trace.layers]
    single = [int(matches[0]) for matches in digits if len(matches) == 1]
    numbers = list(range(len(digits)))
    if len(single) == len(digits) and single == sorted(set(single)):
        numbers = single
    most = MOST_LAYERS if layers is None else layers
    require(
        numbers[-1] < most,
        f"layer {trace.layers[-1].name!r} has no place among {most} layers",
        TraceError,
    )
    return numbers


def stacked(trace: RoutingTrace, numbers: Sequence[int], count: int, fill: int) -> np.ndarray:
    """Return the chosen experts (tokens, count, k), `fill` in the layers that are not routed."""
    sizes = {layer.facts.k for layer in trace.layers}
    require(
        len(sizes) == 1, f"layers choose {sorted(sizes)} experts: an array has one k", TraceError
    )
    k = sizes.pop()
    largest = max(layer.facts.n_experts for layer in trace.layers)
    array = np.full((trace.n_tokens, count, k), fill, _integers(largest, fill))
    for number, layer in zip(numbers, trace.layers, strict=True):
        array[:, number] = layer.experts[:, :k].numpy()
    return array


def _integers(experts: int, fill: int) -> type:
    """The smallest type of ids that vLLM would use, or one with a sign."""
    if fill < 0:
        return np.int16 if experts <= 1 << 15 else np.int32
    return np.uint8 if experts <= 1 << 8 else np.uint16


def document_rows(trace: RoutingTrace) -> list[np.ndarray]:
    """Return the rows of each document, in order of position."""
    documents, positions = trace.documents.numpy(), trace.positions.numpy()
    order = np.lexsort((positions, documents))
    cuts = np.flatnonzero(np.diff(documents[order])) + 1
    per_document = np.split(order, cuts)
    for rows in per_document:
        twice = np.diff(positions[rows]) == 0
        require(
            not bool(twice.any()) and int(positions[rows[0]]) >= 0,
            f"document {int(documents[rows[0]])} has a position twice, or a negative one",
            TraceError,
        )
    return per_document


def padded(trace: RoutingTrace, fill: int = 0, layers: int | None = None) -> dict[str, np.ndarray]:
    """Return `routed_experts` (sequences, length, layers, k), `attention_mask` and `input_ids`.

    A document is a sequence, padded on the right. Positions without a record hold `fill` and are
    shown by the mask if a later position has one.

    Args:
        trace: the trace.
        fill: what stands for nothing: 0 in verl, -1 in NeMo-RL.
        layers: number of layers of the model; by default up to the last routed one.
    """
    numbers = layer_numbers(trace, layers)
    ids = stacked(trace, numbers, layers or numbers[-1] + 1, fill)
    documents, positions = document_rows(trace), trace.positions.numpy()
    length = max(int(positions[document[-1]]) + 1 for document in documents)
    size = len(documents) * length * ids[0].size
    require(size <= MOST_IDS, f"a padded batch of {size} ids is too large", TraceError)
    has_tokens = bool((trace.tokens >= 0).all())
    batch = np.full((len(documents), length, *ids.shape[1:]), fill, ids.dtype)
    mask, tokens = np.zeros(batch.shape[:2], np.int64), np.zeros(batch.shape[:2], np.int64)
    for row, document in enumerate(documents):
        where = positions[document]
        require(
            fill < 0 or ids.shape[2] > 1 or len(where) == int(where[-1]) + 1,
            f"document {row} has positions without a record, which zeros cannot say with k = 1: "
            "use the form nemo",
            TraceError,
        )
        batch[row, where] = ids[document]
        mask[row, : where[-1] + 1] = 1
        tokens[row, where] = trace.tokens.numpy()[document]
    arrays = {"routed_experts": batch, "attention_mask": mask}
    return arrays | ({"input_ids": tokens} if has_tokens else {})
