"""Sentences about a model that is served in a low precision: what it does, and what to do.

served_sentences    both of the following
headline    share of tokens that change an expert, what that does to predictions and loss
advice      the recommendation, with the price of what it recommends
"""

import math

from tieline.analysis.serving import Recommendation, Serving
from tieline.core.statistics import Estimate, mean_limits
from tieline.report.words.numbers import decimal, percent, signed


def served_sentences(serving: Serving, recommendation: Recommendation) -> list[str]:
    """Write what the precision does and what to do; only the latter if routers do not choose."""
    if recommendation.action in ("mend router", "no ties"):
        return [advice(serving, recommendation)]
    return [headline(serving), advice(serving, recommendation)]


def headline(serving: Serving) -> str:
    """Write what the precision does."""
    layers = serving.layers
    where = "its routed layer" if layers == 1 else f"at least one of {layers} layers"
    sentence = (
        f"Served in {serving.precision}, {_share(serving)} of tokens change an expert in {where}; "
        f"the predictions move by {_nats(serving.kl, serving.sequences)} per token (KL)"
    )
    if serving.loss.value is not None:
        sentence += f" and the loss by {signed(serving.loss, '.5f', '.5f')}"
    return f"{sentence}."


def advice(serving: Serving, recommendation: Recommendation) -> str:
    """Write what to do."""
    return ADVICE[recommendation.action](serving, recommendation)


def _nothing(serving: Serving, recommendation: Recommendation) -> str:
    return (
        f"{_small(recommendation)} What to do: nothing, unless runs must choose the same experts "
        f"exactly; then replay the routes{_replay_price(serving)}."
    )


def _small(recommendation: Recommendation) -> str:
    limit = f"{recommendation.limit:g} nats"
    if recommendation.is_sure:
        return f"That is harmless (below {limit})."
    return f"That is small, though too few tokens to be sure that it is below {limit}."


def _repair(serving: Serving, recommendation: Recommendation) -> str:
    share = serving.by_routing
    known = "" if share is None else f"Changed experts are behind {percent(min(1.0, share))} of it."
    return (
        f"{known}{_unsure(recommendation)} What to do: replay the routes where one run must follow "
        f"another{_replay_price(serving)}; where independent runs must agree, compare smoothing "
        "with a finer precision (`tieline audit`)."
    ).strip()


def _finer(serving: Serving, recommendation: Recommendation) -> str:
    share = percent(max(0.0, serving.by_routing or 0.0))
    return (
        f"Changed experts are behind only {share} of it.{_unsure(recommendation)} What to do: "
        "serve in a finer precision where that matters; repairing the routing hardly helps."
    )


def _mend(serving: Serving, recommendation: Recommendation) -> str:
    return (
        "All scores of a router are equal: an untrained or broken router. What to do: check the "
        "checkpoint; nothing else that is measured here means anything."
    )


def _no_ties(serving: Serving, recommendation: Recommendation) -> str:
    return "All experts are chosen: no tie is possible. What to do: nothing about routing."


ADVICE = {
    "nothing": _nothing,
    "repair routing": _repair,
    "finer precision": _finer,
    "mend router": _mend,
    "no ties": _no_ties,
}
"""The sentence of each action."""


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
