"""What softening a model comes to, in sentences."""

from tieline.core.statistics import Estimate
from tieline.lab.on_model.soften_records import Softening, SoftLayer, SoftLevel

TELLING = 0.2
"""Largest error of a ratio that is worth a sentence."""


def soften_words(softening: Softening) -> tuple[str, ...]:
    """Whether softening would help or hurt, by how much, and which tokens decide it."""
    sentences = [_verdict(softening), _best(softening)]
    decided = [layer for layer in softening.layers if layer.deciding]
    if decided:
        sentences.append(_tokens(decided))
        sentences.append(_agreement(softening))
    return tuple(sentences)


def direction(slope: Estimate) -> str:
    """Return "help" or "hurt" if the slope is below or above zero by two errors, else "tell"."""
    value, error = slope.value, slope.standard_error
    if value is None or error is None or abs(value) <= 2 * error:
        return "tell"
    return "help" if value < 0 else "hurt"


def _verdict(softening: Softening) -> str:
    first = softening.together[0]
    slope = softening.predicted if softening.predicted.value is not None else first.slope
    sentence = {
        "help": "A soft choice would help this model",
        "hurt": "A soft choice would hurt this model",
        "tell": "Whether a soft choice would help or hurt cannot be told from this sample",
    }[direction(slope)]
    change = f"{_signed(first.change)} nats per token at the first width"
    predicted = f", predicted {_signed(slope)}" if softening.predicted.value is not None else ""
    return f"{sentence}: all layers together change the loss by {change}{predicted}."


def _best(softening: Softening) -> str:
    best = min(softening.together, key=lambda level: level.change.value or 0.0)
    last = softening.together[-1]
    if direction(best.change) == "help":
        wider = f"at {last.width:g} times them it is {_signed(last.change)}"
        beyond = "the widest that was tried" if best is last else wider
        return (
            f"The loss is lowest at {best.width:g} times the first widths "
            f"({_signed(best.change)} nats per token); {beyond}. What to do: train or fine-tune "
            "with a soft choice of about that width, or smooth the model after training "
            "(`tieline smooth`)."
        )
    return (
        f"No width lowers the loss for sure; at {last.width:g} times the first widths it changes "
        f"by {_signed(last.change)} nats per token. What to do: keep the hard choice, or smooth "
        "only for stability."
    )


def _tokens(layers: list[SoftLayer]) -> str:
    tokens = [token for layer in layers for token in layer.deciding]
    first = max(tokens, key=lambda token: abs(token.effect))
    half, near = sum(x.half for x in layers), sum(x.near for x in layers)
    way = "gains" if first.effect < 0 else "loses"
    return (
        f"{half} of the {near} tokens nearest to a wall carry half of it; the first among them is "
        f"{first.text!r} (document {first.document}, position {first.position}), whose sequence "
        f"{way} {abs(first.effect):.2g} nats as expert {first.entering} shares the seat of "
        f"{first.leaving} in {first.layer}."
    )


def _agreement(softening: Softening) -> str:
    rows = [*(layer.levels for layer in softening.layers), softening.together]
    judged = [level.agrees for levels in rows for level in levels[:3] if level.missed is not None]
    sentence = (
        f"The slope predicted from the walls is within 15 % or 3 standard errors of the measured "
        f"one in {sum(map(bool, judged))} of {len(judged)} cases at the three smallest widths."
    )
    return " ".join([sentence, *_paired(softening.together[0])])


def _paired(first: SoftLevel) -> list[str]:
    """Measured and expected change of the same tokens, all layers together."""
    if first.ratio is None or first.ratio.value is None:
        return []
    error = first.ratio.standard_error
    if error is None or error > TELLING:
        return []
    shown = f"{first.ratio.value:.2f} ± {error:.1g}"
    return [
        f"On the tokens of this sample alone the loss changes by {shown} times what their "
        "gradients and curvatures give at the first width."
    ]


def _signed(estimate: Estimate) -> str:
    if estimate.value is None:
        return "an unknown amount"
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.1g}"
    return f"{estimate.value:+.2g}{error}"
