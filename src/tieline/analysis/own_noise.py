"""What the noise of a low precision does near the ties of a model: orders of ties, times to a flip.

The model runs a piece of text clean and with every number rounded, as `tieline audit` does it. The
differences give, layer by layer,

    ε      median |δ| / 0.6745, δ the change of c_[k] - c_[k+1]: the size of the noise of a gap
    Σ      E[Δx Δxᵀ], Δx the change of the router's input: not a multiple of the identity

At tolerance ε the orders of ties say how many experts the noise can mix (Paper 1, Def. 3.2). A
hidden state that collects such changes as a random walk, dx = Σ^½ dB with one unit of time per
rounding, first changes its experts at the exit time of its top-k cell (Paper 1, Thm. 5.1). Only
W Σ Wᵀ matters to it, so walks are simulated in the space of the scores (`geometry.exit_time`).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.analysis.inspection import FlipWalk, NoiseReport, OwnNoise
from tieline.analysis.linear import linear_choice, linear_weights
from tieline.core.numerics import one_thread
from tieline.core.ranking import stable_topk
from tieline.core.statistics import Estimate, clustered_error, mean_estimate
from tieline.lab.geometry.diffusion import exit_curve, top_k_cell
from tieline.lab.geometry.exit_time import exit_bounds, face_quantile
from tieline.measure.boundary import order_shares, tie_order
from tieline.measure.flips import logit_view
from tieline.measure.measure_records import Measurement
from tieline.measure.measures import scored
from tieline.models.capture import capture
from tieline.models.emulate import emulate
from tieline.models.families import family_of
from tieline.models.running import batches, forward, only_running, text_config
from tieline.models.smooth_calibration import NORMAL_MEDIAN
from tieline.run.corpus import TokenisedText
from tieline.trace.record import LayerTrace, RoutingTrace

PRECISION = "bf16"
"""The format whose noise is measured."""
TOKENS = 2048
"""Most tokens that run twice for it."""
MOST_BYTES = 1 << 28
"""Largest size of the router inputs that one of the two runs keeps."""
MOST_WEIGHTS = 8 << 30
"""Largest size of the weights, of which the rounded run holds a second copy."""
MOST_ORDER = 6
"""Tie orders from this one on are counted together."""
HORIZONS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
"""Times at which the walks are looked at, in roundings."""
WALKERS, PATHS, STEPS = 48, 64, 8
"""Tokens, paths of each and steps up to a horizon."""
RANKS = 8
"""Ranks beyond k that may enter a walker's choice; the walls of the others are farther away."""


def own_noise(
    model: nn.Module,
    names: Sequence[str],
    text: TokenisedText,
    batch_size: int,
    seed: int = 0,
) -> NoiseReport:
    """Run a piece of the text clean and rounded, and compare the routers.

    Args:
        model: the model, in float32.
        names: its routers to look at.
        text: the text; its first sequences are run, `TOKENS` tokens at most.
        batch_size: sequences per forward pass.
        seed: of the walks.
    """
    status = _possible(model, names)
    if status != "ok":
        return NoiseReport((), status)
    some = _first(text, _affordable(model, names))
    if not some:
        return NoiseReport((), "not measured: no sequence of the text is short enough")
    with only_running(model):
        clean = _run(model, names, some, batch_size)
        weights = linear_weights(model, clean)
        with emulate(model, PRECISION, "all"):
            rounded = _run(model, names, some, batch_size)
    with one_thread():  # many small operations
        found = [
            _layer(a, b, weights, clean.documents.long(), seed)
            for a, b in zip(clean.layers, rounded.layers, strict=True)
            if scored(a) == "ok"
        ]
    return NoiseReport(tuple(found))


def _possible(model: nn.Module, names: Sequence[str]) -> str:
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


def _affordable(model: nn.Module, names: Sequence[str]) -> int:
    """Number of tokens whose router inputs fit the memory limit."""
    dim = getattr(text_config(model), "hidden_size", None)
    width = dim if isinstance(dim, int) else 8192
    return min(TOKENS, max(1, MOST_BYTES // (4 * len(names) * width)))


def _first(text: TokenisedText, most: int) -> list[Tensor]:
    """The first sequences with at most so many tokens; the beginning of one if it has more."""
    kept, used = [], 0
    for sequence in text.sequences:
        if used + len(sequence) > most:
            break
        kept.append(sequence)
        used += len(sequence)
    return kept or [text.sequences[0][:most]]


def _run(
    model: nn.Module, names: Sequence[str], sequences: Sequence[Tensor], batch_size: int
) -> RoutingTrace:
    settings = {"keep": "inputs", "ranks": "all", "epsilons": (), "distances": False}
    with capture(model, layers=names, **settings) as seen:
        for ids in batches(sequences, batch_size):
            forward(model, ids)
        return seen.trace()


def _layer(
    clean: LayerTrace,
    rounded: LayerTrace,
    weights: dict[str, Tensor],
    documents: Tensor,
    seed: int,
) -> OwnNoise:
    k = clean.facts.k
    before, after = (by_expert(layer) for layer in (clean, rounded))
    change = (after - before).gather(1, clean.experts[:, k - 1 : k + 1].long())
    change = change[change.isfinite().all(dim=1)]
    delta = (change[:, 0] - change[:, 1]).abs()
    epsilon = delta.median().item() / NORMAL_MEDIAN if len(delta) else 0.0
    sets = [layer.experts[:, :k].long().sort(dim=1).values for layer in (clean, rounded)]
    flipped = (sets[0] != sets[1]).any(dim=1).double()
    error = clustered_error(flipped, documents)
    share = mean_estimate(flipped)
    orders = torch.tensor([1.0] + [0.0] * MOST_ORDER)
    if epsilon > 0:
        ranked = before.masked_fill(before.isneginf(), before[before.isfinite()].min() - 1e3)
        orders = order_shares(tie_order(ranked, k, epsilon), MOST_ORDER)
    return OwnNoise(
        name=clean.name,
        precision=PRECISION,
        tokens=len(clean.experts),
        epsilon=epsilon,
        flipped=share if error is None else Estimate(share.value, error),
        orders=tuple(orders.tolist()),
        walk=_walk(clean, rounded, weights, seed),
    )


def by_expert(layer: LayerTrace) -> Float[Tensor, "tokens experts"]:
    """Selection scores of all experts in float64; minus infinity where a group is left out."""
    assert layer.scores is not None
    every = torch.full((len(layer.scores), layer.facts.n_experts), -torch.inf, dtype=torch.float64)
    return every.scatter_(1, layer.experts.long(), layer.scores.double())


def _walk(
    clean: LayerTrace, rounded: LayerTrace, weights: dict[str, Tensor], seed: int
) -> Measurement[FlipWalk]:
    status = linear_choice(clean, weights)
    if status != "ok":
        return Measurement(None, status)
    pull = noise_pull(clean, rounded, weights[clean.name])
    places = (clean.inner_gap > 0).nonzero().squeeze(1)
    if not len(places) or float(pull.abs().max()) == 0:
        return Measurement(None, "not answerable: rounding does not move the router's inputs")
    view = logit_view(clean)  # a monotone score without a bias ranks as its logits do
    scores = torch.zeros_like(view.scores).scatter_(1, clean.experts.long(), view.scores)
    some = places[:: max(1, len(places) // WALKERS)][:WALKERS]
    return Measurement(flip_walk(scores[some], clean.facts.k, pull, seed))


def noise_pull(
    clean: LayerTrace, rounded: LayerTrace, weight: Float[Tensor, "experts dim"]
) -> Float[Tensor, "experts directions"]:
    """L with L Lᵀ = W Σ Wᵀ without the common shift, Σ = E[Δx Δxᵀ] over the tokens."""
    assert clean.inputs is not None
    assert rounded.inputs is not None
    moved = (rounded.inputs.double() - clean.inputs.double()) @ weight.double().T
    moved = moved - moved.mean(dim=1, keepdim=True)
    values, vectors = torch.linalg.eigh(moved.T @ moved / len(moved))
    return vectors * values.clamp(min=0).sqrt()


def flip_walk(
    scores: Float[Tensor, "tokens experts"],
    k: int,
    pull: Float[Tensor, "experts directions"],
    seed: int = 0,
) -> FlipWalk:
    """The distribution of the first flip over tokens with these scores (`geometry.exit_time`).

    Args:
        scores: scores that are affine in the state, none of them a tie.
        k: experts chosen.
        pull: change of the scores per unit of each independent noise and √t.
        seed: of the paths.
    """
    ranked = stable_topk(scores, min(scores.shape[1], k + RANKS))
    walkers = [_walker(z, k, pull[ids], seed) for z, ids in zip(*ranked, strict=True)]
    lower, value, upper, nearest = (torch.stack(x) for x in zip(*walkers, strict=True))
    spread = pull @ pull.T
    return FlipWalk(
        times=HORIZONS,
        lower=tuple(lower.mean(dim=0).tolist()),
        value=tuple(mean_estimate(column) for column in value.T),
        upper=tuple(upper.mean(dim=0).tolist()),
        median=face_quantile(nearest, 0.5).median().item(),
        tokens=len(scores),
        directions=(spread.trace() ** 2 / spread.square().sum()).item(),
    )


def _walker(
    scores: Float[Tensor, " ranks"], k: int, pull: Float[Tensor, "ranks directions"], seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Bounds and simulated P(flip by t) of one token at every horizon, and its nearest wall."""
    cell = top_k_cell(scores, k, pull)  # one for all horizons, each of which has steps of its own
    bounds = exit_bounds(cell.distances, torch.tensor(HORIZONS, dtype=torch.float64))
    curves = [exit_curve(cell, t, STEPS, PATHS, seed) for t in HORIZONS]
    value = torch.stack([curve.value[-1] for curve in curves])
    return bounds.lower, value, bounds.upper, cell.distances.min()
