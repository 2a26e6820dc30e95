"""Sentences of a check of a running server: whether its choices depend on the batch."""

from tieline.analysis.serve_check import FirstFlip, ServeCheck, ServedWay
from tieline.report.words.numbers import list_with_and, percent, significant

WAY_TEXTS = {
    "repeated": "sent again",
    "cached": "with a cached prefix",
    "batched": "in batches",
    "after_short": "behind short prompts",
}
"""Text of each way of sending prompts."""

INVARIANCE_OPTIONS = {
    "vllm": "VLLM_BATCH_INVARIANT=1",
    "sglang": "--enable-deterministic-inference",
}
"""Setting that makes each engine batch-invariant."""


def serve_check_verdict(result: ServeCheck) -> str:
    """Write whether the choices depend on how prompts are sent."""
    size = f"all {result.tokens:,} tokens of {result.prompts} prompts"
    if result.invariant:
        return (
            f"Batch-invariant here: {size} choose the same experts alone, repeated, with a cached "
            "prefix and in batches."
        )
    flipped = {way.way: way for way in result.ways if way.flipped}
    if "repeated" in flipped:
        share = percent(flipped["repeated"].share, trim=True)
        return f"Not repeatable: {share} of tokens choose other experts when they are sent again."
    worst = max(flipped.values(), key=lambda way: way.flipped)
    where = list_with_and([WAY_TEXTS[name] for name in flipped])
    return (
        f"The choice depends on the batch: up to {percent(worst.share, trim=True)} of tokens "
        f"choose other experts {where}."
    )


def first_flip_sentence(way: ServedWay) -> str:
    """Write where the first difference is, and which experts were exchanged."""
    flip = way.first
    if flip is None:
        return f"{WAY_TEXTS[way.way][:1].upper()}{WAY_TEXTS[way.way][1:]}: no difference."
    return (
        f"First difference {WAY_TEXTS[way.way]}: layer {flip.layer}, token {flip.token} of prompt "
        f"{flip.prompt}, {_expert_numbers_text(flip.entered)} for "
        f"{_expert_numbers_text(flip.left)}{_score_difference_text(flip)}."
    )


def _score_difference_text(flip: FirstFlip) -> str:
    """Return the difference of the exchanged scores as text; empty if no model judged the flip."""
    if flip.near_tie is None:
        return ""
    if flip.difference is None:
        return "; its score is far below the others"
    kind = "a near-tie" if flip.near_tie else "no near-tie"
    return f"; {kind}, scores differ by {significant(abs(flip.difference), 2)}"


def _expert_numbers_text(numbers: tuple[int, ...]) -> str:
    """Return "expert 3" or "experts 3, 5"."""
    return f"expert{'s' * (len(numbers) != 1)} {', '.join(map(str, numbers))}"


def near_tie_sentence(result: ServeCheck) -> str:
    """Write whether rounding explains the first flips; empty without flips."""
    first_flips = sum(way.first_flips for way in result.ways)
    if not first_flips:
        return ""
    if result.judged_by is None:
        return (
            "Whether these are near-ties is not known without scores: name the model that is "
            "served with --model."
        )
    near_ties = sum(way.near_ties or 0 for way in result.ways)
    if near_ties == first_flips:
        return (
            f"All {first_flips} first flips are near-ties, as {result.precision} rounding explains."
        )
    return (
        f"{first_flips - near_ties} of {first_flips} first flips are no near-ties: "
        f"{result.precision} rounding does not explain them; look for a bug."
    )


def invariance_sentence(result: ServeCheck) -> str:
    """Write what batch-invariant kernels would change; empty without flips in batches.

    They keep what rounding changes, which is known of near-ties alone.
    """
    if not result.batch_flips:
        return ""
    kernels = f"Batch-invariant kernels ({INVARIANCE_OPTIONS[result.engine]})"
    if any(way.near_ties is not None and way.near_ties < way.first_flips for way in result.ways):
        return f"{kernels} keep choices that rounding changes; they need not mend a bug."
    share = percent(result.batch_flips / result.tokens, trim=True)
    condition = ", if rounding changed it" if result.judged_by is None else ""
    return f"{kernels} would keep the choice of {result.batch_flips:,} tokens ({share}){condition}."
