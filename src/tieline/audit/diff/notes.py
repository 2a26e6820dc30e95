"""What is unusual about an alignment, in words."""

from collections.abc import Sequence

from tieline.audit.diff.records import Alignment

__all__ = ["alignment_notes"]


def alignment_notes(found: Alignment, against_ids: bool) -> tuple[str, ...]:
    """Everything that two runs of one program would not show, the gravest first.

    Args:
        found: the alignment.
        against_ids: whether the token ids agree at another shift than the choices.
    """
    return tuple(
        note
        for note in (
            _token_shift(found, against_ids),
            _layer_shift(found),
            _experts(found),
            _k(found),
            _layers(found),
            _tokens(found),
            _unrouted(found),
        )
        if note
    )


def _token_shift(found: Alignment, against_ids: bool) -> str:
    if found.token_shift == 0:
        return "tokens are not shifted, although their ids are" if against_ids else ""
    where = "after" if found.token_shift > 0 else "before"
    strange = ", although the token ids agree otherwise" if against_ids else ""
    return (
        f"tokens are shifted: what A has at position p, B has one position {where} it "
        f"({found.token_shift:+d}){strange}"
    )


def _layer_shift(found: Alignment) -> str:
    if found.layer_shift is None:
        return "layers are paired by order: their numbers do not match"
    if found.layer_shift == 0:
        return ""
    return f"layers are shifted: layer l of A is layer l{found.layer_shift:+d} of B"


def _experts(found: Alignment) -> str:
    moved = found.permuted
    if not moved:
        return ""
    first = moved[0]
    pairs = list(zip(first.moved_experts, first.moved_to, strict=True))
    shown = ", ".join(f"{i} → {j}" for i, j in pairs[:4]) + (", …" if len(pairs) > 4 else "")
    return (
        f"experts are numbered otherwise in {len(moved)} of {len(found.pairs)} layers "
        f"(A → B in {first.name_a!r}: {shown})"
    )


def _k(found: Alignment) -> str:
    different = [pair for pair in found.pairs if pair.k_a != pair.k_b]
    if not different:
        return ""
    first = different[0]
    return (
        f"different k in {len(different)} layers: A chooses {first.k_a} experts, B {first.k_b}; "
        f"the first {first.k} of both are compared"
    )


def _layers(found: Alignment) -> str:
    only = _sides("{} layers are in {side} only ({})", found.only_a, found.only_b)
    dense = _sides("{} layers of {side} route nothing: dense ({})", found.dense_a, found.dense_b)
    return "; ".join([*only, *dense])


def _sides(words: str, names_a: Sequence[str], names_b: Sequence[str]) -> list[str]:
    """The words for each side that has names, with their number and the first three."""
    return [
        words.format(
            len(names), ", ".join(names[:3]) + (", …" if len(names) > 3 else ""), side=side
        )
        for side, names in (("A", names_a), ("B", names_b))
        if names
    ]


def _tokens(found: Alignment) -> str:
    return _counts("{} tokens are in {} only", found.tokens_only_a, found.tokens_only_b)


def _unrouted(found: Alignment) -> str:
    words = "{} tokens of {} were not routed (-1) and are left out"
    return _counts(words, found.unrouted_a, found.unrouted_b)


def _counts(words: str, count_a: int, count_b: int) -> str:
    counts = (("A", count_a), ("B", count_b))
    return "; ".join(words.format(count, side) for side, count in counts if count)
