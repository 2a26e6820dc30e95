"""Run a text clean and rounded: noise of every router, effect of the precision served.

`measure_serving` measures the effect of a precision served, as `model_effects` counts it.
`measure_router_noise` measures the noise of the gap in each layer, by a clean and a rounded run:

    ε      median |δ| / 0.6745, δ the change of c_[k] - c_[k+1]

At tolerance ε the orders of ties say how many experts the noise can exchange (Paper 1, Def. 3.2).
`tieline.lab.on_model.walks` measures when a token first changes its experts under such noise.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.analysis.inspect_records import NoiseReport, OwnNoise
from tieline.analysis.model_effects import FullEffect, FullEffects, audit_phase
from tieline.analysis.served_precision import Serving, replay_bytes, served_rounding
from tieline.core.errors import NoLogitsError
from tieline.core.numerics import one_thread
from tieline.core.statistics import Estimate, clustered_error, mean_estimate
from tieline.measure.boundary import order_shares, tie_order
from tieline.measure.exact_ties import equal_layers, exact_ties, router_state
from tieline.measure.measures import gap_status
from tieline.models.band_width import NORMAL_MEDIAN
from tieline.models.capture import RecorderSettings
from tieline.models.configuration import text_config
from tieline.models.families import family_of, find_routers
from tieline.models.model import Model
from tieline.models.number_formats import weights_in_float32
from tieline.run.condition import CLEAN, Condition, Perturbation
from tieline.run.corpus import TokenisedText, first_sequences, stacked_batches
from tieline.run.observers import RouteRecorder
from tieline.run.plan import Pass, Phase, Plan
from tieline.run.runner import Progress, Runner
from tieline.trace.record import LayerTrace, RoutingTrace

NOISE_PRECISION = "bf16"
"""Format whose rounding noise `measure_router_noise` measures."""
ROUNDED = Condition(Perturbation("rounding", NOISE_PRECISION, "model"))
SCORES_AND_INPUTS = RecorderSettings(None, (), True, False)
"""Records the scores of all experts and the inputs of the routers."""
NOISE_TOKENS = 2048
"""Largest number of tokens of `rounded_runs`."""
MOST_BYTES = 1 << 28
"""Largest size of the router inputs that each of the two runs keeps."""
MOST_WEIGHTS = 8 << 30
"""Largest size of the weights, because the rounded run holds a second copy."""
SERVED_TOKENS = 4096
"""Largest number of tokens that `measure_serving` runs."""
FIXED_CHOICE = (
    "not measured: the record of a router says only where its scores are, so that the experts of a "
    "clean run cannot be kept while the rest is rounded"
)
"""Why the predictions in a precision served were not measured, though the scores were."""
MOST_SCORES = 1 << 29
"""Largest size of the scores that the clean and the rounded run keep."""
SCORES = RecorderSettings(None, (), False, False)
"""Records the scores of all experts."""
MOST_ORDER = 6
"""Tie orders from this one on are counted together."""


def serving_effect(precision: str, effect: FullEffect, layers: Sequence[LayerTrace]) -> Serving:
    """Assemble the effect of a precision served from its counts.

    Args:
        precision: a name in `SERVED`.
        effect: counts of rounding the model to the precision.
        layers: routing of some tokens in each layer.
    """
    counts = [int(count) for batch_counts in effect.kl.counts for count in batch_counts]
    return Serving(
        precision=precision,
        changed=effect.any_layer.mean(),
        kl=effect.kl.mean(),
        replayed=effect.floor.mean(),
        loss=effect.loss.mean(),
        tokens=sum(counts),
        sequences=len(counts),
        layers=len(effect.flips),
        replay_bytes=sum(replay_bytes(layer, weights=False) for layer in layers),
        routers=router_state(layers),
        equal_layers=equal_layers(layers),
        exact_ties=exact_ties(layers),
    )


class RoundedRuns(NamedTuple):
    """The routing of one text, clean and with every number of the model rounded.

    Attributes:
        clean: trace with the scores of all experts and the routers' inputs; None if not run.
        rounded: trace of the rounded run; None if not run.
        status: "ok", or why the model cannot be rounded.
    """

    clean: RoutingTrace | None
    rounded: RoutingTrace | None
    status: str = "ok"


def rounded_runs(
    model: nn.Module, names: Sequence[str], text: TokenisedText, batch_size: int
) -> RoundedRuns:
    """Run the beginning of a text clean and with every number of the model rounded.

    Args:
        model: the model, in float32.
        names: names of the routers to record.
        text: the text; its first sequences are run, at most `NOISE_TOKENS` tokens.
        batch_size: sequences per forward pass.
    """
    status = rounding_status(model, names)
    if status != "ok":
        return RoundedRuns(None, None, status)
    dim = getattr(text_config(model), "hidden_size", None)
    width = dim if isinstance(dim, int) else 8192
    most = min(NOISE_TOKENS, max(1, MOST_BYTES // (4 * len(names) * width)))
    numbered = dict(enumerate(stacked_batches(first_sequences(text, most), batch_size)))
    passes = [Pass(n, condition) for condition in (CLEAN, ROUNDED) for n in numbered]
    recorders = _recorders(model, names, SCORES_AND_INPUTS, (CLEAN, ROUNDED))
    plan = Plan((Phase("noise", numbered, tuple(passes), logits="none"),))
    Runner(Model(model)).run(plan, recorders)
    clean, rounded = (recorder.trace() for recorder in recorders)
    return RoundedRuns(clean, rounded)


def _recorders(
    model: nn.Module,
    names: Sequence[str],
    settings: RecorderSettings,
    conditions: Sequence[Condition],
) -> list[RouteRecorder]:
    """Return a recorder of these routers for each condition."""
    return [
        RouteRecorder(model, settings, names, lambda run, c=condition: run.condition == c)
        for condition in conditions
    ]


def measure_router_noise(
    model: nn.Module, names: Sequence[str], text: TokenisedText, batch_size: int
) -> NoiseReport:
    """Measure the noise of each router by a clean and a rounded run of the beginning of a text.

    Arguments as for `rounded_runs`.
    """
    clean, rounded, status = rounded_runs(model, names, text, batch_size)
    if clean is None or rounded is None:
        return NoiseReport((), status)
    return noise_report(clean, rounded, NOISE_PRECISION)


def measure_serving(
    model: Model,
    names: Sequence[str],
    text: TokenisedText,
    batch_size: int,
    precision: str,
    progress: Progress | None = None,
) -> tuple[Serving | None, NoiseReport]:
    """Measure a precision served on the beginning of a text, also with clean routes forced.

    Returns the effect of the precision on the model, None if it cannot be measured, and its effect
    on the scores of each layer. For a model without logits only the noise of scores is measured.

    Args:
        model: the model; weights in half precision are converted to float32 during the runs.
        names: routers whose noise is reported; changed experts are counted in all routers.
        text: the text; its first sequences are run, at most `SERVED_TOKENS` tokens.
        batch_size: sequences per forward pass.
        precision: a name in `SERVED`.
        progress: called with stage, done and total.
    """
    with weights_in_float32(model.module, MOST_WEIGHTS):
        status = rounding_status(model.module, names, model.stream is not None)
        if status != "ok":
            return None, NoiseReport((), status)
        return _serving_of_float32_model(model, names, text, batch_size, precision, progress)


def _serving_of_float32_model(
    model: Model,
    names: Sequence[str],
    text: TokenisedText,
    batch_size: int,
    precision: str,
    progress: Progress | None,
) -> tuple[Serving | None, NoiseReport]:
    """Return the results of `measure_serving` for a model in float32."""
    routers = [family_of(router) for router in find_routers(model.module).values()]
    if any(family is not None and not family.layout.has_choice for family in routers):
        noise = measure_router_noise(model.module, names, text, batch_size)
        return None, replace(noise, status=FIXED_CHOICE)
    sequences = first_sequences(text, _tokens_within_score_memory(model))
    numbered = dict(enumerate(stacked_batches(sequences, batch_size)))
    rounding = served_rounding(precision)
    condition, effects = Condition(rounding), FullEffects([rounding])
    recorders = _recorders(model.module, names, SCORES, (CLEAN, condition))
    phase = audit_phase("served precision", numbered, [condition])
    try:
        Runner(model).run(Plan((phase,)), [effects, *recorders], progress)
    except NoLogitsError:
        return None, measure_router_noise(model.module, names, text, batch_size)
    clean, rounded = (recorder.trace() for recorder in recorders)
    serving = serving_effect(precision, effects.effects[rounding], clean.layers)
    return serving, noise_report(clean, rounded, precision)


def _tokens_within_score_memory(model: Model) -> int:
    """Return the number of tokens whose clean and rounded scores fit the memory limit."""
    experts = 0
    for router in find_routers(model.module).values():
        weights = [weight for weight in router.parameters() if weight.ndim == 2]
        experts += max((min(weight.shape) for weight in weights), default=256)
    return min(SERVED_TOKENS, max(1, MOST_SCORES // (16 * experts)))


def noise_report(clean: RoutingTrace, rounded: RoutingTrace, precision: str) -> NoiseReport:
    """Measure the noise of each router from a clean run and a run in a precision."""
    documents = clean.documents.long()
    with one_thread():  # many small operations
        layers = [
            _layer_noise(before, after, documents, precision)
            for before, after in zip(clean.layers, rounded.layers, strict=True)
            if gap_status(before) == "ok"
        ]
    return NoiseReport(tuple(layers))


def rounding_status(model: nn.Module, names: Sequence[str], streamed: bool = False) -> str:
    """Return "ok" if rounding the model measures its noise, else the reason.

    Args:
        model: the model.
        names: names of the routers to measure.
        streamed: whether the runner streams the weights from disk.
    """
    parameters = list(model.parameters())
    if not streamed and any(parameter.is_meta for parameter in parameters):
        return "not measured: weights that are not in memory cannot be rounded"
    dtypes = {p.dtype for p in parameters if p.is_floating_point()} - {torch.float32, torch.float64}
    if dtypes:
        dtype = str(next(iter(dtypes))).removeprefix("torch.")
        return f"not measured: the model runs in {dtype}, whose noise shows against float32 only"
    size = sum(p.numel() * p.element_size() for p in parameters)
    if not streamed and size > MOST_WEIGHTS:
        return f"not measured: a second copy of the weights exceeds {MOST_WEIGHTS >> 30} GiB"
    families = [family_of(model.get_submodule(name)) for name in names]
    if any(family is None or family.in_block for family in families):
        return "not measured: a router that is no module of its own cannot be rounded"
    return "ok"


def _layer_noise(
    clean: LayerTrace, rounded: LayerTrace, documents: Tensor, precision: str
) -> OwnNoise:
    """Measure the size of one layer's noise, its flips and the tie orders at that size."""
    k = clean.facts.k
    clean_scores, rounded_scores = (scores_by_expert(layer) for layer in (clean, rounded))
    changes = (rounded_scores - clean_scores).gather(1, clean.experts[:, k - 1 : k + 1].long())
    changes = changes[changes.isfinite().all(dim=1)]
    delta = (changes[:, 0] - changes[:, 1]).abs()
    epsilon = delta.median().item() / NORMAL_MEDIAN if len(delta) else 0.0
    sets = [layer.experts[:, :k].long().sort(dim=1).values for layer in (clean, rounded)]
    flipped = (sets[0] != sets[1]).any(dim=1).double()
    error = clustered_error(flipped, documents)
    share = mean_estimate(flipped)
    orders = torch.tensor([1.0] + [0.0] * MOST_ORDER, device="cpu")
    if epsilon > 0:
        ranked = clean_scores.masked_fill(
            clean_scores.isneginf(), clean_scores[clean_scores.isfinite()].min() - 1e3
        )
        orders = order_shares(tie_order(ranked, k, epsilon), MOST_ORDER)
    return OwnNoise(
        name=clean.name,
        precision=precision,
        tokens=len(clean.experts),
        epsilon=epsilon,
        flipped=share if error is None else Estimate(share.value, error),
        orders=tuple(orders.tolist()),
    )


def scores_by_expert(layer: LayerTrace) -> Float[Tensor, "tokens experts"]:
    """Return the selection scores of all experts in float64; -inf for excluded groups."""
    assert layer.scores is not None
    scores = torch.full(
        (len(layer.scores), layer.facts.n_experts), -torch.inf, dtype=torch.float64, device="cpu"
    )
    return scores.scatter_(1, layer.experts.long(), layer.scores.double())
