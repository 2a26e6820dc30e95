r"""Two runs on the same tokens: where they choose other experts, and whether ties explain it.

A token flips in a layer if its sets of chosen experts differ: S_A ≠ S_B. Its margin on side A is
the distance of the scores of A that must have changed places,

    margin_A = max_{i in S_A \ S_B} z_i - min_{j in S_B \ S_A} z_j >= z_[k] - z_[k+1],

on side B likewise, and its margin is the larger of the two. An expert j whose score A did not keep
lies below the last one kept, which bounds the margin from below. Where routing is limited to
groups, the gap of the layer (including that between groups) takes the place of the margin.

The noise of a layer is the median of |z_B - z_A| over the experts that both kept, of unflipped
tokens only, so that no flip widens the band that judges it. A flip is inside the tie band if its
margin is at most 6 times the noise, about 4 standard deviations of Gaussian noise, which puts only
0.4 % of its flips beyond. Wider margins are not explained by ties.

compare      align B with A and compare them layer by layer
token_diff   flips over all layers: first divergent layer, compounding
summed_up    the `RoutingDiff` with its verdict, findings and metrics
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.analysis.alignment import Aligned, align
from tieline.analysis.diff_records import (
    Alignment,
    Attribution,
    DepthStep,
    LayerDiff,
    LogitsDiff,
    RoutingDiff,
    TokenDiff,
    WeightMoved,
)
from tieline.analysis.inspection import Finding, Severity
from tieline.core.numerics import float_step
from tieline.core.ranking import n_changed
from tieline.core.statistics import clustered_share
from tieline.trace.ops import take_tokens
from tieline.trace.record import LayerTrace, RoutingTrace

BAND = 6.0
"""Width of the tie band over the noise of the scores."""
ROWS = 16384
"""Tokens at a time whose scores are spread over all experts."""
MOST_NAMED = 20
"""Unexplained flips that are listed one by one."""
NO_NOISE = "not attributable: every token changes experts, so the noise of the scores is unknown"
UNRELATED = 0.1
"""Agreement beyond chance below which a pair of layers counts as unrelated."""
ORDER = ("warning", "notice", "info")
UNEXPLAINED = ("unexplained", "unexplained_first")


class NoiseBand(NamedTuple):
    """Median absolute difference of the scores of unflipped tokens, and the tie band."""

    noise: float
    band: float


def set_flips(a: LayerTrace, b: LayerTrace) -> tuple[Bool[Tensor, " tokens"], float | None]:
    """Return the tokens whose sets differ, and the mean number of experts that differ in them."""
    k = a.facts.k
    changed = n_changed(a.experts[:, :k], b.experts[:, :k])
    flipped = changed > 0
    return flipped, changed[flipped].double().mean().item() if bool(flipped.any()) else None


def weight_moved(
    a: LayerTrace, b: LayerTrace, flipped: Bool[Tensor, " tokens"]
) -> WeightMoved | None:
    """½ Σ_e |w_A(e) - w_B(e)| per token, weights of each token summing to one; None without them.

    Zero if both combine the same experts alike, one if they have no expert in common.
    """
    if a.weights is None or b.weights is None or len(flipped) == 0:
        return None
    k, (of_a, of_b) = a.facts.k, (_normalised(x) for x in (a.weights, b.weights))
    same = a.experts[:, :k, None] == b.experts[:, None, :k]
    shared = (same * of_b[:, None, :]).sum(2)
    entering = (of_b * ~same.any(1)).sum(1)
    moved = ((of_a - shared).abs().sum(1) + entering) / 2
    of_flipped = moved[flipped].mean().item() if bool(flipped.any()) else None
    p99 = float(np.quantile(moved.numpy(), 0.99, method="inverted_cdf"))
    return WeightMoved(moved.mean().item(), p99, moved.max().item(), of_flipped)


def noise_band(a: LayerTrace, b: LayerTrace, flipped: Bool[Tensor, " tokens"]) -> NoiseBand | None:
    """Return the noise of the scores and the tie band; None if there is no unflipped token.

    The band is at least six floating-point steps of the scores wide, because their last digit is
    noise too.
    """
    differences = []
    for rows in (~flipped).nonzero().squeeze(1).split(ROWS):
        differences.append(_differences(take_tokens(a, rows), take_tokens(b, rows)))
    known = np.concatenate([np.zeros(0), *differences])
    if len(known) == 0:
        return None
    noise = float(np.median(known))
    return NoiseBand(noise, BAND * max(noise, _step(a), _step(b)))


def flip_margins(a: LayerTrace, b: LayerTrace) -> Float[Tensor, " tokens"]:
    """Margin of every token, all of which must have flipped, in float64."""
    if a.facts.n_groups > 1:
        return torch.maximum(a.gap, b.gap)
    return torch.maximum(_margin(a, b), _margin(b, a))


def _margin(here: LayerTrace, there: LayerTrace) -> Tensor:
    """Distance, in the scores of one side, of the experts that changed places."""
    k, scores = here.facts.k, _scores(here)
    own, other = here.experts[:, :k], there.experts[:, :k]
    leaving = ~(own[:, :, None] == other[:, None, :]).any(2)
    entering = ~(other[:, :, None] == own[:, None, :]).any(2)
    highest = scores[:, :k].masked_fill(~leaving, -torch.inf).amax(1)
    kept = other[:, :, None] == here.experts[:, None, k:]
    found = (kept * scores[:, None, k:].nan_to_num(neginf=0.0)).sum(2)
    found = torch.where(kept.any(2), found, scores[:, -1:])
    return highest - found.masked_fill(~entering, torch.inf).amin(1)


def _differences(a: LayerTrace, b: LayerTrace) -> np.ndarray:
    """|z_B - z_A| of every expert that both sides kept."""
    spread = torch.full((len(b.experts), b.facts.n_experts), torch.nan, dtype=torch.float64)
    spread.scatter_(1, b.experts, _scores(b))
    difference = (spread.gather(1, a.experts) - _scores(a)).abs()
    return difference[difference.isfinite()].numpy()


def _step(layer: LayerTrace) -> float:
    """Spacing of float32 (or of the scores' own coarser type) at the median threshold."""
    scores, k = _scores(layer), layer.facts.k
    assert layer.scores is not None
    middle = scores[:, k - 1].abs().median().reshape(1)
    eps = max(torch.finfo(layer.scores.dtype).eps, torch.finfo(torch.float32).eps)
    return float_step(middle, round(-np.log2(eps)), -126).item()


def _scores(layer: LayerTrace) -> Tensor:
    assert layer.scores is not None
    return layer.scores.double()


def _normalised(weights: Tensor) -> Tensor:
    """Weights that sum to one; equal ones where all have underflowed."""
    total = weights.double().sum(1, keepdim=True)
    return torch.where(total == 0, 1.0 / weights.shape[1], weights.double() / total)


def attribution_status(a: LayerTrace, b: LayerTrace) -> str:
    """Return "ok", or why the flips of a layer cannot be attributed."""
    sides = (("A", a), ("B", b))
    for side, layer in sides:
        if layer.scores is None:
            return f"not attributable: {side} has expert ids only, no scores"
        if not layer.has_gaps:
            return f"not attributable: {side} has the scores of chosen experts only"
    grouped = [side for side, layer in sides if layer.facts.n_groups > 1]
    if len(grouped) == 1:
        return f"not attributable: only {grouped[0]} routes within groups"
    if a.facts.units != b.facts.units:
        return f"not attributable: scores of A are {a.facts.units}, those of B {b.facts.units}"
    return "ok"


def attribute(
    a: LayerTrace,
    b: LayerTrace,
    flipped: Bool[Tensor, " tokens"],
    before: Bool[Tensor, " tokens"],
    keys: tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]],
) -> tuple[Attribution | None, str]:
    """Attribute a layer's flips to near-ties or not; None and the reason if that is impossible.

    Args:
        a: the layer in A.
        b: the same tokens in B, experts numbered as in A.
        flipped: which tokens flip.
        before: which tokens flipped in an earlier layer.
        keys: document and position of each token in A.
    """
    status = attribution_status(a, b)
    if status != "ok":
        return None, status
    found = noise_band(a, b, flipped)
    if found is None:
        return None, NO_NOISE
    rows = flipped.nonzero().squeeze(1)
    margins = flip_margins(take_tokens(a, rows), take_tokens(b, rows))
    outside = margins > found.band
    places, widths = rows[outside], margins[outside]
    order = widths.argsort(descending=True, stable=True)[:MOST_NAMED]
    named = zip(*(key[places[order]].tolist() for key in keys), widths[order].tolist(), strict=True)
    return Attribution(
        noise=found.noise,
        band=found.band,
        inside=int((~outside).sum()),
        unexplained=int(outside.sum()),
        unexplained_first=int((~before[places]).sum()),
        widest=margins.max().item() if len(margins) else None,
        unexplained_tokens=tuple(named),
    ), "ok"


def flipped_before(flips: Bool[Tensor, "layers tokens"]) -> Bool[Tensor, "layers tokens"]:
    """Whether each token has flipped before each layer."""
    so_far = flips.int().cumsum(0) > 0
    return torch.cat((torch.zeros_like(so_far[:1]), so_far[:-1]))


def token_diff(
    flips: Bool[Tensor, "layers tokens"], documents: Int[Tensor, " tokens"], names: list[str]
) -> TokenDiff:
    """Summarise tokens over all layers: flips anywhere, first divergent layer, compounding.

    A token that has flipped enters the next layers with another residual stream and flips more
    readily there; `fresh` and `after` are the two rates, `independent` what the cumulative share
    would be without that.

    Args:
        flips: which tokens flip in which layer, in order of depth.
        documents: document of each token.
        names: names of the layers.
    """
    anywhere, before = flips.any(0), flipped_before(flips)
    rates = flips.double().mean(1)
    independent = 1 - (1 - rates).cumprod(0)
    steps = []
    for layer, name in enumerate(names):
        here, earlier = flips[layer], before[layer]
        steps.append(
            DepthStep(
                name=name,
                first=int((here & ~earlier).sum()),
                cumulative=(here | earlier).double().mean().item(),
                independent=independent[layer].item(),
                fresh=clustered_share(here[~earlier], documents[~earlier]),
                after=clustered_share(here[earlier], documents[earlier]),
            )
        )
    return TokenDiff(
        anywhere=clustered_share(anywhere, documents),
        choices=rates.mean().item(),
        never=int((~anywhere).sum()),
        mean_flips=flips.double().sum(0).mean().item(),
        depth=tuple(steps),
    )


def verdict(alignment: Alignment, layers: Sequence[LayerDiff], tokens: TokenDiff) -> str:
    """Whether the two route alike and, if not, whether near-ties explain it."""
    count, total = sum(x.flip.count for x in layers), alignment.tokens * len(layers)
    size = f"{alignment.tokens:,} tokens in {len(layers)} layers"
    odd = " once aligned" if alignment.notes else ""
    if count == 0:
        return f"A and B choose the same experts for all {size}{odd}. What to do: nothing."
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
        why = layers[0].attribution_status.removeprefix("not attributable: ")
        return (
            f"The cause is not attributable: {why}. What to do: capture both runs with scores and "
            "compare them again."
        )
    unexplained = sum(found.unexplained for found in known)
    rest = f" {len(blind)} layers are not attributable." if blind else ""
    if unexplained == 0:
        return (
            f"Every flip is a near-tie that the noise of the scores explains.{rest} What to do: "
            "replay the routes of A in B where they must agree, or remove the ties with "
            "`tieline smooth`."
        )
    fresh = sum(found.unexplained_first for found in known)
    later = unexplained - fresh
    follow = f" ({later:,} of them in tokens that had flipped before)" if later else ""
    return (
        f"{unexplained:,} of {count:,} flips are not explained by the margin{follow}.{rest} What "
        "to do: look for a bug, or for noise of another kind, in the layers and tokens named below."
    )


def findings(
    alignment: Alignment,
    layers: Sequence[LayerDiff],
    tokens: TokenDiff,
    logits: LogitsDiff | None,
) -> tuple[Finding, ...]:
    """One sentence for everything worth knowing, most severe first."""
    found = [Finding("warning", note, 1.0, None, "alignment") for note in alignment.notes]
    found += _unexplained(layers)
    found += _not_attributed(layers)
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


def _unexplained(layers: Sequence[LayerDiff]) -> list[Finding]:
    """One sentence about the flips that near-ties do not explain, with the widest of all layers."""
    odd = [(x, x.attribution) for x in layers if x.attribution and x.attribution.unexplained]
    if not odd:
        return []
    count, first = (sum(getattr(why, name) for _, why in odd) for name in UNEXPLAINED)
    worst, why = max(odd, key=lambda pair: pair[1].unexplained_tokens[0][2] / pair[1].band)
    document, position, margin = why.unexplained_tokens[0]
    text = (
        f"{count:,} flips in {len(odd)} layers are not explained by the margin ({first:,} in "
        f"tokens without an earlier flip): the widest for its tie band of {why.band:.3g}, at "
        f"document {document}, position {position}, has a margin of {margin:.3g}"
    )
    severity: Severity = "warning" if first else "notice"
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


class Compared:
    """The layers of two aligned runs, and which tokens flip in which."""

    def __init__(self, aligned: Aligned) -> None:
        """Compare every pair of layers, one at a time."""
        self.aligned = aligned
        places = aligned.places.in_a
        self.documents = aligned.a.documents[places].long()
        self.positions = aligned.a.positions[places].long()
        self._earlier = torch.zeros(len(places), dtype=torch.bool)
        flips, self.layers = [], []
        for index in range(len(aligned.alignment.pairs)):
            flipped, layer = self._layer(*aligned.pair(index))
            flips.append(flipped)
            self.layers.append(layer)
        self.flips = torch.stack(flips)
        self.tokens = token_diff(self.flips, self.documents, [x.name for x in self.layers])

    def _layer(self, a: LayerTrace, b: LayerTrace) -> tuple[torch.Tensor, LayerDiff]:
        flipped, changed = set_flips(a, b)
        weight = weight_moved(a, b, flipped)
        keys = self.documents, self.positions
        attribution, status = attribute(a, b, flipped, self._earlier, keys)
        self._earlier = self._earlier | flipped
        return flipped, LayerDiff(
            name=a.name,
            name_b=b.name,
            n_experts=a.facts.n_experts,
            k=a.facts.k,
            flip=clustered_share(flipped, self.documents),
            changed=changed,
            weight=weight,
            weight_status="ok" if weight else "not answerable: one side has no combine weights",
            attribution=attribution,
            attribution_status=status,
        )


def compare(a: RoutingTrace, b: RoutingTrace, *, partial: bool = False) -> Compared:
    """Align B with A and compare them layer by layer."""
    return Compared(align(a, b, partial=partial))


def summed_up(found: Compared, logits: LogitsDiff | None, timings: dict[str, float]) -> RoutingDiff:
    """Return the result with its verdict, findings and metrics.

    Args:
        found: the layers compared.
        logits: how far the final distributions are apart, if models were run.
        timings: seconds per stage.
    """
    layers, alignment = tuple(found.layers), found.aligned.alignment
    aligned = found.aligned
    return RoutingDiff(
        verdict=verdict(alignment, layers, found.tokens),
        findings=findings(alignment, layers, found.tokens, logits),
        metrics=metrics(layers, found.tokens, logits),
        alignment=alignment,
        layers=layers,
        tokens=found.tokens,
        logits=logits,
        provenance={"a": aligned.a.provenance, "b": aligned.b.provenance},
        timings=timings,
        traces=(aligned.a, aligned.b),
    )
