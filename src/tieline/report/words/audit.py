"""Sentences of a precision audit: verdict, notes below the table, and remedies."""

import math
from collections.abc import Mapping, Sequence

from tieline.analysis.audit_records import (
    PerturbationEffect,
    PrecisionAudit,
    Remedy,
    RemedyEffect,
    RemedyTable,
)
from tieline.analysis.job_settings import SERVED
from tieline.core.statistics import Estimate, mean_limits
from tieline.report.words.numbers import decimal, percent, significant
from tieline.report.words.served_precision import (
    FLOOR_MEANING,
    HARMLESS_MEANING,
    ROUTERS_MEANING,
    served_sentences,
)

PRECISION_OF_FORMAT = {form: precision for precision, form in SERVED.items()}
"""Precision served, by the number format that models it."""

NEIGHBOUR_ADVICE = {
    "repair routing": "replay the routes where one run must follow another, else compare "
    "smoothing with a finer precision",
    "finer precision": "take a finer precision where that matters",
}
"""What to do about a precision that is not the one served, by action."""

REMEDY_ADVICE = (
    "Routers in float32 win where only the routers' own precision is at fault: the model is not "
    "moved, for the bytes named.",
    "Replay wins where one run must follow another: it takes the experts that were recorded, "
    "weighted live or as recorded, and does not move the model; without a run to follow it does "
    "nothing.",
    "Smoothing wins where two independent runs must agree and a model near the original is as good "
    "as the original: the KL of two runs is lower, and the model is moved by the KL named beside "
    "it. `tieline frontier` measures both for more widths.",
)


def audit_verdict(result: PrecisionAudit) -> str:
    """Write what serving does, what to do, which remedy helps, and which formats routers take."""
    recommendation, serving = result.judgement.recommendation, result.serving
    if serving is None or recommendation is None:
        return " ".join(filter(None, _router_format_sentences(result)))
    further = _router_format_sentences(result) if result.is_full else []
    if result.remedies is not None and recommendation.action != "nothing":
        further.append(_best_remedy(result.remedies, f"model {SERVED[serving.precision]}"))
    return " ".join(served_sentences(serving, recommendation, *further))


def _router_format_sentences(result: PrecisionAudit) -> list[str]:
    """Return sentences on the formats that the routers alone tolerate, refuse, or leave unclear."""
    if result.judgement.kind == "not run":
        return ["No rounding of the routers was run: nothing is said about their formats."]
    return [_tolerated_formats(result), _refused_formats(result), _unclear_formats(result)]


def _format_names(result: PrecisionAudit, names: Sequence[str]) -> list[str]:
    """Return the formats of the named perturbations."""
    return [str(result.effect(name).level) for name in names]


def _tolerated_formats(result: PrecisionAudit) -> str:
    """State which formats cost the routers alone little, and the smallest of them."""
    judgement = result.judgement
    if judgement.smallest is None:
        return (
            f"No format is shown to cost the routers alone less than {judgement.limit:g} nats per "
            "token."
        )
    smallest = result.effect(judgement.smallest)
    names = ", ".join(_format_names(result, judgement.tolerated))
    return (
        f"The routers alone tolerate {names} (under {judgement.limit:g} nats): of these "
        f"{smallest.level} is the smallest, with {_flips_text(smallest)} of tokens changing "
        f"experts per layer and a KL of {_kl_interval(smallest.kl, result.sequences)}."
    )


def _refused_formats(result: PrecisionAudit) -> str:
    """State which formats the routers do not tolerate; empty if there is none."""
    if result.judgement.worst is None:
        return ""
    worst = result.effect(result.judgement.worst)
    names = ", ".join(_format_names(result, result.judgement.refused))
    return (
        f"They do not tolerate {names}: under {worst.level}, {_flips_text(worst)} of tokens change "
        f"experts per layer, for a KL of {_kl_interval(worst.kl, result.sequences)} and "
        f"{worst.loss.value or 0.0:+.2g} nats of loss."
    )


def _unclear_formats(result: PrecisionAudit) -> str:
    """State for which formats the tokens are too few to tell; empty if there is none."""
    rows = [result.effect(name) for name in result.judgement.unclear]
    if not rows:
        return ""
    costs = ", ".join(
        f"{x.level} costs a KL of {_kl_interval(x.kl, result.sequences)}" for x in rows
    )
    formats = " or ".join(", ".join(str(x.level) for x in rows).rsplit(", ", 1))
    return f"Too few tokens to tell about {formats}: {costs}."


def _flips_text(row: PerturbationEffect) -> str:
    """Return the flip rate per layer of a full run as text."""
    return percent(row.full.value or 0.0, trim=True)


def _kl_interval(kl: Estimate, sequences: int) -> str:
    """Return a KL with its 95 % interval as text."""
    low, high = mean_limits(kl, sequences, positive=True)
    value = f"{decimal(kl.value or 0.0)} nats"
    if not math.isfinite(high):
        return f"{value} (one sequence: no interval)"
    return f"{value} (95 % interval {decimal(low)} to {decimal(high)})"


def audit_notes(result: PrecisionAudit, short: Mapping[str, str]) -> list[str]:
    """Write the notes below the table: noise that flips 1 %, experts never hit, caveats.

    Args:
        result: the audit.
        short: short name of each layer.
    """
    sigma, lines = result.one_percent, []
    if sigma.model is not None:
        noise, share = significant(sigma.model), percent(sigma.share)
        verb = "flips" if result.experts is None else "exchanges the experts at the threshold of"
        lines.append(f"Noise of σ = {noise} on the logits {verb} {share} of tokens.")
    lines += filter(None, [_uncertified_sentence(result, short)])
    for never in result.never_hit:
        experts, label = never.experts, short.get(never.layer, never.layer)
        numbers = ", ".join(map(str, experts[:8])) + (", …" if len(experts) > 8 else "")
        lines.append(
            f"Layer {label}: {len(experts)} of {never.n_experts} experts were never hit by the "
            f"text ({numbers}), so it says nothing about them."
        )
    return [*lines, *audit_caveats(result)]


def _uncertified_sentence(result: PrecisionAudit, short: Mapping[str, str]) -> str:
    """State how many tokens another order of summation may flip; empty if none was certified."""
    shares = {
        name: share.value for name, share in result.uncertified.items() if share.value is not None
    }
    if not shares:
        return ""
    worst = max(shares, key=lambda name: shares[name])
    mean = sum(shares.values()) / len(shares)
    return (
        f"At most {percent(mean)} of tokens (layer {short.get(worst, worst)}: "
        f"{percent(shares[worst])}) can change experts in a layer because another kernel sums the "
        "float32 product of its router in another order; no order changes the others, given the "
        "same inputs of the router."
    )


def served_table_sentence(result: PrecisionAudit) -> str:
    """Write what to do about harmful neighbours of the precision served, and how to read all."""
    explanation = (
        f"{FLOOR_MEANING[0].upper()}{FLOOR_MEANING[1:]}. {HARMLESS_MEANING}; {ROUTERS_MEANING}."
    )
    neighbours = [row for row in result.effects if row.level in PRECISION_OF_FORMAT]
    return " ".join(
        [*filter(None, (_neighbour_advice(result, x) for x in neighbours)), explanation]
    )


def _neighbour_advice(result: PrecisionAudit, row: PerturbationEffect) -> str:
    """Advise on a precision that is not served; empty if it is served or harmless."""
    advice, precision = result.advice(row), PRECISION_OF_FORMAT[str(row.level)]
    served = result.serving is None or precision == result.serving.precision
    if served or row.part != "model" or advice is None or advice.action not in NEIGHBOUR_ADVICE:
        return ""
    return (
        f"Served in {precision} instead: {NEIGHBOUR_ADVICE[advice.action]}; changed experts are "
        f"behind {percent(max(0.0, row.by_flips or 0.0))} of its KL (`tieline audit --serve "
        f"{precision}`)."
    )


def audit_caveats(result: PrecisionAudit) -> list[str]:
    """Write what a flip of a smoothed model is, and what was impossible or left out."""
    lines = []
    if result.experts is not None:
        lines.append(
            f"The model is smoothed: tokens use {result.experts:.2f} experts on average, a flip is "
            "a change of the experts with any weight, and no tie predicts it."
        )
    if result.impossible:
        lines.append(f"Not possible: {result.impossible}.")
    return lines + [f"Left out: {reason}." for reason in result.left_out]


def remedy_sentences(table: RemedyTable, brief: bool = False) -> list[str]:
    """Write what was best under each perturbation, when each remedy wins, and what cannot be.

    Args:
        table: the remedies.
        brief: write only how to read the table, and what cannot be.
    """
    best = [] if brief else [_best_remedy(table, name) for name in table.perturbations]
    second_runs = ""
    if 0 < table.half_tokens < table.tokens:
        second_runs = f" (over {table.half_tokens:,})"
    explanation = (
        f"KL per token over {table.tokens:,} tokens; two runs{second_runs} differ by noise of the "
        "size of rounding errors; “moved” is how far the repair moves the model in float32; × is "
        f"time over the original's, σ the noise of a layer's gap under {table.noise}; a ramp lets "
        "weights fall to zero below the last chosen expert."
    )
    obstacles = [f"Not possible: {reason}." for reason in table.impossible]
    return [*filter(None, best), *(() if brief else REMEDY_ADVICE), explanation, *obstacles]


def remedies_under(table: RemedyTable, name: str) -> list[tuple[Remedy, RemedyEffect]]:
    """Return the remedies that apply to a perturbation, each with its effect."""
    pairs = [(remedy, remedy.effect(name)) for remedy in table.remedies]
    return [(remedy, effect) for remedy, effect in pairs if effect is not None]


def _best_remedy(table: RemedyTable, name: str) -> str:
    """State which remedy comes nearest to the original, and with which two runs agree best."""
    pairs = [pair for pair in remedies_under(table, name) if pair[0].kind != "nothing"]
    if not pairs:
        return ""
    nearest_remedy, remaining = min(pairs, key=lambda pair: _kl_or_infinity(pair[1].to_original))
    nearest = f"{nearest_remedy.name} ({_remedy_kl_text(remaining.to_original)})"
    sentence = f"Under {name}, nearest to the original: {nearest}"
    independent = [pair for pair in pairs if pair[0].kind != "replay"]
    if not independent:
        return f"{sentence}."
    agreeing_remedy, agreement = min(
        independent, key=lambda pair: _kl_or_infinity(pair[1].two_runs)
    )
    moved = (
        f"moved by {_remedy_kl_text(agreeing_remedy.moved)}"
        if agreeing_remedy.moved.value
        else "not moved"
    )
    return (
        f"{sentence}; two runs without replay agree best with {agreeing_remedy.name} "
        f"({_remedy_kl_text(agreement.two_runs)}, the model {moved})."
    )


def _kl_or_infinity(kl: Estimate) -> float:
    """Return a KL for comparisons; infinite if it is unknown."""
    return math.inf if kl.value is None else kl.value


def _remedy_kl_text(kl: Estimate) -> str:
    """Return "KL" and its value with two digits."""
    return "KL 0" if kl.value == 0 else f"KL {significant(kl.value, 2)}"
