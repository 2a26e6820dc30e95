"""What is unusual about an alignment, in words."""

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
    parts = [
        f"{len(names)} layers are in {side} only ({', '.join(names[:3])}"
        f"{', …' if len(names) > 3 else ''})"
        for side, names in (("A", found.only_a), ("B", found.only_b))
        if names
    ]
    parts += [
        f"{len(names)} layers of {side} route nothing: dense ({', '.join(names[:3])}"
        f"{', …' if len(names) > 3 else ''})"
        for side, names in (("A", found.dense_a), ("B", found.dense_b))
        if names
    ]
    return "; ".join(parts)


def _tokens(found: Alignment) -> str:
    parts = [
        f"{count} tokens are in {side} only"
        for side, count in (("A", found.tokens_only_a), ("B", found.tokens_only_b))
        if count
    ]
    return "; ".join(parts)


def _unrouted(found: Alignment) -> str:
    parts = [
        f"{count} tokens of {side} were not routed (-1) and are left out"
        for side, count in (("A", found.unrouted_a), ("B", found.unrouted_b))
        if count
    ]
    return "; ".join(parts)
