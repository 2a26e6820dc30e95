"""Sentences about a model that is served in a low precision: what it does, and what to do.

served_sentences    both of the following, with others between them
headline            share of tokens that change an expert, what that does to predictions and loss
advice              the recommendation, with the price of what it recommends
"""

import math

from tieline.analysis.serving import Recommendation, Serving
from tieline.core.statistics import Estimate, mean_limits
from tieline.report.words.layers import layer_labels
from tieline.report.words.numbers import decimal, listed, percent, signed


def served_sentences(serving: Serving, recommendation: Recommendation, *further: str) -> list[str]:
    """Write what the precision does, what else is known, and last what to do.

    Args:
        serving: what the precision does to the model.
        recommendation: what to do; where routers do not choose, nothing else is written.
        further: sentences before what to do.
    """
    if recommendation.action in ("mend router", "no ties"):
        return [advice(serving, recommendation)]
    cause, action = ADVICE[recommendation.action](serving, recommendation)
    return [*filter(None, (headline(serving), cause, *further)), f"What to do: {action}"]


def headline(serving: Serving) -> str:
    """Write what the precision does."""
    layers = serving.layers
    where = "its routed layer" if layers == 1 else f"at least one of {layers} layers"
    sentence = (
        f"Served in {serving.precision}, {_share(serving)} of {serving.tokens:,} tokens change an "
        f"expert in {where}; "
        f"the predictions move by {_nats(serving.kl, serving.sequences)} per token (KL)"
    )
    if serving.loss.value is not None:
        sentence += f" and the loss by {signed(serving.loss, '.5f', '.5f')}"
    return f"{sentence}."


def advice(serving: Serving, recommendation: Recommendation) -> str:
    """Write how grave it is and what to do."""
    cause, action = ADVICE[recommendation.action](serving, recommendation)
    return " ".join(filter(None, (cause, f"What to do: {action}")))


def _nothing(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    limit = f"{recommendation.limit:g} nats"
    small = f"That is harmless (below {limit})."
    if not recommendation.is_sure:
        small = f"That is small, though too few tokens to be sure that it is below {limit}."
    return small, (
        "nothing, unless runs must choose the same experts exactly; then replay the "
        f"routes{_replay_price(serving)}."
    )


def _repair(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    share = serving.by_routing
    cause = "" if share is None else f"Changed experts are behind {percent(min(1.0, share))} of it."
    return f"{cause}{_unsure(recommendation)}".strip(), (
        f"replay the routes where one run must follow another{_replay_price(serving)}; where "
        "independent runs must agree, compare smoothing with a finer precision (`tieline audit`)."
    )


def _finer(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    share = percent(max(0.0, serving.by_routing or 0.0))
    cause = f"Changed experts are behind only {share} of it.{_unsure(recommendation)}"
    action = "serve in a finer precision where that matters; repairing the routing hardly helps."
    return cause, action


def _mend(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    labels = list(layer_labels(serving.equal_layers).values())
    where = f" in {listed(labels)}" if labels else ""
    return (
        f"All scores are equal{where}: an untrained or broken router.",
        "check the checkpoint; nothing else that is measured here means anything.",
    )


def _no_ties(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    return "All experts are chosen: no tie is possible.", "nothing about routing."


ADVICE = {
    "nothing": _nothing,
    "repair routing": _repair,
    "finer precision": _finer,
    "mend router": _mend,
    "no ties": _no_ties,
}
"""How grave it is, and what to do, for each action."""


def _unsure(recommendation: Recommendation) -> str:
    return "" if recommendation.is_sure else " More tokens would make this sure."


def _replay_price(serving: Serving) -> str:
    if serving.replayed.value is None:
        return ""
    left = f"leaves {decimal(serving.replayed.value)} nats"
    sent = f", {serving.replay_bytes:,} bytes a token" if serving.replay_bytes else ""
    return f" ({left}{sent})"


def _share(serving: Serving) -> str:
    value = percent(serving.changed.value, trim=True)
    low, high = mean_limits(serving.changed, serving.sequences, positive=True)
    if not math.isfinite(high):
        return value
    interval = f"{percent(low, trim=True)} to {percent(min(1.0, high), trim=True)}"
    return f"{value} (95 % interval {interval})"


def _nats(kl: Estimate, sequences: int) -> str:
    if kl.value is None:
        return "an unknown number of nats"
    low, high = mean_limits(kl, sequences, positive=True)
    value = f"{decimal(kl.value)} nats"
    return value if not math.isfinite(high) else f"{value} ({decimal(low)} to {decimal(high)})"
