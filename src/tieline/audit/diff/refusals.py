"""What cannot be laid on each other, said with what does not match and where."""

from collections.abc import Mapping, Sequence

import torch

from tieline.audit.diff.pairings import Pairing
from tieline.audit.diff.places import IdCheck, Places
from tieline.audit.diff.records import LayerPair
from tieline.errors import TraceError, require
from tieline.trace.record import RoutingTrace

__all__ = [
    "check_ids",
    "check_layers",
    "check_related",
    "check_sizes",
    "check_tokens",
]

RELATED = 0.1
"""Agreement beyond chance below which runs without known token ids count as unrelated."""


def check_sizes(a: RoutingTrace, b: RoutingTrace, pair: tuple[int, int], partial: bool) -> int:
    """The number of experts of two layers; refuses another number, and another k unless partial.

    A number of experts that was inferred from the largest id may be too small.
    """
    first, second = a.layers[pair[0]], b.layers[pair[1]]
    counts = first.facts.n_experts, second.facts.n_experts
    where = f"layer {first.name!r} of A", f"layer {second.name!r} of B"
    for own, trace, here in zip(counts, (a, b), where, strict=True):
        inferred = str(trace.provenance.get("n_experts", "")).startswith("inferred")
        require(
            own == max(counts) or inferred,
            f"number of experts differs: {own} in {here}, {max(counts)} in the other",
            TraceError,
        )
    k_a, k_b = first.facts.k, second.facts.k
    require(
        partial or k_a == k_b,
        f"different k: {where[0]} chooses {k_a} experts, {where[1]} {k_b}; partial (--partial) "
        f"compares the first {min(k_a, k_b)} of both",
        TraceError,
    )
    return max(counts)


def check_ids(
    a: RoutingTrace, b: RoutingTrace, places: Mapping[int, Places], ids: Mapping[int, IdCheck]
) -> int:
    """The shift at which the token ids agree, 0 if they are unknown; refuses other tokens."""
    require(any(len(found.in_a) for found in places.values()), _apart(a, b), TraceError)
    if all(check.known == 0 for check in ids.values()):
        return 0 if len(places[0].in_a) else next(s for s, x in places.items() if len(x.in_a))
    agreeing = [s for s, check in ids.items() if check.known > 0 and check.different == 0]
    if agreeing:
        return agreeing[0]
    check, found = ids[0], places[0]
    at = found.in_a[check.first or 0], found.in_b[check.first or 0]
    raise TraceError(
        f"different tokenisations: {check.different} of {check.known} token ids differ, the first "
        f"at document {int(a.documents[at[0]])}, position {int(a.positions[at[0]])}: "
        f"{int(a.tokens[at[0]])} in A, {int(b.tokens[at[1]])} in B"
    )


def check_layers(a: RoutingTrace, b: RoutingTrace, pairing: Pairing) -> None:
    """Refuse if most layers find no partner."""
    fewest = min(len(a.layers), len(b.layers))
    require(
        2 * len(pairing.pairs) >= fewest,
        f"only {len(pairing.pairs)} layers of A ({_names(a)}) and B ({_names(b)}) match",
        TraceError,
    )


def check_tokens(
    a: RoutingTrace, b: RoutingTrace, found: Places, unrouted: tuple[int, int], partial: bool
) -> None:
    """Refuse if one side lacks more tokens than one per document and those it did not route."""
    documents = len(a.documents[found.in_a].unique())
    for here, there, own, missed in (("A", "B", a, unrouted[1]), ("B", "A", b, unrouted[0])):
        kept = found.in_a if own is a else found.in_b
        lacking = own.n_tokens - len(kept)
        if partial or lacking <= documents + missed:
            continue
        held = torch.zeros(own.n_tokens, dtype=torch.bool)
        held[kept] = True
        first = int((~held).float().argmax())
        raise TraceError(
            f"{there} lacks {lacking} of the {own.n_tokens} tokens of {here}, the first at "
            f"document {int(own.documents[first])}, position {int(own.positions[first])}: "
            "truncated? partial (--partial) compares what both have"
        )


def check_related(
    pairs: Sequence[LayerPair], beyond: Sequence[float | None], verified: bool
) -> None:
    """Refuse runs that agree no more than unrelated ones, unless token ids prove the tokens."""
    known = [agreement for agreement in beyond if agreement is not None]
    if verified or not known or sum(known) / len(known) >= RELATED:
        return
    pair = pairs[next(i for i, agreement in enumerate(beyond) if agreement is not None)]
    raise TraceError(
        "A and B cannot be aligned: no shift of tokens or layers and no renumbering of experts "
        f"makes their choices agree. Layers {pair.name_a!r} and {pair.name_b!r} share "
        f"{100 * pair.agreement:.1f} % of the chosen experts, unrelated runs would share "
        f"{100 * pair.chance:.1f} %"
    )


def _apart(a: RoutingTrace, b: RoutingTrace) -> str:
    return f"A and B have no token in common: {_range('A', a)}; {_range('B', b)}"


def _range(side: str, trace: RoutingTrace) -> str:
    if trace.n_tokens == 0:
        return f"{side} is empty"
    parts = (("documents", trace.documents), ("positions", trace.positions))
    words = [f"{name} {int(x.min())} to {int(x.max())}" for name, x in parts]
    return f"{side} has {', '.join(words)}"


def _names(trace: RoutingTrace) -> str:
    names = [layer.name for layer in trace.layers]
    return f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0]
