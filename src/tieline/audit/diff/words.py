"""What a comparison says, in plain words and in named numbers."""

from collections.abc import Sequence

from tieline.audit.diff.records import Alignment, LayerDiff, LogitsDiff, TokenDiff
from tieline.audit.records import Finding, Severity

__all__ = ["findings", "metrics", "verdict"]

UNRELATED = 0.1
"""Agreement beyond chance below which a pair of layers is called unrelated."""
ORDER = ("warning", "notice", "info")


def verdict(alignment: Alignment, layers: Sequence[LayerDiff], tokens: TokenDiff) -> str:
    """Whether the two route alike and, if not, whether near-ties explain it."""
    count, total = sum(x.flip.count for x in layers), alignment.tokens * len(layers)
    size = f"{alignment.tokens:,} tokens in {len(layers)} layers"
    odd = " once laid on each other" if alignment.notes else ""
    if count == 0:
        return f"A and B choose the same experts for all {size}{odd}."
    worst = max(layers, key=lambda layer: layer.flip.value or 0.0)
    first = (
        f"A and B choose other experts in {_share(count / total)} of the choices of {size}{odd} "
        f"(worst layer: {_share(worst.flip.value)}); {_share(tokens.anywhere.value)} of the tokens "
        "differ somewhere."
    )
    return f"{first} {_cause(layers, count)}"


def _cause(layers: Sequence[LayerDiff], count: int) -> str:
    known = [layer.attribution for layer in layers if layer.attribution is not None]
    blind = [layer for layer in layers if layer.attribution is None and layer.flip.count]
    if not known:
        return f"Why is {layers[0].attribution_status}."
    unexplained = sum(found.unexplained for found in known)
    rest = f" {len(blind)} layers are not attributable." if blind else ""
    if unexplained == 0:
        return f"Every flip is a near-tie that the noise of the scores explains.{rest}"
    fresh = sum(found.unexplained_first for found in known)
    later = unexplained - fresh
    follow = f" ({later:,} of them in tokens that had flipped before)" if later else ""
    return (
        f"{unexplained:,} of {count:,} flips are not explained by the margin{follow}: look for a "
        f"bug, or for noise of another kind.{rest}"
    )


def findings(
    alignment: Alignment,
    layers: Sequence[LayerDiff],
    tokens: TokenDiff,
    logits: LogitsDiff | None,
) -> tuple[Finding, ...]:
    """One sentence for everything worth knowing, the gravest first."""
    found = [Finding("warning", note, 1.0, None, "alignment") for note in alignment.notes]
    found += [x for layer in layers for x in _of_layer(layer)]
    found += _unrelated(alignment)
    found += _of_depth(tokens)
    if logits is not None:
        text = f"the final distributions are {logits.kl:.3g} nats apart per token (KL of A and B)"
        found.append(Finding("info", text, logits.kl, None, "kl"))
        found += _cost(logits)
    if any(layer.flip.status != "ok" for layer in layers):
        text = "there is one document only, so that intervals assume independent tokens"
        found.append(Finding("info", text, 1.0, None, "interval"))
    return tuple(sorted(found, key=lambda finding: ORDER.index(finding.severity)))


def _of_layer(layer: LayerDiff) -> list[Finding]:
    found: list[Finding] = []
    why = layer.attribution
    if why is not None and why.unexplained:
        kind: Severity = "warning" if why.unexplained_first else "notice"
        document, position, margin = why.unexplained_tokens[0]
        text = (
            f"{why.unexplained:,} of {layer.flip.count:,} flips are not explained by the margin "
            f"({why.unexplained_first:,} in tokens without an earlier flip): the widest, at "
            f"document {document}, position {position}, has a margin of {margin:.3g} and the tie "
            f"band is {why.band:.3g}"
        )
        found.append(Finding(kind, text, float(why.unexplained), layer.name, "unexplained"))
    if why is None and layer.flip.count:
        found.append(
            Finding(
                "notice",
                f"{layer.flip.count:,} flips are {layer.attribution_status}",
                float(layer.flip.count),
                layer.name,
                "attribution",
            )
        )
    return found


def _unrelated(alignment: Alignment) -> list[Finding]:
    found = []
    for pair in alignment.pairs:
        if pair.chance < 1 and pair.agreement - pair.chance < UNRELATED * (1 - pair.chance):
            text = (
                f"the two share {_share(pair.agreement)} of the chosen experts, and unrelated "
                f"routers would share {_share(pair.chance)}"
            )
            found.append(Finding("warning", text, pair.agreement, pair.name_a, "unrelated"))
    return found


def _of_depth(tokens: TokenDiff) -> list[Finding]:
    """Whether tokens that have flipped flip more readily, over all layers but the first."""
    fresh, after = (
        [getattr(step, name) for step in tokens.depth[1:]] for name in ("fresh", "after")
    )
    rates = [
        sum(rate.count for rate in kind) / max(sum(rate.total for rate in kind), 1)
        for kind in (fresh, after)
    ]
    if not sum(rate.count for rate in after) or rates[1] < 2 * rates[0]:
        return []
    text = (
        f"flips compound: a token that has flipped before flips in {_share(rates[1])} of the "
        f"layers that follow, others in {_share(rates[0])}"
    )
    return [Finding("info", text, rates[1], None, "compounding")]


def _cost(logits: LogitsDiff) -> list[Finding]:
    if logits.kl_flipped is None or not logits.kl_unflipped:
        return []
    ratio = logits.kl_flipped / logits.kl_unflipped
    text = f"tokens that flip somewhere are {ratio:.2g} times as far apart as the others"
    return [Finding("info", text, ratio, None, "kl")]


def metrics(
    layers: Sequence[LayerDiff], tokens: TokenDiff, logits: LogitsDiff | None
) -> dict[str, float]:
    """The named numbers of `RoutingDiff.metrics`."""
    rates = [layer.flip.value or 0.0 for layer in layers]
    named = {"flip": max(rates), "flip:mean": tokens.choices, "flip:any": tokens.anywhere.value}
    causes = [layer.attribution for layer in layers if layer.attribution is not None]
    if len(causes) == len(layers):
        total = max(layers[0].flip.total, 1)
        named["unexplained"] = max(cause.unexplained for cause in causes) / total
        named["unexplained:count"] = float(sum(cause.unexplained for cause in causes))
    moved = [layer.weight.mean for layer in layers if layer.weight is not None]
    if moved:
        named["weight"] = max(moved)
    if logits is not None:
        named |= {"kl": logits.kl, "k3": logits.k3}
    return {name: float(value) for name, value in named.items() if value is not None}


def _share(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2g} %"
