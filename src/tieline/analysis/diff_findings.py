"""What a comparison shows beside its causes, as observations: the data of its findings."""

from collections.abc import Sequence

from tieline.analysis.diff_records import Alignment, Causes, LayerDiff, LogitsDiff, TokenDiff
from tieline.analysis.findings import SEVERITIES
from tieline.analysis.inspection import Observation, Severity

UNRELATED = 0.1
"""Agreement beyond chance below which a pair of layers counts as unrelated."""
COMPOUNDING = 2.0
"""Flip rate after an earlier flip over that of other tokens from which flips compound."""


def observe(
    alignment: Alignment,
    layers: Sequence[LayerDiff],
    tokens: TokenDiff,
    logits: LogitsDiff | None,
    causes: Causes,
) -> tuple[Observation, ...]:
    """Return everything worth knowing about a comparison, most severe first."""
    observations = [
        Observation("alignment", "warning", 1.0, source=difference)
        for difference in alignment.differences
    ]
    observations += _causes(causes)
    observations += _unexplained(layers, causes)
    observations += _not_attributed(layers)
    observations += _unrelated(alignment)
    fresh, after = tokens.later_rates
    if after and after >= COMPOUNDING * fresh:
        observations.append(Observation("compounding", "info", after))
    if logits is not None:
        observations += _distances(logits)
    if alignment.smoothed:
        observations.append(Observation("smoothed", "info", 1.0))
    if any(layer.flip.status != "ok" for layer in layers):
        observations.append(Observation("interval", "info", 1.0))
    return tuple(sorted(observations, key=lambda x: SEVERITIES[x.severity]))


def _causes(causes: Causes) -> list[Observation]:
    """The patterns that the alignment does not state already, and the doubts about the noise."""
    observations = [
        Observation(f"{x.kind}:pattern", "warning", x.effect, x.layer)
        for x in causes.patterns
        if x.kind not in ("lag", "permutation") or (x.layer is not None and x.kind == "lag")
    ]
    if causes.choice.answer == "no":
        observations.append(Observation("choice", "warning", 1.0))
    levels: dict[str, Severity] = {"no": "warning", "cannot tell": "notice", "yes": "info"}
    if causes.size.kind != "no scores":
        severity = levels[causes.size.answer] if causes.conclusion != "no flips" else "info"
        observations.append(Observation("noise", severity, 1.0))
    return observations


def _unexplained(layers: Sequence[LayerDiff], causes: Causes) -> list[Observation]:
    """First flips that noise does not explain; `layer` is the one with the widest of them."""
    odd = {x.name: x.attribution for x in layers if x.attribution and x.attribution.unexplained}
    if not odd:
        return []
    count = sum(attribution.unexplained for attribution in odd.values())
    widest = max(odd, key=lambda name: odd[name].unexplained_tokens[0][2])
    severity: Severity = "warning" if causes.flips.answer == "no" else "notice"
    return [Observation("unexplained", severity, float(count), widest, tuple(odd))]


def _not_attributed(layers: Sequence[LayerDiff]) -> list[Observation]:
    counts: dict[str, int] = {}
    for layer in layers:
        if layer.attribution is None and layer.flip.count:
            status = layer.attribution_status
            counts[status] = counts.get(status, 0) + layer.flip.count
    return [
        Observation("attribution", "notice", float(count), source=status)
        for status, count in counts.items()
    ]


def _unrelated(alignment: Alignment) -> list[Observation]:
    return [
        Observation("unrelated", "warning", pair.agreement, pair.name_a)
        for pair in alignment.pairs
        if pair.chance < 1 and pair.agreement - pair.chance < UNRELATED * (1 - pair.chance)
    ]


def _distances(logits: LogitsDiff) -> list[Observation]:
    observations = [Observation("kl", "info", logits.kl)]
    if logits.kl_flipped is not None and logits.kl_unflipped:
        ratio = logits.kl_flipped / logits.kl_unflipped
        observations.append(Observation("kl:flipped", "info", ratio))
    return observations
