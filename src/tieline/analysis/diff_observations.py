"""Metrics and observations of a comparison of two runs."""

from collections.abc import Sequence

from tieline.analysis.alignment import RELATED_AGREEMENT
from tieline.analysis.diff_records import Alignment, Causes, LayerDiff, LogitsDiff, TokenDiff
from tieline.analysis.inspect_records import SEVERITIES, Observation, Severity

COMPOUNDING = 2.0
"""Least ratio, for compounding flips, of the flip rate after an earlier flip to that without."""


def diff_metrics(
    layers: Sequence[LayerDiff], tokens: TokenDiff, logits: LogitsDiff | None
) -> dict[str, float]:
    """Named numbers of a comparison, the `RoutingDiff.metrics`."""
    rates = [layer.flip.value or 0.0 for layer in layers]
    numbers = {"flip": max(rates), "flip:mean": tokens.choices, "flip:any": tokens.anywhere.value}
    causes = [layer.attribution for layer in layers if layer.attribution is not None]
    if len(causes) == len(layers):
        total = max(layers[0].flip.total, 1)
        numbers["unexplained"] = max(cause.unexplained for cause in causes) / total
        numbers["unexplained:count"] = float(sum(cause.unexplained for cause in causes))
    noise = [cause.relative for cause in causes if cause.relative]
    if noise:
        numbers["noise"] = noise[0]
    moved = [layer.weight.mean for layer in layers if layer.weight is not None]
    if moved:
        numbers["weight"] = max(moved)
    if logits is not None:
        numbers |= {"kl": logits.kl, "k3": logits.k3}
    return {name: float(value) for name, value in numbers.items() if value is not None}


def diff_observations(
    alignment: Alignment,
    layers: Sequence[LayerDiff],
    tokens: TokenDiff,
    logits: LogitsDiff | None,
    causes: Causes,
) -> tuple[Observation, ...]:
    """All observations about a comparison, most severe first."""
    observations = [
        Observation("alignment", "warning", 1.0, source=difference)
        for difference in alignment.differences
    ]
    observations += _cause_observations(causes)
    observations += _unexplained_flips(layers, causes)
    observations += _unattributed_flips(layers)
    observations += [
        Observation("unrelated", "warning", pair.agreement, pair.name_a)
        for pair in alignment.pairs
        if pair.chance < 1 and pair.agreement - pair.chance < RELATED_AGREEMENT * (1 - pair.chance)
    ]
    fresh_rate, later_rate = tokens.later_rates
    if later_rate and later_rate >= COMPOUNDING * fresh_rate:
        observations.append(Observation("compounding", "info", later_rate))
    if logits is not None:
        observations += _kl_observations(logits)
    if alignment.smoothed:
        observations.append(Observation("smoothed", "info", 1.0))
    if any(layer.flip.status != "ok" for layer in layers):
        observations.append(Observation("interval", "info", 1.0))
    return tuple(sorted(observations, key=lambda x: SEVERITIES[x.severity]))


def _cause_observations(causes: Causes) -> list[Observation]:
    """Observations on the causes: patterns that the alignment does not state, noise and outputs."""
    observations = [
        Observation(f"{x.kind}:pattern", "warning", x.effect, x.layer)
        for x in causes.patterns
        if x.kind not in ("lag", "permutation") or (x.layer is not None and x.kind == "lag")
    ]
    if causes.outputs is not None and causes.outputs.answer == "no":
        observations.append(Observation("outputs", "warning", causes.outputs.kl))
    if causes.choice.answer == "no":
        observations.append(Observation("choice", "warning", 1.0))
    levels: dict[str, Severity] = {"no": "warning", "cannot tell": "notice", "yes": "info"}
    if causes.size.kind != "no scores":
        severity = levels[causes.size.answer] if causes.conclusion != "no flips" else "info"
        observations.append(Observation("noise", severity, 1.0))
    return observations


def _unexplained_flips(layers: Sequence[LayerDiff], causes: Causes) -> list[Observation]:
    """Observation on unexplained first flips; its `layer` has the widest of them."""
    unexplained = {
        x.name: x.attribution for x in layers if x.attribution and x.attribution.unexplained
    }
    if not unexplained:
        return []
    count = sum(attribution.unexplained for attribution in unexplained.values())
    widest = max(unexplained, key=lambda name: unexplained[name].unexplained_tokens[0][2])
    severity: Severity = "warning" if causes.flips.answer == "no" else "notice"
    return [Observation("unexplained", severity, float(count), widest, tuple(unexplained))]


def _unattributed_flips(layers: Sequence[LayerDiff]) -> list[Observation]:
    """Observations on flips in layers that cannot be attributed, one for each reason."""
    counts: dict[str, int] = {}
    for layer in layers:
        if layer.attribution is None and layer.flip.count:
            status = layer.attribution_status
            counts[status] = counts.get(status, 0) + layer.flip.count
    return [
        Observation("attribution", "notice", float(count), source=status)
        for status, count in counts.items()
    ]


def _kl_observations(logits: LogitsDiff) -> list[Observation]:
    """Observations on the KL of the predictions, and its ratio of tokens with to without a flip."""
    observations = [Observation("kl", "info", logits.kl)]
    if logits.kl_flipped is not None and logits.kl_unflipped:
        ratio = logits.kl_flipped / logits.kl_unflipped
        observations.append(Observation("kl:flipped", "info", ratio))
    return observations
