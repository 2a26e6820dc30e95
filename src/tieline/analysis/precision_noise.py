"""The size of a low precision's noise near the ties of a model, and the orders of ties at it.

The model runs a piece of text clean and with every number rounded, as `tieline audit` does it. The
differences give, layer by layer,

    ε      median |δ| / 0.6745, δ the change of c_[k] - c_[k+1]: the size of the noise of a gap

At tolerance ε the orders of ties say how many experts the noise can mix (Paper 1, Def. 3.2).
`tieline.lab.on_model.walks` asks when a token first changes its experts under such noise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.analysis.inspect_records import NoiseReport, OwnNoise
from tieline.analysis.perturbation_effects import FullEffects, audit_phase, serving_effect
from tieline.analysis.served_precision import Serving, served_rounding
from tieline.core.errors import NoLogitsError
from tieline.core.numerics import one_thread
from tieline.core.statistics import Estimate, clustered_error, mean_estimate
from tieline.measure.boundary import order_shares, tie_order
from tieline.measure.measures import gap_status
from tieline.models.band_width import NORMAL_MEDIAN
from tieline.models.capture import ObserverSettings
from tieline.models.configuration import text_config
from tieline.models.families import family_of, find_routers
from tieline.models.model import Model
from tieline.run.condition import CLEAN, Condition, Perturbation
from tieline.run.corpus import TokenisedText, stacked_batches
from tieline.run.observers import RouteRecorder
from tieline.run.plan import Pass, Phase, Plan
from tieline.run.runner import Progress, Runner
from tieline.trace.record import LayerTrace, RoutingTrace

PRECISION = "bf16"
"""The format whose noise is measured."""
ROUNDED = Condition(Perturbation("rounding", PRECISION, "model"))
EVERYTHING = ObserverSettings(None, (), True, False)
"""What is recorded: the scores of all experts, and the inputs of the routers."""
TOKENS = 2048
"""Most tokens that run twice for it."""
MOST_BYTES = 1 << 28
"""Largest size of the router inputs that one of the two runs keeps."""
MOST_WEIGHTS = 8 << 30
"""Largest size of the weights, of which the rounded run holds a second copy."""
SERVED_TOKENS = 4096
"""Most tokens that `measure_serving` runs."""
MOST_SCORES = 1 << 29
"""Largest size of the scores that the clean and the rounded run keep."""
SCORES = ObserverSettings(None, (), False, False)
"""What is recorded of a precision served: the scores of all experts."""
MOST_ORDER = 6
"""Tie orders from this one on are counted together."""


class RoundedRuns(NamedTuple):
    """The routing of one text, clean and with every number of the model rounded.

    Attributes:
        clean: traces with the scores of all experts and the routers' inputs.
        rounded: the same of the rounded run; None if it cannot be had.
        status: "ok", or why not.
        precision: the format of the rounded run.
    """

    clean: RoutingTrace | None
    rounded: RoutingTrace | None
    status: str = "ok"
    precision: str = PRECISION


def rounded_runs(
    model: nn.Module, names: Sequence[str], text: TokenisedText, batch_size: int
) -> RoundedRuns:
    """Run a piece of the text clean and rounded.

    Args:
        model: the model, in float32.
        names: its routers to look at.
        text: the text; its first sequences are run, `TOKENS` tokens at most.
        batch_size: sequences per forward pass.
    """
    status = rounding_status(model, names)
    if status != "ok":
        return RoundedRuns(None, None, status)
    dim = getattr(text_config(model), "hidden_size", None)
    width = dim if isinstance(dim, int) else 8192
    sequences = first_sequences(text, min(TOKENS, max(1, MOST_BYTES // (4 * len(names) * width))))
    if not sequences:
        return RoundedRuns(None, None, "not measured: no sequence of the text is short enough")
    numbered = dict(enumerate(stacked_batches(sequences, batch_size)))
    passes = [Pass(n, condition) for condition in (CLEAN, ROUNDED) for n in numbered]
    recorders = [
        RouteRecorder(model, EVERYTHING, names, lambda run, c=condition: run.condition == c)
        for condition in (CLEAN, ROUNDED)
    ]
    plan = Plan((Phase("noise", numbered, tuple(passes), logits="none"),))
    Runner(Model(model)).run(plan, recorders)
    clean, rounded = (recorder.trace() for recorder in recorders)
    return RoundedRuns(clean, rounded)


def own_noise(
    model: nn.Module, names: Sequence[str], text: TokenisedText, batch_size: int
) -> NoiseReport:
    """Run a piece of the text clean and rounded, and compare the routers.

    Arguments as for `rounded_runs`.
    """
    return noise_report(rounded_runs(model, names, text, batch_size))


class ServedRuns(NamedTuple):
    """What was measured of a model in the precision served.

    Attributes:
        serving: what the precision does to the model; None if it cannot be measured.
        noise: what it does to the scores of each layer, or why it cannot be measured.
    """

    serving: Serving | None
    noise: NoiseReport


def measure_serving(
    model: Model,
    names: Sequence[str],
    text: TokenisedText,
    batch_size: int,
    precision: str,
    progress: Progress | None = None,
) -> ServedRuns:
    """Run a piece of the text clean, in the precision served, and there with the clean routes.

    Args:
        model: the model, in float32.
        names: routers whose noise is reported; experts that change are counted in all of them.
        text: the text; its first sequences are run, `SERVED_TOKENS` tokens at most.
        batch_size: sequences per forward pass.
        precision: a name in `SERVED`.
        progress: called with stage, done and total.

    A model without logits shows the noise of its scores alone.
    """
    status = rounding_status(model.module, names)
    if status != "ok":
        return ServedRuns(None, NoiseReport((), status))
    sequences = first_sequences(text, _affordable_scores(model))
    numbered = dict(enumerate(stacked_batches(sequences, batch_size)))
    rounding = served_rounding(precision)
    condition, effects = Condition(rounding), FullEffects([rounding])
    clean, rounded = (
        RouteRecorder(model.module, SCORES, names, lambda run, c=watched: run.condition == c)
        for watched in (CLEAN, condition)
    )
    phase = audit_phase("served precision", numbered, [condition])
    try:
        Runner(model).run(Plan((phase,)), [effects, clean, rounded], progress)
    except NoLogitsError:
        return ServedRuns(None, own_noise(model.module, names, text, batch_size))
    runs = RoundedRuns(clean.trace(), rounded.trace(), precision=precision)
    counted = serving_effect(precision, effects.effects[rounding], clean.trace().layers)
    return ServedRuns(counted, noise_report(runs))


def _affordable_scores(model: Model) -> int:
    """Number of tokens whose scores fit the memory limit, twice."""
    experts = 0
    for router in find_routers(model.module).values():
        weights = [weight for weight in router.parameters() if weight.ndim == 2]
        experts += max((min(weight.shape) for weight in weights), default=256)
    return min(SERVED_TOKENS, max(1, MOST_SCORES // (16 * experts)))


def noise_report(runs: RoundedRuns) -> NoiseReport:
    """Compare the routers of a clean and a rounded run."""
    if runs.clean is None or runs.rounded is None:
        return NoiseReport((), runs.status)
    documents = runs.clean.documents.long()
    with one_thread():  # many small operations
        layers = [
            _layer_noise(clean, rounded, documents, runs.precision)
            for clean, rounded in zip(runs.clean.layers, runs.rounded.layers, strict=True)
            if gap_status(clean) == "ok"
        ]
    return NoiseReport(tuple(layers))


def rounding_status(model: nn.Module, names: Sequence[str]) -> str:
    """Return "ok" if rounding shows the noise of this model, else why not."""
    parameters = list(model.parameters())
    if any(parameter.is_meta for parameter in parameters):
        return "not measured: weights that are not in memory cannot be rounded"
    kinds = {p.dtype for p in parameters if p.is_floating_point()} - {torch.float32, torch.float64}
    if kinds:
        kind = str(next(iter(kinds))).removeprefix("torch.")
        return f"not measured: the model runs in {kind}, whose noise shows against float32 only"
    if sum(p.numel() * p.element_size() for p in parameters) > MOST_WEIGHTS:
        return f"not measured: a second copy of the weights exceeds {MOST_WEIGHTS >> 30} GiB"
    families = [family_of(model.get_submodule(name)) for name in names]
    if any(family is None or family.in_block for family in families):
        return "not measured: a router that is no module of its own cannot be rounded"
    return "ok"


def first_sequences(text: TokenisedText, most: int) -> list[Tensor]:
    """The first sequences with at most so many tokens; the beginning of one if it has more."""
    sequences, n_tokens = [], 0
    for sequence in text.sequences:
        if n_tokens + len(sequence) > most:
            break
        sequences.append(sequence)
        n_tokens += len(sequence)
    return sequences or [text.sequences[0][:most]]


def _layer_noise(
    clean: LayerTrace, rounded: LayerTrace, documents: Tensor, precision: str
) -> OwnNoise:
    """Size of the noise of one layer, its flips and the orders of ties at it."""
    k = clean.facts.k
    clean_scores, rounded_scores = (by_expert(layer) for layer in (clean, rounded))
    change = (rounded_scores - clean_scores).gather(1, clean.experts[:, k - 1 : k + 1].long())
    change = change[change.isfinite().all(dim=1)]
    delta = (change[:, 0] - change[:, 1]).abs()
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


def by_expert(layer: LayerTrace) -> Float[Tensor, "tokens experts"]:
    """Selection scores of all experts in float64; minus infinity where a group is left out."""
    assert layer.scores is not None
    scores = torch.full(
        (len(layer.scores), layer.facts.n_experts), -torch.inf, dtype=torch.float64, device="cpu"
    )
    return scores.scatter_(1, layer.experts.long(), layer.scores.double())
