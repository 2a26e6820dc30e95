"""Sentences of a smoothed model: its verdict, and what smoothing repairs and costs."""

import math

from tieline.analysis.job_settings import SERVED
from tieline.analysis.smooth_repair import Latency, Repair, RepairRow
from tieline.core.statistics import mean_limits
from tieline.report.words.numbers import decimal, finite, percent, significant
from tieline.report.words.served_precision import (
    FLOOR_MEANING,
    HARMLESS_MEANING,
    REPLAY_ACTION,
    ROUTERS_MEANING,
    fragile_sentence,
    loss_change_text,
    serving_advice,
    serving_headline,
)


def smoothing_facts(result: Repair) -> list[str]:
    """Write experts per token, loss, flips, time and refused layers, one sentence each."""
    repair = result.repair
    before, after = repair.experts_before.value, repair.experts_after.value
    flips = "; ".join(map(_flips_before_and_after_text, repair.rows))
    rises = any((x.flips_after.value or 0) > (x.flips_before.value or 0) for x in repair.rows)
    reason = "; more than before, since experts then come and go with little weight"
    times = "; ".join(map(_latency_text, result.latency))
    sentences = [
        f"Experts per token: {significant(before)} before, {significant(after)} after. "
        f"Loss: {significant(repair.loss.value, 5)} before, changed by "
        f"{loss_change_text(repair.loss_change, repair.sequences)} nats per token.",
        f"Tokens whose experts change in some layer: {flips}{reason * rises}.",
        f"Time of a forward pass: {times or 'not measured'}.",
        f"KL in nats per token of each model to itself in float32, over {repair.sequences} "
        "sequences after those of the calibration, with which `inspect` and `audit` begin: hence "
        f"their other KLs; {FLOOR_MEANING}. "
        f"{HARMLESS_MEANING}; {ROUTERS_MEANING}.",
    ]
    near = filter(None, [_near_original_sentence(result)])
    refused = result.smoothing.refused
    return [*near, *sentences] + [f"Not smoothed: {name}: {why}." for name, why in refused.items()]


def smoothing_details(result: Repair) -> list[str]:
    """Write the details for the page: how far smoothing moved the model, what flips cost."""
    moved = significant(result.repair.moved.value)
    prices = map(_price_sentence, result.repair.rows[:1])
    return [f"Smoothing itself moves the predictions by KL {moved}.", *prices]


def smoothing_verdict(result: Repair) -> str:
    """Write what the precision served does, what smoothing gains and costs there, what to do."""
    row = served_row(result)
    if row is None:
        return ""
    held_out_tokens = f"{result.serving.tokens:,} tokens that ε was not calibrated on"
    sentences = (
        serving_headline(result.serving, held_out_tokens),
        fragile_sentence(result.serving),
        _gain_sentence(result, row),
        _smoothing_advice(result, row),
    )
    return " ".join(filter(None, sentences))


def served_row(result: Repair) -> RepairRow | None:
    """Return the row of the precision served; None if its factor is not known."""
    name = f"model {SERVED[result.serving.precision]}"
    row = next((row for row in result.repair.rows if row.name == name), None)
    return None if row is None or finite(row.factor.value) is None else row


def _gain_sentence(result: Repair, row: RepairRow) -> str:
    """State how much nearer the smoothed model stays to itself, and how far it moved for that."""
    moved, cost = result.repair.moved.value or 0.0, row.before.value or 0.0
    if (row.factor.value or 0.0) <= 1:
        return "Smoothing repairs nothing there: the smoothed model comes no nearer to itself."
    times = "" if cost <= 0 else f", {significant(moved / cost, 2)} × what that precision costs it"
    low, high = mean_limits(row.factor, result.repair.sequences, positive=True)
    interval = f" ({significant(low, 2)} to {significant(high, 2)})" * math.isfinite(high)
    return (
        f"There the smoothed model stays {significant(row.factor.value, 2)} ×{interval} nearer to "
        f"itself in float32, but smoothing moved the model by {decimal(moved)} nats{times}."
    )


def _near_original_sentence(result: Repair) -> str:
    """State how much nearer to the original the noisy smoothed model is than the noisy original."""
    if result.near_original is None:
        return ""
    row = result.repair.row(result.near_original)
    gain = finite(row.gain.value)
    if gain is None:
        return f"Flips cost nothing under {row.name} here, so that nothing can be gained."
    low, high = mean_limits(row.gain, result.repair.sequences)
    interval = f" (95 % interval {percent(low)} to {percent(high)})" * math.isfinite(high)
    return (
        f"Under {row.name} the smoothed model is {decimal(row.after_to_original.value or 0.0)} "
        f"nats from the original in float32, and the original {decimal(row.before.value or 0.0)}: "
        f"measured, {percent(gain)}{interval} of what flips cost is gained."
    )


def _smoothing_advice(result: Repair, row: RepairRow) -> str:
    """Advise whether to use the smoothed model or the original."""
    action = result.recommendation.action
    if action in ("mend router", "no ties", "unknown cause"):
        return serving_advice(result.serving, result.recommendation)
    if action == "nothing":
        return (
            "What to do: keep the original, to which that precision does little; replay its routes "
            "with `tieline.replay` where runs must choose the same experts exactly."
        )
    if action == "finer precision":
        return "What to do: keep the original, and serve it in a finer precision."
    if not result.repair.pays(row):
        return (
            f"What to do: keep the original; {REPLAY_ACTION}, else serve it in a finer precision."
        )
    return (
        "What to do: take the smoothed model where independent runs must agree and a model this "
        f"near will do, or the original in a finer precision; {REPLAY_ACTION}."
    )


def _price_sentence(row: RepairRow) -> str:
    """State what flips cost under a precision, before and after smoothing."""
    factor = row.flip_factor
    lower = "too low to be seen" if factor is None else f"{significant(factor)} times lower"
    return (
        f"What flips cost under {row.name}, KL minus its floor: {significant(row.by_flips)} "
        f"before, {lower} after."
    )


def _latency_text(latency: Latency) -> str:
    """Return the time of a pass relative to the original, with its interval and kernels."""
    kernel, original_kernel = latency.implementation, latency.original
    before = "" if kernel == original_kernel else f", the original by {original_kernel}"
    interval = f"{latency.low:.2f} to {latency.high:.2f}"
    return f"{latency.ratio:.2f} times the original ({interval}; experts by {kernel}{before})"


def _flips_before_and_after_text(row: RepairRow) -> str:
    """Return the share of tokens that flip under a precision, before and after smoothing."""
    before, after = percent(row.flips_before.value), percent(row.flips_after.value)
    return f"{row.name} {before} before, {after} after"
