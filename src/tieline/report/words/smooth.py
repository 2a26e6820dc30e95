"""Sentences of a smoothed model: its verdict, and what smoothing repairs and costs."""

from tieline.analysis.repair import Latency, Repair, RepairRow
from tieline.report.words.numbers import finite, percent, signed, significant


def facts(result: Repair) -> list[str]:
    """Write experts, loss, distance, flips, time, and what was refused, one sentence each."""
    repair = result.repair
    before, after = repair.experts_before.value, repair.experts_after.value
    sentences = [
        f"Experts per token: {significant(before)} before, {significant(after)} after.",
        f"Loss: {significant(repair.loss.value, 5)} before, changed by "
        f"{signed(repair.loss_change, '.5f', '.5f')} nats per token.",
        f"Smoothing itself moves the predictions by KL {significant(repair.moved.value)}.",
        *map(_price_sentence, repair.rows[:1]),
        f"Tokens whose experts change in some layer: {'; '.join(map(_flips_text, repair.rows))}.",
        f"Time of a forward pass: {'; '.join(map(_time_text, result.latency)) or 'not measured'}.",
        f"KL in nats per token of each model to itself in float32, {repair.tokens:,} tokens in "
        f"{repair.sequences} sequences; ± is the standard error, clustered by sequence.",
    ]
    refused = result.smoothing.refused
    return sentences + [f"Not smoothed: {name}: {why}." for name, why in refused.items()]


def verdict(result: Repair) -> str:
    """Write what was gained and paid, and what to do with it; empty without a repair."""
    rows = [row for row in result.repair.rows if finite(row.factor.value) is not None]
    if not rows:
        return ""
    best = max(rows, key=lambda row: row.factor.value or 0.0)
    lowered = f"KL under {best.name} is {significant(best.factor.value)} times lower"
    moved, loss = result.repair.moved.value, signed(result.repair.loss_change, ".5f", ".5f")
    cost = f"the model moved by KL {significant(moved)} (loss {loss} nats)"
    if (best.factor.value or 0.0) <= 1:
        return (
            f"Smoothing repairs nothing here: at best the {lowered}. What to do: keep the original."
        )
    advice = "What to do: use the smoothed model where that change and its time are acceptable."
    return f"The {lowered}; for that {cost}. {advice}"


def _price_sentence(row: RepairRow) -> str:
    factor = row.flip_factor
    lower = "too low to be seen" if factor is None else f"{significant(factor)} times lower"
    return (
        f"What flips cost under {row.name}, KL minus its floor: {significant(row.by_flips)} "
        f"before, {lower} after."
    )


def _time_text(latency: Latency) -> str:
    ran, before = latency.implementation, latency.original
    how = f"{ran} experts" if ran == before else f"{ran} experts, {before} before"
    interval = f"{latency.low:.2f} to {latency.high:.2f}"
    return f"{latency.ratio:.2f} times the original ({interval}, {how})"


def _flips_text(row: RepairRow) -> str:
    before, after = percent(row.flips_before.value), percent(row.flips_after.value)
    return f"{row.name} {before} before, {after} after"
