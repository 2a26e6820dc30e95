"""Two runs on the same tokens: where they choose other experts, layer by layer.

A token flips in a layer if its sets of chosen experts differ: S_A ≠ S_B. Each layer is read once:
its flips, the weight that moves, the noise of its scores (`score_noise`), the p-values of its first
flips and the shape of its noise (`noise_shapes`).

compare_runs      align B with A and compare them layer by layer
token_diff   flips over all layers: first divergent layer, compounding
diff_result    the `RoutingDiff` with its causes, observations and metrics
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tieline.analysis.alignment import Aligned, align
from tieline.analysis.attribution import (
    Expected,
    PredictionDistance,
    attribute_causes,
    noise_tolerance,
    recorded_format,
)
from tieline.analysis.diff_records import (
    Alignment,
    Attribution,
    Causes,
    DepthStep,
    LayerDiff,
    LogitsDiff,
    RoutingDiff,
    TokenDiff,
    WeightMoved,
)
from tieline.analysis.excess_over_sound_runs import (
    ComparedTokens,
    Excess,
    RunLayer,
    find_excess,
    on_score_grid,
)
from tieline.analysis.inspect_records import SEVERITIES, Observation, Severity
from tieline.analysis.job_settings import SERVED
from tieline.analysis.noise_shapes import NoiseShape, TokenKeys, flip_lag, measure_shape
from tieline.analysis.score_noise import (
    FALSE_DISCOVERIES,
    FlipTest,
    comparable,
    discoveries,
    expected_swaps,
    flip_test,
    gap_density,
    layer_noise,
    swap_margins,
    swap_uniformity,
    weight_evidence,
)
from tieline.analysis.served_precision import (
    Serving,
    advice_on_routers,
    equal_layers,
    exact_ties,
    recommend,
    replay_bytes,
    router_state,
)
from tieline.core.ranking import n_changed
from tieline.core.statistics import Estimate, clustered_error, clustered_share
from tieline.trace.document_runs import batch_rows, decoded_tokens
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.selection import select_tokens

FEWEST_RUNS = 3
"""Reference runs without which chance is unknown."""
MOST_NAMED = 20
"""Unexplained flips that are listed one by one."""


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
    (weights_a, experts_a), (weights_b, experts_b) = a.combined(), b.combined()
    of_a, of_b = _weights_summing_to_one(weights_a), _weights_summing_to_one(weights_b)
    same = experts_a[:, :, None] == experts_b[:, None, :]
    shared = (same * of_b[:, None, :]).sum(2)
    entering = (of_b * ~same.any(1)).sum(1)
    moved = ((of_a - shared).abs().sum(1) + entering) / 2
    of_flipped = moved[flipped].mean().item() if bool(flipped.any()) else None
    p99 = float(np.quantile(moved.numpy(), 0.99, method="inverted_cdf"))
    return WeightMoved(moved.mean().item(), p99, moved.max().item(), of_flipped)


def _weights_summing_to_one(weights: Tensor) -> Tensor:
    """Weights that sum to one; equal ones where all have underflowed."""
    total = weights.double().sum(1, keepdim=True)
    return torch.where(total == 0, 1.0 / weights.shape[1], weights.double() / total)


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
        flipped, flipped_earlier = flips[layer], before[layer]
        steps.append(
            DepthStep(
                name=name,
                first=int((flipped & ~flipped_earlier).sum()),
                cumulative=(flipped | flipped_earlier).double().mean().item(),
                independent=independent[layer].item(),
                fresh=clustered_share(flipped[~flipped_earlier], documents[~flipped_earlier]),
                after=clustered_share(flipped[flipped_earlier], documents[flipped_earlier]),
            )
        )
    return TokenDiff(
        anywhere=clustered_share(anywhere, documents),
        choices=rates.mean().item(),
        never=int((~anywhere).sum()),
        mean_flips=flips.double().sum(0).mean().item(),
        depth=tuple(steps),
    )


def diff_metrics(
    layers: Sequence[LayerDiff], tokens: TokenDiff, logits: LogitsDiff | None
) -> dict[str, float]:
    """The named numbers of `RoutingDiff.metrics`."""
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


class _LayerJudgement(NamedTuple):
    """The tested flips and the noise of one layer."""

    test: FlipTest
    noise: float
    relative: float | None
    later: int
    details: dict[str, Any]


class ComparedRuns:
    """The layers of two aligned runs, and which tokens flip in which.

    Attributes:
        aligned: how they were aligned.
        documents: document of each token.
        positions: its position there.
        flips: which tokens flip in which layer.
        layers: the layers compared.
        shapes: effects of the noise of each layer.
        run: level of the noise and flips of each token in each layer.
        excess: where B is further from A than the reference runs; None without at least two.
        near: for flips without scores of both sides, the share of tokens with a smaller gap.
        tokens: over all layers.
    """

    def __init__(
        self,
        aligned: Aligned,
        *,
        references: Sequence[Aligned] = (),
        tolerance: float = 0.0,
    ) -> None:
        """Compare every pair of layers, one at a time.

        Args:
            aligned: the two runs.
            references: sound runs, aligned with the side in float32.
            tolerance: logarithm of how much more noise than these B may have.
        """
        self.aligned = aligned
        tokens = aligned.common.in_a
        self.documents = aligned.a.documents[tokens].long()
        self.positions = aligned.a.positions[tokens].long()
        self._keys = TokenKeys(self.documents.numpy(), self.positions.numpy())
        self._earlier = np.zeros(len(tokens), dtype=bool)
        self._before: tuple[np.ndarray, np.ndarray] | None = None
        self.run: list[RunLayer] = []
        self.shapes: list[NoiseShape] = []
        self.near: list[np.ndarray] = []
        flips, layers, judged = [], [], []
        for index in range(len(aligned.alignment.pairs)):
            flipped, layer, judgement = self._compare_layer(index)
            flips.append(flipped)
            layers.append(layer)
            judged.append(judgement)
        self.flips = torch.stack(flips)
        self.layers = self._with_attributions(layers, judged)
        self.tokens = token_diff(self.flips, self.documents, [x.name for x in self.layers])
        self.excess: tuple[Excess, ...] | None = None
        runs = [x for y in references if len(x := run_layers(y, self._keys)) == len(layers)]
        if len(runs) >= FEWEST_RUNS:
            self.excess = self._excess_over_sound_runs(runs, tolerance)
        elif runs:
            self.shapes = _shapes_beyond_one_run(self.shapes, self.run, runs[0])

    def _excess_over_sound_runs(
        self, runs: Sequence[list[RunLayer]], tolerance: float
    ) -> tuple[Excess, ...]:
        """Where B exceeds the reference runs, on the tokens that these have."""
        rows = np.flatnonzero(np.all([run[0].flipped >= 0 for run in runs], axis=0))
        of_a = self.aligned.common.in_a[torch.from_numpy(rows)]
        numbers, layers = (i for i, _ in self.aligned.pairing.pairs), self.aligned.a.layers
        experts = [layers[i].experts[of_a].long().numpy() for i in numbers]
        ids = self.aligned.a.tokens
        tokens = ComparedTokens(
            self._keys.documents[rows],
            self._keys.positions[rows],
            None if ids is None else ids[of_a].numpy(),
            [x[:, : layer.k] for x, layer in zip(experts, self.layers, strict=True)],
            experts,
            *(None if x is None else x[rows] for x in self._run_groups()),
        )
        layers_at_tokens = [[x.at_tokens(rows) for x in run] for run in (self.run, *runs)]
        return find_excess(layers_at_tokens[0], layers_at_tokens[1:], tokens, tolerance)

    def _run_groups(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Row of its batch of each token of B, and whether it was decoded; None if unknown."""
        b, tokens = self.aligned.b, self.aligned.common.in_b
        return batch_rows(b, tokens), decoded_tokens(b, tokens)

    def _compare_layer(self, index: int) -> tuple[Tensor, LayerDiff, _LayerJudgement | None]:
        """Flips of a pair of layers, its record, and its tested flips if scores allow."""
        a, b = self.aligned.pair(index)
        flipped, changed = set_flips(a, b)
        weight = weight_moved(a, b, flipped)
        status = _unranked_status(self.aligned.unranked[index]) or comparable(a, b)
        judged = self._judge_layer(a, b, flipped.numpy(), status)
        self._earlier = self._earlier | flipped.numpy()
        return (
            flipped,
            LayerDiff(
                name=a.name,
                name_b=b.name,
                n_experts=a.facts.n_experts,
                k=a.facts.k,
                flip=clustered_share(flipped, self.documents),
                changed=changed,
                weight=weight,
                weight_status="ok" if weight else "not answerable: one side has no combine weights",
                attribution=None,
                attribution_status=status,
            ),
            judged,
        )

    def _judge_layer(
        self, a: LayerTrace, b: LayerTrace, flipped: np.ndarray, status: str
    ) -> _LayerJudgement | None:
        """Test the first flips of a layer and measure the shape of its noise."""
        chosen_a, chosen_b = (x.experts[:, : x.facts.k].numpy() for x in (a, b))
        lag = flip_lag(chosen_a, chosen_b, flipped, self._keys)
        fresh = ~self._earlier
        counts: dict[str, Any] = {"flips": float(flipped.mean()), "total": len(flipped)}
        if status != "ok":
            self.run.append(RunLayer.from_noise(None, flipped))
            self._before = None
            judgement = _judge_by_weights(a, b, flipped, fresh)
            relative = None if judgement is None else judgement.relative
            self.shapes.append(NoiseShape(a.name, relative, 0, lag=lag, **counts))
            if judgement is None:
                self.near += _share_nearer_than_flips(a, b, flipped & fresh)
            return judgement
        noise = layer_noise(a, b)
        bias = _bias_difference(a, b)
        shape = measure_shape(a.name, noise, fresh, self._keys, self._before, bias)
        counts["density"] = gap_density(a, noise.spread)
        self.shapes.append(shape._replace(lag=lag, **counts))
        self._before = (noise.level, chosen_a)
        self.run.append(RunLayer.from_noise(noise, flipped))
        test = flip_test(a, b, noise, flipped, fresh)
        later = int((flipped & ~fresh).sum())
        swaps = _swap_statistics(a, b, self._keys.documents)
        return _LayerJudgement(test, noise.size(fresh) or 0.0, noise.relative(fresh), later, swaps)

    def _with_attributions(
        self, layers: list[LayerDiff], judged: list[_LayerJudgement | None]
    ) -> list[LayerDiff]:
        """The layers with their attribution: false discoveries are controlled over all of them."""
        p_values = [x.test.p for x in judged if x is not None]
        rejected = discoveries(np.concatenate([np.zeros(0), *p_values]), FALSE_DISCOVERIES)
        by_layer = iter(np.split(rejected, np.cumsum([len(p) for p in p_values])))
        return [
            layer
            if x is None
            else replace(layer, attribution=self._layer_attribution(x, next(by_layer)))
            for layer, x in zip(layers, judged, strict=True)
        ]

    def _layer_attribution(self, judged: _LayerJudgement, unexplained: np.ndarray) -> Attribution:
        """First flips of a layer that its noise explains, and those that it does not."""
        test, count = judged.test, int(unexplained.sum())
        tokens, widths = test.tokens[unexplained], test.margins[unexplained]
        order = np.argsort(-widths, kind="stable")[:MOST_NAMED]
        keys = (self._keys.documents, self._keys.positions)
        widest_tokens = zip(
            *(key[tokens[order]].tolist() for key in keys), widths[order].tolist(), strict=True
        )
        explained = len(test.p) - count
        return Attribution(
            noise=judged.noise,
            unexplained=count,
            widest=float(test.margins.max()) if len(test.p) else None,
            unexplained_tokens=tuple(widest_tokens),
            explained=explained,
            later=judged.later,
            relative=judged.relative,
            smallest_p=float(test.p.min()) if len(test.p) else None,
            **judged.details,
        )


def _judge_by_weights(
    a: LayerTrace, b: LayerTrace, flipped: np.ndarray, fresh: np.ndarray
) -> _LayerJudgement | None:
    """The tested flips of a layer without scores; None where its weights do not tell."""
    evidence = weight_evidence(a, b, flipped, fresh)
    if evidence is None or not evidence.is_near:
        return None
    noise, later = evidence.noise, int((flipped & ~fresh).sum())
    movers = {"evidence": "weights", "last": evidence.last, "movers": evidence.movers}
    size, relative = noise.size(fresh) or 0.0, noise.relative(fresh)
    return _LayerJudgement(evidence.test, size, relative, later, movers)


def _swap_statistics(a: LayerTrace, b: LayerTrace, documents: np.ndarray) -> dict[str, Any]:
    """Fields of an `Attribution` about single swaps; none of them where groups limit the choice."""
    if a.facts.n_groups > 1 or len(documents) == 0:
        return {}
    expected = expected_swaps(a, b, documents)
    return {
        "swaps": len(swap_margins(a, b).tokens),
        "expected_swaps": None if expected is None else expected.expected,
        "swaps_error": None if expected is None else expected.error,
        "uniform_p": swap_uniformity(a, b),
    }


def _unranked_status(counts: tuple[int, int]) -> str:
    """Why a layer's choice cannot be judged by its scores; empty if it follows them."""
    for side, count in zip("AB", counts, strict=True):
        if count:
            return f"not attributable: {count} tokens of {side} do not choose the largest scores"
    return ""


def _share_nearer_than_flips(a: LayerTrace, b: LayerTrace, first: np.ndarray) -> list[np.ndarray]:
    """Share of all tokens with a smaller gap, for each first flip; by the side that has scores."""
    scored = [layer for layer in (a, b) if layer.has_gaps]
    if not scored or not first.any():
        return []
    gaps = scored[0].gap.numpy()
    return [np.searchsorted(np.sort(gaps), gaps[first]) / len(gaps)]


def _bias_difference(a: LayerTrace, b: LayerTrace) -> np.ndarray | None:
    """The selection bias by which the two sides may differ: their difference, else A's or B's."""
    biases = [layer.bias.double().numpy() for layer in (a, b) if layer.bias is not None]
    if not biases:
        return None
    if len(biases) == 1:
        return biases[0]
    is_rounded = np.allclose(biases[0], biases[1], rtol=2**-8, atol=0.0)  # the same in 16 bits
    return biases[0] if is_rounded else biases[0] - biases[1]


def run_layers(aligned: Aligned, keys: TokenKeys) -> list[RunLayer]:
    """Return level and flips of a run at these tokens; NaN and -1 where it has none.

    Args:
        aligned: the run, aligned with that in float32.
        keys: the tokens.
    """
    rows = aligned.common.in_a
    documents, positions = (x[rows].numpy() for x in (aligned.a.documents, aligned.a.positions))
    token_rows = _places_of_keys(TokenKeys(documents, positions), keys)
    layers = []
    for number in range(len(aligned.alignment.pairs)):
        a, b = aligned.pair(number)
        if comparable(a, b) != "ok":
            return []
        layers.append(
            RunLayer.from_noise(layer_noise(a, b), set_flips(a, b)[0].numpy()).at_tokens(token_rows)
        )
    return layers


def _places_of_keys(run_keys: TokenKeys, keys: TokenKeys) -> np.ndarray:
    """Where each of the keys stands among the listed ones; -1 where it does not."""
    if not len(run_keys.positions):
        return np.full(len(keys.positions), -1)
    span = 1 + max(int(x.positions.max(initial=0)) for x in (run_keys, keys))
    of_listed, of_keys = (
        x.documents.astype(np.int64) * span + x.positions for x in (run_keys, keys)
    )
    order = np.argsort(of_listed, kind="stable")
    ranks = np.searchsorted(of_listed[order], of_keys, side="right") - 1  # the last of equals
    candidates = order[ranks.clip(min=0)]
    return np.where(of_listed[candidates] == of_keys, candidates, -1)


def _shapes_beyond_one_run(
    shapes: Sequence[NoiseShape], run: Sequence[RunLayer], reference: Sequence[RunLayer]
) -> list[NoiseShape]:
    """The shapes with the noise of B over that of a single reference run, its median."""
    shapes_beyond = []
    for shape, of_b, other in zip(shapes, run, reference, strict=True):
        difference = of_b.level - other.level
        difference = difference[~np.isnan(difference)]
        ratio = float(np.exp(np.median(difference))) if len(difference) else None
        shapes_beyond.append(shape._replace(beyond=ratio))
    return shapes_beyond


def compare_runs(
    a: RoutingTrace,
    b: RoutingTrace,
    *,
    partial: bool = False,
    references: Sequence[RoutingTrace] = (),
    expected: Expected | None = None,
) -> ComparedRuns:
    """Align B with A and compare them layer by layer.

    Args:
        a: the run that is compared with.
        b: the other run.
        partial: compare what both have where one has fewer tokens or a smaller k.
        references: the model of the side in float32 again, in the format that is expected, on
            some of the tokens: its noise is what is measured by.
        expected: that format.
    """
    base, other = (a, b) if recorded_format(a.provenance) == "fp32" else (b, a)
    references = [on_score_grid(reference, other) for reference in references]
    return ComparedRuns(
        align(a, b, partial=partial),
        references=[
            align(_tokens_of_reference(base, reference), reference, partial=True)
            for reference in references
        ],
        tolerance=noise_tolerance(expected),
    )


def _tokens_of_reference(base: RoutingTrace, reference: RoutingTrace) -> RoutingTrace:
    """The run on the tokens of a reference where these are its first: the others have no part."""
    first = slice(reference.n_tokens)
    keys = (base.documents, reference.documents), (base.positions, reference.positions)
    is_beginning = all(torch.equal(x[first].long(), y.long()) for x, y in keys)
    return select_tokens(base, first) if is_beginning else base


def diff_result(
    compared: ComparedRuns,
    logits: LogitsDiff | None,
    timings: dict[str, float],
    expected: Expected | None = None,
    reference_kl: Estimate | None = None,
) -> RoutingDiff:
    """Return the result with its causes, observations and metrics.

    Args:
        compared: the layers compared.
        logits: how far the final distributions are apart, if models were run.
        timings: seconds per stage.
        expected: the format whose noise is to be expected.
        reference_kl: KL that this format makes in the model by itself, if that was run.
    """
    layers, aligned = tuple(compared.layers), compared.aligned
    alignment = aligned.alignment
    causes = attribute_causes(
        alignment,
        aligned.unranked,
        layers,
        compared.shapes,
        compared.near,
        expected,
        PredictionDistance(logits, reference_kl),
        compared.excess,
    )
    traces = (aligned.a, aligned.b)
    serving = measured_serving(traces, compared.flips.any(0), compared.documents, logits)
    return RoutingDiff(
        observations=diff_observations(alignment, layers, compared.tokens, logits, causes),
        metrics=diff_metrics(layers, compared.tokens, logits),
        alignment=alignment,
        layers=layers,
        tokens=compared.tokens,
        logits=logits,
        provenance={"a": aligned.a.provenance, "b": aligned.b.provenance},
        timings=timings,
        causes=causes,
        serving=serving,
        recommendation=(
            advice_on_routers(aligned.a.layers) if serving is None else recommend(serving)
        ),
        traces=traces,
    )


def served_precision(side: Mapping[str, object]) -> str | None:
    """Return the served precision in which the whole of a side was computed; None for others."""
    if " " in str(side.get("emulated", "")):
        return None  # a part of the model alone
    recorded = recorded_format(side)
    return next((name for name, emulated in SERVED.items() if emulated == recorded), None)


def measured_serving(
    traces: tuple[RoutingTrace, RoutingTrace],
    flipped: Bool[Tensor, " tokens"],
    documents: Int[Tensor, " tokens"],
    logits: LogitsDiff | None,
) -> Serving | None:
    """Return what the served precision of one side does beside the other in float32.

    None unless one side is in float32, the other in a served precision, routers are not smoothed,
    and predictions were compared. The KL is that of A to B, whichever is served.

    Args:
        traces: the routing of A and of B.
        flipped: tokens that flip in at least one layer.
        documents: document of each token.
        logits: how far the final distributions are apart.
    """
    sides = [trace.provenance for trace in traces]
    exact = [recorded_format(side) == "fp32" for side in sides]
    if logits is None or sum(exact) != 1:
        return None
    precision = served_precision(sides[exact.index(False)])
    if precision is None:
        return None
    plain, sign = traces[exact.index(True)], 1.0 if exact[0] else -1.0
    if any(layer.smoothed for layer in plain.layers):
        return None  # compared are the k experts of top-k, not those with any weight
    sequences = len(documents.unique())
    return Serving(
        precision=precision,
        changed=Estimate(
            flipped.double().mean().item(), clustered_error(flipped.double(), documents)
        ),
        kl=Estimate(logits.kl, logits.kl_error),
        loss=Estimate(sign * (logits.loss_b - logits.loss_a), logits.loss_error),
        tokens=len(flipped),
        sequences=sequences,
        layers=len(plain.layers),
        replay_bytes=sum(replay_bytes(layer, weights=False) for layer in plain.layers),
        routers=router_state(plain.layers),
        equal_layers=equal_layers(plain.layers),
        exact_ties=exact_ties(plain.layers),
    )


UNRELATED = 0.1
"""Agreement beyond chance below which a pair of layers counts as unrelated."""
COMPOUNDING = 2.0
"""Flip rate after an earlier flip over that of other tokens from which flips compound."""


def diff_observations(
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
    observations += _cause_observations(causes)
    observations += _unexplained_flips(layers, causes)
    observations += _unattributed_flips(layers)
    observations += [
        Observation("unrelated", "warning", pair.agreement, pair.name_a)
        for pair in alignment.pairs
        if pair.chance < 1 and pair.agreement - pair.chance < UNRELATED * (1 - pair.chance)
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
    """The patterns that the alignment does not state already, and the doubts about the noise."""
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
    """First flips that noise does not explain; `layer` is the one with the widest of them."""
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
    """Flips in layers whose scores do not allow a judgement, by reason."""
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
    """KL of the predictions, and that of tokens with a flip over the others."""
    observations = [Observation("kl", "info", logits.kl)]
    if logits.kl_flipped is not None and logits.kl_unflipped:
        ratio = logits.kl_flipped / logits.kl_unflipped
        observations.append(Observation("kl:flipped", "info", ratio))
    return observations
