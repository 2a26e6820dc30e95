"""A comparison in words: the verdict and the findings.

verdict     whether two runs route alike and, if not, whether ties explain it
findings    one sentence for everything worth knowing, most severe first
"""

from collections.abc import Sequence

from tieline.analysis.diff_records import Alignment, Causes, LayerDiff, LogitsDiff, TokenDiff
from tieline.analysis.inspection import Finding, Severity

UNRELATED = 0.1
"""Agreement beyond chance below which a pair of layers counts as unrelated."""
ORDER = ("warning", "notice", "info")
NEAR_TIES = (
    "What to do: replay the routes of A in B where they must agree; `tieline audit` compares the "
    "remedies."
)
CAPTURE = "What to do: capture both runs with scores and compare them again."


def verdict(
    alignment: Alignment, layers: Sequence[LayerDiff], tokens: TokenDiff, causes: Causes
) -> str:
    """Whether the two route alike and, if not, whether ties explain it."""
    count, total = sum(x.flip.count for x in layers), alignment.tokens * len(layers)
    size = f"{alignment.tokens:,} tokens in {len(layers)} layers"
    odd = " once aligned" if alignment.notes else ""
    if count == 0:
        first = f"A and B choose the same experts for all {size}{odd}."
    else:
        worst = max(layers, key=lambda layer: layer.flip.value or 0.0)
        first = (
            f"A and B choose other experts in {_share(count / total)} of the choices of {size}"
            f"{odd} (worst layer: {_share(worst.flip.value)}); {_share(tokens.anywhere.value)} of "
            "the tokens differ somewhere."
        )
    return f"{first} {_cause(causes)}"


def _cause(causes: Causes) -> str:
    """The conclusion with its reason, and what to do."""
    if causes.conclusion == "no flips":
        return "What to do: nothing."
    if causes.conclusion == "explained by ties":
        size = (
            causes.size.text if causes.expected is None else f"{causes.expected} explains its size"
        )
        return (
            f"Explained by ties: {causes.flips.text}, and the noise has no pattern; {size}. "
            f"{NEAR_TIES}"
        )
    if causes.conclusion == "cannot tell":
        return f"Cannot tell whether ties explain that: {causes.flips.text}. {CAPTURE}"
    if causes.conclusion == "choice against scores":
        return f"A router does not follow its scores: {causes.choice.text}."
    if causes.conclusion == "pattern":
        return f"Not ties alone, a pattern in the differences: {causes.shape.text}."
    if causes.conclusion == "noise larger than expected":
        return (
            f"Noise larger than {causes.expected} explains: {causes.size.text}. What to do: look "
            "for another precision, other weights or a bug, in the first layer named below."
        )
    return (
        f"Not ties alone: {causes.flips.text}. What to do: look for a bug in the layers and tokens "
        "named below."
    )


def findings(
    alignment: Alignment,
    layers: Sequence[LayerDiff],
    tokens: TokenDiff,
    logits: LogitsDiff | None,
    causes: Causes,
) -> tuple[Finding, ...]:
    """One sentence for everything worth knowing, most severe first."""
    found = [Finding("warning", note, 1.0, None, "alignment") for note in alignment.notes]
    found += _causes(causes)
    found += _unexplained(layers, causes)
    found += _not_attributed(layers)
    found += _unrelated(alignment)
    found += _of_depth(tokens)
    if logits is not None:
        text = f"the final distributions are {logits.kl:.3g} nats apart per token (KL of A and B)"
        found.append(Finding("info", text, logits.kl, None, "kl"))
        found += _cost(logits)
    if alignment.smoothed:
        are = "A and B are" if len(alignment.smoothed) == 2 else f"{alignment.smoothed[0]} is"
        text = (
            f"{are} smoothed: compared are the k experts that top-k would choose, and where two of "
            "them change places the weights do not jump"
        )
        found.append(Finding("info", text, 1.0, None, "smoothed"))
    if any(layer.flip.status != "ok" for layer in layers):
        text = "there are fewer than 4 documents: intervals are clustered by stretches of text"
        found.append(Finding("info", text, 1.0, None, "interval"))
    return tuple(sorted(found, key=lambda finding: ORDER.index(finding.severity)))


def _causes(causes: Causes) -> list[Finding]:
    """The patterns, and the answers about choice and size."""
    found = [
        Finding("warning", x.text, x.effect, x.layer, x.kind)
        for x in causes.patterns
        if x.kind not in ("lag", "permutation") or (x.layer is not None and x.kind == "lag")
    ]
    if causes.choice.answer == "no":
        found.append(Finding("warning", causes.choice.text, 1.0, None, "choice"))
    levels: dict[str, Severity] = {"no": "warning", "cannot tell": "notice", "yes": "info"}
    size = causes.size
    if not size.text.startswith("the scores of both sides are needed"):
        severity = levels[size.answer] if causes.conclusion != "no flips" else "info"
        found.append(Finding(severity, size.text, 1.0, None, "noise"))
    return found


def _unexplained(layers: Sequence[LayerDiff], causes: Causes) -> list[Finding]:
    """One sentence about the flips that noise does not explain, with the widest of all layers."""
    odd = [(x, x.attribution) for x in layers if x.attribution and x.attribution.unexplained]
    if not odd:
        return []
    count = sum(why.unexplained for _, why in odd)
    worst, why = max(odd, key=lambda pair: pair[1].unexplained_tokens[0][2])
    document, position, margin = why.unexplained_tokens[0]
    text = (
        f"{count:,} first flips in {len(odd)} layers are wider than the noise of their own token: "
        f"the widest, at document {document}, position {position}, crosses {margin:.3g} where the "
        f"noise of the layer is {why.noise:.2g}"
    )
    severity: Severity = "warning" if causes.flips.answer == "no" else "notice"
    return [Finding(severity, text, float(count), worst.name, "unexplained")]


def _not_attributed(layers: Sequence[LayerDiff]) -> list[Finding]:
    counts: dict[str, int] = {}
    for layer in layers:
        if layer.attribution is None and layer.flip.count:
            status = layer.attribution_status
            counts[status] = counts.get(status, 0) + layer.flip.count
    return [
        Finding("notice", f"{count:,} flips are {status}", float(count), None, "attribution")
        for status, count in counts.items()
    ]


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
    """Whether tokens that have flipped flip more often, over all layers but the first."""
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


def _share(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.2g} %"
