"""Compare the routing of two runs on the same tokens, layer by layer.

A token flips in a layer if its sets of chosen experts differ: S_A ≠ S_B. Each layer is read once
and gives its flips, the combine weight moved, the noise of its scores (`score_noise`), the p-values
of its first flips and the shape of its noise (`noise_shapes`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tieline.analysis.alignment import AlignedRuns, CheckedSide, align, checked_side
from tieline.analysis.attribution import PredictionDistance, attribute_causes
from tieline.analysis.diff_observations import diff_metrics, diff_observations
from tieline.analysis.diff_records import (
    Attribution,
    DepthStep,
    LayerDiff,
    LogitsDiff,
    RoutingDiff,
    TokenDiff,
    WeightMoved,
)
from tieline.analysis.excess_over_sound_runs import (
    Excess,
    RunLayerNoise,
    find_excess,
    round_scores_like,
)
from tieline.analysis.job_settings import SERVED
from tieline.analysis.noise_shapes import NoiseShape, TokenKeys, flip_lag, measure_noise_shape
from tieline.analysis.noise_size import ExpectedFormat, noise_tolerance, recorded_format
from tieline.analysis.score_noise import (
    FALSE_DISCOVERIES,
    FlipTest,
    comparison_status,
    flip_test,
    gap_density,
    layer_noise,
    rejected_tests,
    score_differences,
    weight_evidence,
)
from tieline.analysis.served_precision import Serving, advice_on_routers, recommend, replay_bytes
from tieline.analysis.single_swaps import (
    SwapMargins,
    exchanged_swaps,
    expected_swaps,
    swap_margins,
    swap_uniformity,
)
from tieline.analysis.token_groups import ComparedTokens
from tieline.core.ranking import n_changed
from tieline.core.statistics import Estimate, clustered_error, clustered_share
from tieline.measure.exact_ties import equal_layers, exact_ties, router_state
from tieline.trace.document_runs import batch_rows, decoded_tokens
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.selection import select_tokens

FEWEST_REFERENCES = 3
"""Fewest reference runs that estimate the variation of sound runs."""
MOST_LISTED_FLIPS = 20
"""Most unexplained flips of a layer that are listed."""


def flipped_tokens(a: LayerTrace, b: LayerTrace) -> tuple[Bool[Tensor, " tokens"], float | None]:
    """Mask of tokens whose sets differ, and mean number of experts that differ in these tokens."""
    k = a.facts.k
    changed = n_changed(a.experts[:, :k], b.experts[:, :k])
    flipped = changed > 0
    return flipped, changed[flipped].double().mean().item() if bool(flipped.any()) else None


def weight_moved(
    a: LayerTrace, b: LayerTrace, flipped: Bool[Tensor, " tokens"]
) -> WeightMoved | None:
    """½ Σ_e |w_A(e) - w_B(e)| over the tokens, weights summing to one; None without weights.

    Zero if both sides have the same experts and weights, one if they have no expert in common.
    """
    if a.weights is None or b.weights is None or len(flipped) == 0:
        return None
    (weights_a, experts_a), (weights_b, experts_b) = a.combined(), b.combined()
    shares_a, shares_b = _weights_summing_to_one(weights_a), _weights_summing_to_one(weights_b)
    same = experts_a[:, :, None] == experts_b[:, None, :]
    shared = (same * shares_b[:, None, :]).sum(2)
    entering = (shares_b * ~same.any(1)).sum(1)
    moved = ((shares_a - shared).abs().sum(1) + entering) / 2
    of_flipped = moved[flipped].mean().item() if bool(flipped.any()) else None
    p99 = float(np.quantile(moved.numpy(), 0.99, method="inverted_cdf"))
    return WeightMoved(moved.mean().item(), p99, moved.max().item(), of_flipped)


def _weights_summing_to_one(weights: Tensor) -> Tensor:
    """Weights divided by their sum; equal weights if all have underflowed."""
    total = weights.double().sum(1, keepdim=True)
    return torch.where(total == 0, 1.0 / weights.shape[1], weights.double() / total)


def flipped_before(flips: Bool[Tensor, "layers tokens"]) -> Bool[Tensor, "layers tokens"]:
    """Whether each token has flipped in an earlier layer."""
    so_far = flips.int().cumsum(0) > 0
    return torch.cat((torch.zeros_like(so_far[:1]), so_far[:-1]))


def token_diff(
    flips: Bool[Tensor, "layers tokens"], documents: Int[Tensor, " tokens"], names: list[str]
) -> TokenDiff:
    """Summarise tokens over all layers: flips anywhere, first divergent layer, compounding.

    A flipped token enters later layers with a different residual stream and flips more often there.
    `fresh` and `after` are the flip rates without and with an earlier flip, `independent` is the
    cumulative share if layers flipped independently.

    Args:
        flips: whether each token flips in each layer, in order of depth.
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


class _LayerEvidence(NamedTuple):
    """Tested flips and noise of one layer, with further fields of its `Attribution`."""

    test: FlipTest
    noise: float
    relative: float | None
    later: int
    details: dict[str, Any]


class ComparedRuns:
    """Comparison of the layers of two aligned runs.

    Attributes:
        aligned: the aligned runs.
        documents: document of each token.
        positions: position of each token in its document.
        flips: whether each token flips in each layer.
        layers: the compared layers.
        shapes: effects of the noise of each layer.
        run_layers: noise level and flips of each token in each layer.
        excess: where B is further from A than the reference runs; None with fewer than three.
        smaller_gaps: for layers with scores of one side only, the share of tokens with a smaller
            gap than each first flip.
        tokens: flips over all layers.
    """

    def __init__(
        self,
        aligned: AlignedRuns,
        *,
        references: Sequence[AlignedRuns] = (),
        tolerance: float = 0.0,
    ) -> None:
        """Compare every pair of layers, one at a time.

        Args:
            aligned: the two runs.
            references: sound runs, aligned with the side in float32.
            tolerance: τ, logarithm of the largest ratio of B's noise to that of sound runs.
        """
        self.aligned = aligned
        tokens = aligned.common.in_a
        self.documents = aligned.a.documents[tokens].long()
        self.positions = aligned.a.positions[tokens].long()
        self._keys = TokenKeys(self.documents.numpy(), self.positions.numpy())
        self._flipped_earlier = np.zeros(len(tokens), dtype=bool)
        self._layer_before: tuple[np.ndarray, np.ndarray] | None = None
        self.run_layers: list[RunLayerNoise] = []
        self.shapes: list[NoiseShape] = []
        self.smaller_gaps: list[np.ndarray] = []
        flips, layers, all_evidence = [], [], []
        for index in range(len(aligned.alignment.pairs)):
            flipped, layer, evidence = self._compare_layer(index)
            flips.append(flipped)
            layers.append(layer)
            all_evidence.append(evidence)
        self.flips = torch.stack(flips)
        self.layers = self._with_attributions(layers, all_evidence)
        self.tokens = token_diff(self.flips, self.documents, [x.name for x in self.layers])
        self.excess: tuple[Excess, ...] | None = None
        runs = [x for y in references if len(x := reference_layers(y, self._keys)) == len(layers)]
        if len(runs) >= FEWEST_REFERENCES:
            self.excess = self._excess_over_sound_runs(runs, tolerance)
        if runs:
            self.shapes = _with_noise_ratios(self.shapes, self.run_layers, runs)

    def _excess_over_sound_runs(
        self, runs: Sequence[list[RunLayerNoise]], tolerance: float
    ) -> tuple[Excess, ...]:
        """Where B exceeds the reference runs, on the tokens of all reference runs."""
        rows = np.flatnonzero(np.all([run[0].flipped >= 0 for run in runs], axis=0))
        rows_in_a = self.aligned.common.in_a[torch.from_numpy(rows)]
        numbers, layers = [i for i, _ in self.aligned.pairing.pairs], self.aligned.a.layers
        experts = [layers[i].experts[rows_in_a].long().numpy() for i in numbers]
        ids = self.aligned.a.tokens
        tokens = ComparedTokens(
            self._keys.documents[rows],
            self._keys.positions[rows],
            None if ids is None else ids[rows_in_a].numpy(),
            [x[:, : layer.k] for x, layer in zip(experts, self.layers, strict=True)],
            experts,
            *(None if x is None else x[rows] for x in self._batch_rows_and_decoded()),
            equal_scores=[_equal_score_counts(layers[i].scores, rows_in_a) for i in numbers],
        )
        layers_at_tokens = [[x.at_tokens(rows) for x in run] for run in (self.run_layers, *runs)]
        before = self.aligned.layers_before
        return find_excess(layers_at_tokens[0], layers_at_tokens[1:], tokens, tolerance, before)

    def _batch_rows_and_decoded(self) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Row in its batch of each token of B, and whether B decoded it; None if unknown."""
        b, tokens = self.aligned.b, self.aligned.common.in_b
        return batch_rows(b, tokens), decoded_tokens(b, tokens)

    def _compare_layer(self, index: int) -> tuple[Tensor, LayerDiff, _LayerEvidence | None]:
        """Flips of a pair of layers, its record, and its evidence if its flips can be tested."""
        a, b = self.aligned.layer_pair(index)
        flipped, changed = flipped_tokens(a, b)
        weight = weight_moved(a, b, flipped)
        status = _unranked_status(self.aligned.unranked[index]) or comparison_status(a, b)
        evidence = self._measure_layer(a, b, flipped.numpy(), status)
        self._flipped_earlier = self._flipped_earlier | flipped.numpy()
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
            evidence,
        )

    def _measure_layer(
        self, a: LayerTrace, b: LayerTrace, flipped: np.ndarray, status: str
    ) -> _LayerEvidence | None:
        """Test the first flips of a layer and measure the shape of its noise."""
        chosen_a, chosen_b = (x.experts[:, : x.facts.k].numpy() for x in (a, b))
        lag = flip_lag(chosen_a, chosen_b, flipped, self._keys)
        fresh = ~self._flipped_earlier
        counts: dict[str, Any] = {"flips": float(flipped.mean()), "total": len(flipped)}
        if status != "ok":
            self.run_layers.append(RunLayerNoise.from_noise(None, flipped))
            self._layer_before = None
            evidence = _judge_by_weights(a, b, flipped, fresh)
            relative = None if evidence is None else evidence.relative
            self.shapes.append(NoiseShape(a.name, relative, 0, lag=lag, **counts))
            if evidence is None:
                self.smaller_gaps += _smaller_gap_shares(a, b, flipped & fresh)
            return evidence
        noise = layer_noise(a, b)
        bias = _bias_difference(a, b)
        shape = measure_noise_shape(a.name, noise, fresh, self._keys, self._layer_before, bias)
        counts["density"] = gap_density(a, noise.spread)
        swaps = swap_margins(a, b)
        counts["exchanged"] = exchanged_swaps(a, b, noise, fresh, swaps)
        self.shapes.append(shape._replace(lag=lag, **counts))
        self._layer_before = (noise.level, chosen_a)
        has_groups = a.facts.n_groups > 1
        self.run_layers.append(RunLayerNoise.from_noise(noise, flipped, has_groups))
        test = flip_test(a, b, noise, flipped, fresh)
        later = int((flipped & ~fresh).sum())
        details = _swap_statistics(a, b, self._keys.documents, swaps)
        return _LayerEvidence(test, noise.size(fresh) or 0.0, noise.relative(fresh), later, details)

    def _with_attributions(
        self, layers: list[LayerDiff], all_evidence: list[_LayerEvidence | None]
    ) -> list[LayerDiff]:
        """The layers with their attributions; the false discovery rate is that of all layers."""
        p_values = [x.test.p for x in all_evidence if x is not None]
        rejected = rejected_tests(np.concatenate([np.zeros(0), *p_values]), FALSE_DISCOVERIES)
        by_layer = iter(np.split(rejected, np.cumsum([len(p) for p in p_values])))
        return [
            layer
            if x is None
            else replace(layer, attribution=self._layer_attribution(x, next(by_layer)))
            for layer, x in zip(layers, all_evidence, strict=True)
        ]

    def _layer_attribution(self, evidence: _LayerEvidence, unexplained: np.ndarray) -> Attribution:
        """First flips of a layer that its noise explains, and those that it does not."""
        test, count = evidence.test, int(unexplained.sum())
        tokens, widths = test.tokens[unexplained], test.margins[unexplained]
        order = np.argsort(-widths, kind="stable")[:MOST_LISTED_FLIPS]
        keys = (self._keys.documents, self._keys.positions)
        widest_tokens = zip(
            *(key[tokens[order]].tolist() for key in keys), widths[order].tolist(), strict=True
        )
        explained = len(test.p) - count
        return Attribution(
            noise=evidence.noise,
            unexplained=count,
            widest=float(test.margins.max()) if len(test.p) else None,
            unexplained_tokens=tuple(widest_tokens),
            explained=explained,
            later=evidence.later,
            relative=evidence.relative,
            smallest_p=float(test.p.min()) if len(test.p) else None,
            **evidence.details,
        )


def _judge_by_weights(
    a: LayerTrace, b: LayerTrace, flipped: np.ndarray, fresh: np.ndarray
) -> _LayerEvidence | None:
    """Evidence of the combine weights of a layer without scores; None if they are no evidence."""
    weights = weight_evidence(a, b, flipped, fresh)
    if weights is None or not weights.is_near:
        return None
    noise, later = weights.noise, int((flipped & ~fresh).sum())
    movers = {"evidence": "weights", "last": weights.last, "movers": weights.movers}
    size, relative = noise.size(fresh) or 0.0, noise.relative(fresh)
    return _LayerEvidence(weights.test, size, relative, later, movers)


def _swap_statistics(
    a: LayerTrace, b: LayerTrace, documents: np.ndarray, swaps: SwapMargins
) -> dict[str, Any]:
    """Fields of an `Attribution` about single swaps; empty for routing within groups."""
    if a.facts.n_groups > 1 or len(documents) == 0:
        return {}
    expected = expected_swaps(a, b, documents, swaps)
    return {
        "swaps": len(swaps.tokens),
        "expected_swaps": None if expected is None else expected.expected,
        "swaps_error": None if expected is None else expected.error,
        "uniform_p": swap_uniformity(a, b, swaps),
    }


def _unranked_status(counts: tuple[int, int]) -> str:
    """Status of a layer in which a side's choice contradicts its scores; empty if none does."""
    for side, count in zip("AB", counts, strict=True):
        if count:
            return f"not attributable: {count} tokens of {side} do not choose the largest scores"
    return ""


def _smaller_gap_shares(a: LayerTrace, b: LayerTrace, first: np.ndarray) -> list[np.ndarray]:
    """Share of all tokens with a smaller gap than each first flip, by the side with scores."""
    scored = [layer for layer in (a, b) if layer.has_gaps]
    if not scored or not first.any():
        return []
    gaps = scored[0].gap.numpy()
    return [np.searchsorted(np.sort(gaps), gaps[first]) / len(gaps)]


def _bias_difference(a: LayerTrace, b: LayerTrace) -> np.ndarray | None:
    """Difference of the selection biases, or the bias of one side if they are equal."""
    biases = [layer.bias.double().numpy() for layer in (a, b) if layer.bias is not None]
    if not biases:
        return None
    if len(biases) == 1:
        return biases[0]
    is_rounded = np.allclose(biases[0], biases[1], rtol=2**-8, atol=0.0)  # the same in 16 bits
    return biases[0] if is_rounded else biases[0] - biases[1]


SAME_SCORES = 2.0**-14
"""Largest distance of scores that are equal up to another order of sums, over their spread."""


def _equal_score_counts(
    scores: Tensor | None, rows: Int[Tensor, " tokens"]
) -> Int[np.ndarray, " tokens"]:
    """Number of tokens with the scores of each token, up to rounding; one without scores."""
    if scores is None or not len(rows):
        return np.ones(len(rows), dtype=np.int64)
    values = scores[rows].double().nan_to_num(neginf=0.0).numpy()
    grid = max(SAME_SCORES * float(np.median(values.std(axis=1))), np.finfo(np.float32).tiny)
    steps = np.round(values / grid) + 0.0  # floats: a lone expert has no spread, and -0 is 0
    _, codes, counts = np.unique(steps, axis=0, return_inverse=True, return_counts=True)
    return counts[codes.ravel()]


def reference_layers(aligned: AlignedRuns, keys: TokenKeys) -> list[RunLayerNoise]:
    """Noise level and flips of a reference run at these tokens; NaN and -1 at tokens it lacks.

    Empty if the scores of a layer cannot be compared.

    Args:
        aligned: the reference run, aligned with the run in float32.
        keys: the tokens.
    """
    rows = aligned.common.in_a
    documents, positions = (x[rows].numpy() for x in (aligned.a.documents, aligned.a.positions))
    token_rows = _rows_of_keys(TokenKeys(documents, positions), keys)
    layers = []
    for number in range(len(aligned.alignment.pairs)):
        a, b = aligned.layer_pair(number)
        if comparison_status(a, b) != "ok":
            return []
        flipped, has_groups = flipped_tokens(a, b)[0].numpy(), a.facts.n_groups > 1
        layer = RunLayerNoise.from_noise(score_differences(a, b), flipped, has_groups)
        layers.append(layer.at_tokens(token_rows))
    return layers


def _rows_of_keys(run_keys: TokenKeys, keys: TokenKeys) -> np.ndarray:
    """Row of each key among those of a run; -1 if it is missing."""
    if not len(run_keys.positions):
        return np.full(len(keys.positions), -1)
    span = 1 + max(int(x.positions.max(initial=0)) for x in (run_keys, keys))
    codes_of_run, codes = (
        x.documents.astype(np.int64) * span + x.positions for x in (run_keys, keys)
    )
    order = np.argsort(codes_of_run, kind="stable")
    ranks = np.searchsorted(codes_of_run[order], codes, side="right") - 1  # the last of equals
    candidates = order[ranks.clip(min=0)]
    return np.where(codes_of_run[candidates] == codes, candidates, -1)


def _with_noise_ratios(
    shapes: Sequence[NoiseShape],
    run: Sequence[RunLayerNoise],
    references: Sequence[Sequence[RunLayerNoise]],
) -> list[NoiseShape]:
    """The shapes with the median ratio of B's noise to that of the reference runs, all tokens."""
    shapes_with_ratio = []
    for shape, layer, *reference_layers in zip(shapes, run, *references, strict=True):
        difference = layer.level - np.mean([x.level for x in reference_layers], axis=0)
        difference = difference[~np.isnan(difference)]
        ratio = float(np.exp(np.median(difference))) if len(difference) else None
        shapes_with_ratio.append(shape._replace(reference_ratio=ratio))
    return shapes_with_ratio


def compare_runs(
    a: RoutingTrace,
    b: RoutingTrace,
    *,
    partial: bool = False,
    references: Sequence[RoutingTrace] = (),
    expected: ExpectedFormat | None = None,
) -> ComparedRuns:
    """Align B with A and compare them layer by layer.

    Args:
        a: the reference run.
        b: the other run.
        partial: compare the common tokens and the smaller k if they differ.
        references: further runs of the model in float32 on some of the tokens, in the expected
            format, whose noise B's noise is compared with.
        expected: the expected format.
    """
    aligned = align(a, b, partial=partial)
    if references:
        a, b = (
            _with_layers(trace, [side.layers[pair[n]].name for pair in aligned.pairing.pairs])
            for n, (trace, side) in enumerate(((a, aligned.a), (b, aligned.b)))
        )
    base, other = (a, b) if recorded_format(a.provenance) == "fp32" else (b, a)
    references = [_with_layers(run, [x.name for x in base.layers]) for run in references]
    rounded = round_scores_like(references, other)
    return ComparedRuns(
        aligned,
        references=_aligned_references(base, rounded),
        tolerance=noise_tolerance(expected),
    )


def _with_layers(trace: RoutingTrace, names: Sequence[str]) -> RoutingTrace:
    """The trace with the layers of these names alone."""
    if [layer.name for layer in trace.layers] == list(names):
        return trace
    return replace(trace, layers=[layer for layer in trace.layers if layer.name in names])


def _aligned_references(
    base: RoutingTrace, references: Sequence[RoutingTrace]
) -> list[AlignedRuns]:
    """The references, aligned with a run, whose tokens are checked once for all of them."""
    sides: dict[int, CheckedSide] = {}
    aligned = []
    for reference in references:
        count = _tokens_to_align(base, reference)
        if count not in sides:
            sides[count] = checked_side(select_tokens(base, slice(count)), "A")
        aligned.append(align(sides[count], reference, partial=True))
    return aligned


def _tokens_to_align(base: RoutingTrace, reference: RoutingTrace) -> int:
    """Number of the first tokens of a run that are those of a reference; else of all tokens."""
    first = slice(reference.n_tokens)
    keys = (base.documents, reference.documents), (base.positions, reference.positions)
    is_beginning = all(torch.equal(x[first].long(), y.long()) for x, y in keys)
    return reference.n_tokens if is_beginning else base.n_tokens


def diff_result(
    compared: ComparedRuns,
    logits: LogitsDiff | None,
    timings: dict[str, float],
    expected: ExpectedFormat | None = None,
    reference_kl: Estimate | None = None,
) -> RoutingDiff:
    """The result with its causes, observations and metrics.

    Args:
        compared: the compared layers.
        logits: distance of the final distributions, if models were run.
        timings: seconds per stage.
        expected: the format whose noise is expected.
        reference_kl: KL of the model in float32 to itself in this format, if that was run.
    """
    layers, aligned = tuple(compared.layers), compared.aligned
    alignment = aligned.alignment
    causes = attribute_causes(
        alignment,
        aligned.unranked,
        layers,
        compared.shapes,
        compared.smaller_gaps,
        expected,
        PredictionDistance(logits, reference_kl),
        compared.excess,
        aligned.layers_before,
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


def recorded_precision(provenance: Mapping[str, object]) -> str | None:
    """The served precision in which a whole model ran; None if it ran in another format."""
    if " " in str(provenance.get("emulated", "")):
        return None  # only a region of the model was emulated
    recorded = recorded_format(provenance)
    return next((name for name, emulated in SERVED.items() if emulated == recorded), None)


def measured_serving(
    traces: tuple[RoutingTrace, RoutingTrace],
    flipped: Bool[Tensor, " tokens"],
    documents: Int[Tensor, " tokens"],
    logits: LogitsDiff | None,
) -> Serving | None:
    """Effect of the served precision of one side, compared with the other in float32.

    None unless one side is in float32, the other in a served precision, no router is smoothed, and
    predictions were compared. The KL is KL(A ‖ B), whichever side is served.

    Args:
        traces: the routing of A and of B.
        flipped: tokens that flip in at least one layer.
        documents: document of each token.
        logits: distance of the final distributions.
    """
    sides = [trace.provenance for trace in traces]
    exact = [recorded_format(side) == "fp32" for side in sides]
    if logits is None or sum(exact) != 1:
        return None
    precision = recorded_precision(sides[exact.index(False)])
    if precision is None:
        return None
    plain, sign = traces[exact.index(True)], 1.0 if exact[0] else -1.0
    if any(layer.smoothed for layer in plain.layers):
        return None  # flips of the k experts of top-k say nothing about all experts with weight
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
