"""Sentences about a model that is served in a low precision: what it does, and what to do."""

import math

from tieline.analysis.served_precision import HARMLESS, Recommendation, Serving
from tieline.core.statistics import Estimate, mean_limits
from tieline.core.text import layer_labels
from tieline.report.words.numbers import DASH, decimal, list_with_commas, percent

TOLERANCE_TEXT = {"yes": "harmless", "no": "harmful", "unclear": "unsure"}
"""Verdict on a precision: harmless, harmful, or unsure with too few tokens."""

ROUTERS_MEANING = (
    "“router bf16” runs the routers in bf16: inputs, weights and logits (`inspect` rounds the "
    "logits alone)"
)
HARMLESS_MEANING = f"“harmless” is a KL below {HARMLESS:g} nats per token, by its 95 % interval"
FLOOR_MEANING = (
    "the floor is the KL that stays with the clean run's experts forced, so not by flips"
)

MEND_ROUTER_ACTION = "check the checkpoint; nothing else that is measured here means anything."
REPLAY_ACTION = "replay the routes with `tieline.replay` where one run must follow another"
"""What to do where changed experts do the damage."""

FRAGILE_TIE_SHARE = 0.1
"""Share of exactly tied tokens in a layer from which the choice is called fragile."""


def served_sentences(
    serving: Serving, recommendation: Recommendation, *further: str, tokens: str = ""
) -> list[str]:
    """Write what the precision does, its cause, further sentences, and last what to do.

    Args:
        serving: what the precision does to the model.
        recommendation: what to do; written alone if the routers make no choice.
        further: sentences that precede what to do.
        tokens: text that names the tokens run; empty for all.
    """
    if recommendation.action in ("mend router", "no ties"):
        return [serving_advice(serving, recommendation)]
    cause, action = _cause_and_action(serving, recommendation)
    headline = serving_headline(serving, tokens)
    return [*filter(None, (headline, cause, *further)), f"What to do: {action}"]


def serving_headline(serving: Serving, tokens: str = "") -> str:
    """Write what the precision does to all tokens, or to those that `tokens` names."""
    layers = serving.layers
    where = "its routed layer" if layers == 1 else f"at least one of {layers} layers"
    sentence = (
        f"Served in {serving.precision}, {_changed_share_text(serving)} of "
        f"{tokens or f'all {serving.tokens:,} tokens'} change an expert in {where}; the "
        f"predictions move by "
        f"{_served_kl_text(serving.kl, serving.sequences)} per token (KL)"
    )
    if serving.loss.value is not None:
        sentence += f" and the loss by {loss_change_text(serving.loss, serving.sequences)}"
    return f"{sentence}."


def serving_advice(serving: Serving, recommendation: Recommendation) -> str:
    """Write how severe the effect is and what to do."""
    cause, action = _cause_and_action(serving, recommendation)
    return " ".join(filter(None, (cause, f"What to do: {action}")))


def fragile_sentence(serving: Serving) -> str:
    """Write that many tokens tie exactly, as under a saturated softmax; empty if few do."""
    if serving.routers != "sound" or serving.exact_ties < FRAGILE_TIE_SHARE:
        return ""
    return (
        f"The choice itself is fragile: scores tie exactly for up to "
        f"{percent(serving.exact_ties, trim=True)} of a layer's tokens, as under a saturated "
        "softmax, and which expert these get depends on the kernel."
    )


def _cause_and_action(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    """Return how severe the effect is, with a note on fragile choices, and what to do."""
    cause, action = ADVICE_WRITERS[recommendation.action](serving, recommendation)
    return " ".join(filter(None, (cause, fragile_sentence(serving)))), action


def _harmless_advice(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    """Advise doing nothing, unless runs must choose the same experts."""
    limit = f"{recommendation.limit:g} nats"
    small = f"That is harmless (below {limit})."
    if not recommendation.is_sure:
        small = f"That is small, though too few tokens to be sure that it is below {limit}."
    return small, (
        "nothing, unless runs must choose the same experts exactly; then replay the routes with "
        f"`tieline.replay`{_replay_price(serving)}."
    )


def _repair_advice(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    """Advise replay or smoothing, since changed experts do the damage."""
    share = serving.by_routing
    cause = "" if share is None else f"Changed experts are behind {percent(min(1.0, share))} of it."
    return f"{cause}{_uncertainty_note(recommendation)}".strip(), (
        f"{REPLAY_ACTION}{_replay_price(serving)}; where independent runs must agree, compare "
        "smoothing with a finer precision (`tieline audit`)."
    )


def _finer_precision_advice(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    """Advise a finer precision, since changed experts do little of the damage."""
    share = percent(max(0.0, serving.by_routing or 0.0))
    cause = f"Changed experts are behind only {share} of it.{_uncertainty_note(recommendation)}"
    action = "serve in a finer precision where that matters; repairing the routing hardly helps."
    return cause, action


def _unknown_cause_advice(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    """Advise an audit, since the share of the damage by changed experts was not measured."""
    return "How much of that is due to changed experts was not measured.", (
        f"`tieline audit --serve {serving.precision}` tells whether to replay the routes or to "
        "serve in a finer precision."
    )


def _broken_router_advice(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    """Advise mending the router, since all its scores are equal."""
    labels = list(layer_labels(serving.equal_layers).values())
    where = f" in {list_with_commas(labels)}" if labels else ""
    return f"All scores are equal{where}: an untrained or broken router.", MEND_ROUTER_ACTION


def _no_ties_advice(serving: Serving, recommendation: Recommendation) -> tuple[str, str]:
    """Advise nothing about routing, since all experts are chosen."""
    return "All experts are chosen: no tie is possible.", "nothing about routing."


ADVICE_WRITERS = {
    "nothing": _harmless_advice,
    "repair routing": _repair_advice,
    "finer precision": _finer_precision_advice,
    "unknown cause": _unknown_cause_advice,
    "mend router": _broken_router_advice,
    "no ties": _no_ties_advice,
}
"""Function that returns (cause, what to do), by recommended action."""


def _uncertainty_note(recommendation: Recommendation) -> str:
    """State that more tokens would make the advice sure; empty if it is."""
    return "" if recommendation.is_sure else " More tokens would make this sure."


def _replay_price(serving: Serving) -> str:
    """Return the KL that remains under replay and its bytes per token, in parentheses."""
    if serving.replayed.value is None:
        return ""
    remaining = f"leaves {decimal(serving.replayed.value)} nats"
    size = f", {serving.replay_bytes:,} bytes a token" if serving.replay_bytes else ""
    return f" ({remaining}{size})"


def _changed_share_text(serving: Serving) -> str:
    """Return the share of tokens that change an expert, with its 95 % interval."""
    value = percent(serving.changed.value, trim=True)
    low, high = mean_limits(serving.changed, serving.sequences, positive=True)
    if not math.isfinite(high):
        return value
    interval = f"{percent(low, trim=True)} to {percent(min(1.0, high), trim=True)}"
    return f"{value} (95 % interval {interval})"


def loss_change_text(loss: Estimate, sequences: int) -> str:
    """Write a change of the loss with its 95 % interval: "+0.00077 (-0.00003 to +0.00157)"."""
    if loss.value is None:
        return DASH
    low, high = mean_limits(loss, sequences)
    value = f"{loss.value:+.5f}"
    return value if not math.isfinite(high) else f"{value} ({low:+.5f} to {high:+.5f})"


def _served_kl_text(kl: Estimate, sequences: int) -> str:
    """Return the KL per token with its 95 % interval."""
    if kl.value is None:
        return "an unknown number of nats"
    low, high = mean_limits(kl, sequences, positive=True)
    value = f"{decimal(kl.value)} nats"
    return value if not math.isfinite(high) else f"{value} ({decimal(low)} to {decimal(high)})"
