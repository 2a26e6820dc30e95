"""Time until the tokens of a model first change experts, if rounding moves them at random.

The model runs a piece of text clean and with every number rounded (`analysis.model_effects`),
which gives, layer by layer,

    Σ      E[Δx Δxᵀ], Δx the change of the router's input: not a multiple of the identity

A hidden state that collects such changes as a random walk, dx = Σ^½ dB with one unit of time per
rounding, first changes its experts at the exit time of its top-k cell (Paper 1, Thm. 5.1). Only
W Σ Wᵀ matters to it, so walks are simulated in the space of the scores (`geometry.exit_time`).
"""

from dataclasses import dataclass
from typing import ClassVar, Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.analysis.inspect import linear_choice_status
from tieline.analysis.rounded_runs import NOISE_PRECISION, rounded_runs
from tieline.core.numerics import one_thread
from tieline.core.ranking import stable_topk
from tieline.core.records import Result
from tieline.core.setting_fields import takes_settings
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.command_settings import SubjectOptions, WalksSettings
from tieline.lab.geometry.exit_time import exit_bounds, exit_curve, face_quantile, top_k_cell
from tieline.lab.on_model.subject import Progress, open_subject
from tieline.measure.measure_settings import Measurement
from tieline.measure.noise_flips import logit_view
from tieline.models.demo import DEMO
from tieline.models.linear_routers import linear_weights
from tieline.models.model import ModelSource
from tieline.trace.record import LayerTrace

HORIZONS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
"""Times at which the flip probability is computed, in roundings."""
TOKENS_PER_LAYER, PATHS_PER_TOKEN, STEPS_PER_HORIZON = 48, 64, 8
"""Tokens of a layer, simulated paths of each, and time steps up to a horizon."""
EXTRA_RANKS = 8
"""Ranks beyond k that may enter the choice; walls of lower ranks are farther away."""


@dataclass(frozen=True)
class FlipWalk:
    """Distribution of the time at which tokens of a layer first change experts.

    Attributes:
        times: t, in roundings.
        lower: mean over tokens of the lower bound of P(flip by t), from the nearest wall.
        value: mean of P(flip by t), simulated, with its standard error over tokens.
        upper: mean of the upper bound, the sum over all walls.
        median: median over tokens of the time by which they have flipped with probability ½ or
            more, from the nearest wall.
        tokens: tokens that walked.
        directions: effective number of directions of the noise, (tr C)² / tr C² with C = W Σ Wᵀ
            without the common shift; at most E - 1.
    """

    times: tuple[float, ...]
    lower: tuple[float, ...]
    value: tuple[Estimate, ...]
    upper: tuple[float, ...]
    median: float
    tokens: int
    directions: float


@dataclass(frozen=True)
class LayerWalk:
    """The walk of one layer.

    Attributes:
        name: name of the layer's router.
        walk: times to the first flip, or the reason for none.
    """

    name: str
    walk: Measurement[FlipWalk]


@dataclass(frozen=True, repr=False)
class FlipWalks(Result):
    """Time until tokens first change experts as rounding noise accumulates, by layer.

    Attributes:
        model: name of the model.
        precision: the format whose noise drives the walks.
        layers: one record per layer, in order.
        status: "ok", or why nothing was measured.
        provenance: text, tokens, batch size and seed.
    """

    format: ClassVar[str] = "tieline-walks"

    model: str
    precision: str
    layers: tuple[LayerWalk, ...]
    status: str
    provenance: dict[str, object]

    @property
    def metrics(self) -> dict[str, float]:
        """Median roundings to the first flip by layer, "median:NAME"."""
        walks = ((layer.name, layer.walk.value) for layer in self.layers)
        return {f"median:{name}": walk.median for name, walk in walks if walk is not None}


@takes_settings(WalksSettings)
def walks(
    source: ModelSource = DEMO,
    *,
    settings: WalksSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[SubjectOptions],
) -> FlipWalks:
    """Simulate how long the tokens of a model keep their experts under its own rounding.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones.
        progress: called with stage, done and total.
    """
    settings = WalksSettings.of(settings, options)
    subject = open_subject(source, settings, "walks takes")
    runs = rounded_runs(subject.model, subject.routers, subject.text, settings.batch_size)
    layers: list[LayerWalk] = []
    if runs.clean is not None and runs.rounded is not None:
        weights = linear_weights(subject.model, runs.clean)
        with one_thread():  # many small operations
            for clean, rounded in zip(runs.clean.layers, runs.rounded.layers, strict=True):
                walk = layer_walk(clean, rounded, weights, settings.seed)
                layers.append(LayerWalk(clean.name, walk))
                if progress is not None:
                    progress("walks", len(layers), len(runs.clean.layers))
    provenance = subject.provenance
    return FlipWalks(subject.name, NOISE_PRECISION, tuple(layers), runs.status, provenance)


def layer_walk(
    clean: LayerTrace, rounded: LayerTrace, weights: dict[str, Tensor], seed: int
) -> Measurement[FlipWalk]:
    """Return the walk of one layer, or the reason for none.

    Args:
        clean: the layer in the clean run, with scores and inputs.
        rounded: the same in the rounded run.
        weights: matrices of linear routers by name (`linear_weights`).
        seed: of the paths.
    """
    status = linear_choice_status(clean, weights)
    if status != "ok":
        return Measurement(None, status)
    factor = score_noise_factor(clean, rounded, weights[clean.name])
    untied = (clean.inner_gap > 0).nonzero().squeeze(1)
    if not len(untied) or float(factor.abs().max()) == 0:
        return Measurement(None, "not answerable: rounding does not move the router's inputs")
    view = logit_view(clean)  # a monotone score without a bias ranks as its logits do
    scores = torch.zeros_like(view.scores).scatter_(1, clean.experts.long(), view.scores)
    walkers = untied[:: max(1, len(untied) // TOKENS_PER_LAYER)][:TOKENS_PER_LAYER]
    return Measurement(flip_walk(scores[walkers], clean.facts.k, factor, seed))


def score_noise_factor(
    clean: LayerTrace, rounded: LayerTrace, weight: Float[Tensor, "experts dim"]
) -> Float[Tensor, "experts directions"]:
    """Return L with L Lᵀ = W Σ Wᵀ without the common shift, Σ = E[Δx Δxᵀ] over the tokens."""
    assert clean.inputs is not None
    assert rounded.inputs is not None
    moved = (rounded.inputs.double() - clean.inputs.double()) @ weight.double().T
    moved = moved - moved.mean(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh(moved.T @ moved / len(moved))
    return vectors * values.clamp(min=0).sqrt()


def flip_walk(
    scores: Float[Tensor, "tokens experts"],
    k: int,
    factor: Float[Tensor, "experts directions"],
    seed: int = 0,
) -> FlipWalk:
    """Return the distribution of the first flip over tokens with these scores (`exit_time`).

    Args:
        scores: scores that are affine in the state, none of them a tie.
        k: experts chosen.
        factor: change of the scores per unit of each independent noise and √t.
        seed: of the paths.
    """
    ranked = stable_topk(scores, min(scores.shape[1], k + EXTRA_RANKS))
    walkers = [_token_walk(z, k, factor[ids], seed) for z, ids in zip(*ranked, strict=True)]
    lower, value, upper, nearest = (torch.stack(x) for x in zip(*walkers, strict=True))
    spread = factor @ factor.T
    return FlipWalk(
        times=HORIZONS,
        lower=tuple(lower.mean(dim=0).tolist()),
        value=tuple(mean_estimate(column) for column in value.T),
        upper=tuple(upper.mean(dim=0).tolist()),
        median=face_quantile(nearest, 0.5).median().item(),
        tokens=len(scores),
        directions=(spread.trace() ** 2 / spread.square().sum()).item(),
    )


def _token_walk(
    scores: Float[Tensor, " ranks"], k: int, factor: Float[Tensor, "ranks directions"], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bounds and value of a token's P(flip by t), and the distance of its nearest wall."""
    cell = top_k_cell(scores, k, factor)  # one for all horizons, each of which has steps of its own
    bounds = exit_bounds(cell.distances, torch.tensor(HORIZONS, dtype=torch.float64))
    curves = [exit_curve(cell, t, STEPS_PER_HORIZON, PATHS_PER_TOKEN, seed) for t in HORIZONS]
    value = torch.stack([curve.value[-1] for curve in curves])
    return bounds.lower, value, bounds.upper, cell.distances.min()
