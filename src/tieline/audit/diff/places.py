"""Which token of B is which token of A, by document and position.

routed_part      a trace without layers and tokens that were not routed (rows of -1)
common_places    places of the tokens that two traces share, B being shifted by some tokens
equal_ids        whether the token ids agree there, as far as they are known
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.trace.lazy import LazyLayers
from tieline.trace.ops import select_layers, select_tokens
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["IdCheck", "Places", "Routed", "common_places", "equal_ids", "routed_part"]


class Routed(NamedTuple):
    """A trace in which every token is routed in every layer, and what was left out for that."""

    trace: RoutingTrace
    tokens: int
    layers: tuple[str, ...]


class Places(NamedTuple):
    """Places in A and in B of the same tokens, in the order of documents and positions."""

    in_a: Int[Tensor, " tokens"]
    in_b: Int[Tensor, " tokens"]


class IdCheck(NamedTuple):
    """Tokens whose ids are known on both sides, and the place of the first that differs."""

    known: int
    different: int
    first: int | None


def routed_part(trace: RoutingTrace, side: str) -> Routed:
    """The trace without dense layers and unrouted tokens, which importers may have left out."""
    told = trace.provenance
    count, names = told.get("tokens_left_out"), told.get("layers_left_out")
    tokens = count if isinstance(count, int) else 0
    layers = tuple(map(str, names)) if isinstance(names, list) else ()
    if isinstance(trace.layers, LazyLayers):  # a file holds no -1: it is refused when it is read
        return Routed(trace, tokens, layers)
    routed = [_routed_rows(layer, side) for layer in trace.layers]
    dense = [place for place, rows in enumerate(routed) if not rows.any()]
    kept = [place for place in range(len(routed)) if place not in dense]
    require(bool(kept), f"{side}: no token was routed in any layer", TraceError)
    everywhere = torch.stack([routed[place] for place in kept]).all(0)
    require(bool(everywhere.any()), f"{side}: no token was routed in all layers", TraceError)
    layers += tuple(trace.layers[place].name for place in dense)
    trace = select_layers(trace, kept) if dense else trace
    missing = int((~everywhere).sum())
    return Routed(select_tokens(trace, everywhere) if missing else trace, tokens + missing, layers)


def _routed_rows(layer: LayerTrace, side: str) -> Tensor:
    """Tokens with experts; a row with some experts and some -1 is refused."""
    nothing = layer.experts[:, : layer.facts.k] == -1
    partly = nothing.any(1) & ~nothing.all(1)
    require(
        not bool(partly.any()),
        f"{side}, layer {layer.name!r}: {int(partly.sum())} tokens have some experts -1 and others "
        f"not, the first at index {int(partly.float().argmax())}",
        TraceError,
    )
    return ~nothing.all(1)


def common_places(a: RoutingTrace, b: RoutingTrace, shift: int) -> Places:
    """Places of the tokens with the same document, whose position in B is `shift` later than in A.

    Refuses a trace that has a (document, position) twice, naming it.
    """
    documents = [trace.documents.long().numpy() for trace in (a, b)]
    positions = [a.positions.long().numpy(), b.positions.long().numpy() - shift]
    codes = np.unique(np.concatenate(documents), return_inverse=True)[1]
    low = min((int(x.min()) for x in positions if len(x)), default=0)
    span = max((int(x.max()) for x in positions if len(x)), default=0) - low + 1
    keys = codes * span + np.concatenate(positions) - low
    split = len(documents[0])
    for side, trace, own in (("A", a, keys[:split]), ("B", b, keys[split:])):
        _check_unique(side, trace, own)
    found = np.intersect1d(keys[:split], keys[split:], assume_unique=True, return_indices=True)
    return Places(torch.from_numpy(found[1]), torch.from_numpy(found[2]))


def _check_unique(side: str, trace: RoutingTrace, keys: np.ndarray) -> None:
    order = np.argsort(keys, kind="stable")
    twice = np.flatnonzero(np.diff(keys[order]) == 0)
    if len(twice):
        at = int(order[twice[0]])
        raise TraceError(
            f"{side}: {len(twice)} tokens occur twice, the first is position "
            f"{int(trace.positions[at])} of document {int(trace.documents[at])}"
        )


def equal_ids(a: RoutingTrace, b: RoutingTrace, places: Places) -> IdCheck:
    """How many of the common tokens have known ids, and how many of these differ."""
    of_a, of_b = a.tokens[places.in_a].long(), b.tokens[places.in_b].long()
    known = (of_a >= 0) & (of_b >= 0)
    different = known & (of_a != of_b)
    first = int(different.float().argmax()) if bool(different.any()) else None
    return IdCheck(int(known.sum()), int(different.sum()), first)
