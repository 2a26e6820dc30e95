"""Fit a new router to the choices of the old one, on tokens that the model routes.

    samples = router_inputs_and_logits(model, plans, batches)   x (T, D), z (T, E) by router
    fit = fit_router(new, samples[name], ...)       minimise over the new router's parameters

    softmax families     mean KL(softmax(z) ‖ softmax(z'))        z' the new router's scores
    sigmoid families     mean Σ_e KL of Bernoulli(σ(z_e)) and Bernoulli(σ(z'_e))

Both are lowest where the new weights are the old ones, so that a token keeps its experts and their
shares. A cosine router starts at an exact form if it can: softmax does not change if one vector c
is subtracted from all rows of W, and with c the centre of the sphere through these rows all
‖w_e − c‖ are one radius r; for tokens of one norm

    (w_e − c)·x = r ‖x‖ cos(w_e − c, x),

which is a cosine router of temperature 1/(r ‖x‖) (paper 2, eq. 2). It ranks the experts of every
token as the old router does, whatever the token's norm; only how even their weights are depends on
the norm, which a cosine cannot see. Such a sphere exists where E <= D + 1 and the rows are in
general position; then the temperature alone is fitted. Otherwise the rows are fitted with it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import ParameterError, require
from tieline.lab.on_model.subject import Progress
from tieline.models.class_changes import Call
from tieline.models.linear_routers import logits_matrix
from tieline.models.model import Model
from tieline.models.router_rule import at_least_float32, combine_rule, logits_up_to_shift
from tieline.models.smoothed_router import LayerPlan
from tieline.routing.routers import CosineRouter, Router
from tieline.run.calibration import watch_routers
from tieline.run.condition import CLEAN
from tieline.run.runner import Runner

Ids = Int[Tensor, "rows length"]

MAX_INPUT_BYTES = 2 << 30
"""Largest total size of the router inputs recorded for a fit."""

BATCH_TOKENS = 2048
"""Tokens of one step of Adam."""

ROUTER_STEPS, TEMPERATURE_STEPS = 400, 60
"""Steps of Adam for all parameters, and for the temperature alone."""

LEARNING_RATE = 0.02
"""Learning rate of Adam, relative to the root mean square of each parameter."""


@dataclass(frozen=True)
class RouterSamples:
    """Inputs and logits of a router on the tokens of a text.

    Attributes:
        inputs: tokens (T, D), float32.
        logits: (T, E), float32; logarithms where the family returns probabilities.
    """

    inputs: Float[Tensor, "tokens width"]
    logits: Float[Tensor, "tokens experts"]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Return inputs and logits in batches of `BATCH_TOKENS` tokens."""
        columns = (self.inputs, self.logits)
        return zip(*(column.split(BATCH_TOKENS) for column in columns), strict=True)


@dataclass(frozen=True)
class RouterFit:
    """Divergence of a new router from the old one on the text it was fitted to.

    Attributes:
        start: loss before the fit, nats per token.
        loss: loss after the fit.
        temperature: temperature of a cosine router; None for others.
        steps: steps of Adam on all parameters; 0 if the start already ranked as the old router.
    """

    start: float
    loss: float
    temperature: float | None
    steps: int


class _RouterRecorder:
    """Handler that records inputs and logits of a router and changes nothing."""

    def __init__(self, plan: LayerPlan) -> None:
        self._plan = plan
        self._inputs: list[Tensor] = []
        self._logits: list[Tensor] = []

    def __call__(self, router: nn.Module, call: Call, output: Any) -> Any:
        args, kwargs = call
        tokens = args[0] if args else kwargs["hidden_states"]
        logits = self._plan.family.layout.logits(args, output).detach()
        logits = logits_up_to_shift(self._plan.family, at_least_float32(logits))
        self._inputs.append(tokens.detach().reshape(-1, tokens.shape[-1]).float().cpu().clone())
        self._logits.append(logits.float().cpu().clone())
        return output

    @property
    def samples(self) -> RouterSamples:
        require(bool(self._inputs), f"layer {self._plan.name!r} did not run on the text")
        return RouterSamples(torch.cat(self._inputs), torch.cat(self._logits))


def router_inputs_and_logits(
    model: nn.Module,
    plans: Sequence[LayerPlan],
    batches: Sequence[Ids],
    progress: Progress | None = None,
    stage: str = "old choices",
) -> dict[str, RouterSamples]:
    """Run the tokens once and return inputs and logits of every router."""
    width = max(
        (m.shape[1] for p in plans if (m := logits_matrix(p.router)) is not None), default=0
    )
    size = 4 * len(plans) * width * sum(ids.numel() for ids in batches)
    require(
        size <= MAX_INPUT_BYTES,
        f"the inputs of {len(plans)} routers take {size / 2**30:.1f} GiB, at most "
        f"{MAX_INPUT_BYTES >> 30} are kept: fit on fewer tokens",
        ParameterError,
    )
    recorders = {plan.name: _RouterRecorder(plan) for plan in plans}
    watch_routers(Runner(Model(model)), {CLEAN: recorders}, batches, progress, stage)
    return {name: watcher.samples for name, watcher in recorders.items()}


def is_softmax(plan: LayerPlan) -> bool:
    """Return whether a router's choice depends only on differences of logits, as in a softmax."""
    return combine_rule(plan.family, plan.router).startswith("softmax") and plan.units in (
        "logits",
        "softmax",
    )


def fit_router(
    new: Router,
    samples: RouterSamples,
    *,
    softmax: bool = True,
    steps: int | None = None,
    seed: int = 0,
    temperature: float | None = None,
) -> RouterFit:
    """Fit a router in place to the logits of another one.

    Args:
        new: the router; a cosine router without a projection starts at the sphere of its rows.
        samples: inputs and logits of the old router.
        softmax: whether only differences of logits matter; otherwise each expert has a sigmoid.
        steps: steps of Adam, with a rate that falls to 0; None for `ROUTER_STEPS`, or for 0 if the
            start already ranks the experts of all tokens as the old router.
        seed: seed of the order of tokens.
        temperature: temperature of a cosine router; None to fit it.
    """
    require(steps is None or steps >= 0, f"steps must be at least 0, got {steps}")
    cosine = new if isinstance(new, CosineRouter) else None
    if cosine is not None:
        start_cosine(cosine, samples.inputs, softmax, temperature)
    before = _mean_fit_loss(new, samples, softmax)
    if steps is None:
        steps = 0 if _has_same_ranking(new, samples) else ROUTER_STEPS
    fits_temperature = cosine is not None and temperature is None
    scale = nn.Parameter(torch.zeros(()))
    if steps or fits_temperature:
        fitted_parameters = list(new.parameters()) if steps else []
        _fit_by_adam(
            new,
            samples,
            softmax,
            steps or TEMPERATURE_STEPS,
            seed,
            fitted_parameters,
            scale if fits_temperature else None,
        )
    if cosine is not None and fits_temperature:
        cosine.temperature = cosine.temperature / math.exp(scale.item())
    loss_after = _mean_fit_loss(new, samples, softmax)
    return RouterFit(before, loss_after, None if cosine is None else cosine.temperature, steps)


@torch.no_grad()
def _has_same_ranking(new: Router, samples: RouterSamples) -> bool:
    """Return whether the experts' ranks equal the old ones at more than 99.9 % of places."""
    same = [
        (_new_scores(new, x).argsort(dim=1) == z.argsort(dim=1)).float().mean()
        for x, z in samples.batches()
    ]
    return torch.stack(same).mean().item() > 1 - 1e-3


@torch.no_grad()
def start_cosine(
    new: CosineRouter,
    inputs: Float[Tensor, "tokens width"],
    softmax: bool,
    temperature: float | None = None,
) -> None:
    """Move the rows of a cosine router to one sphere, and set the temperature that matches.

    Args:
        new: a cosine router with the rows of the old linear router.
        inputs: tokens, whose mean norm is used.
        softmax: whether one vector may be subtracted from all rows.
        temperature: temperature to set instead of the matching one.
    """
    if new.projection is None and softmax:
        new.weight.sub_(sphere_centre(new.weight).to(new.weight))
    radius = new.weight.norm(dim=1).mean().item() + new.tau[0]
    embedded = inputs if new.projection is None else F.linear(inputs, new.projection.float())
    norm = embedded.norm(dim=1).mean().item() + new.tau[1]
    matching = 1 / (radius * norm) if radius * norm > 0 else 1.0
    new.temperature = matching if temperature is None else temperature


def sphere_centre(rows: Float[Tensor, "experts width"]) -> Float[Tensor, " width"]:
    """Return the c nearest to the mean with equal ‖w_e − c‖ for all rows, or by least squares.

    2 (w_e − w̄)·(c − w̄) = ‖w_e − w̄‖² − const, solved in float64.
    """
    rows = rows.double()
    mean = rows.mean(dim=0)
    centred = rows - mean
    squares = centred.square().sum(dim=1)
    target = (squares - squares.mean()) / 2
    offset = torch.linalg.lstsq(centred, target.unsqueeze(1), driver="gelsd").solution.squeeze(1)
    return mean + offset


def _fit_loss(scores: Tensor, old_logits: Tensor, softmax: bool) -> Tensor:
    """Return the mean divergence of the old weights from the new ones, nats per token."""
    if softmax:
        old, new = old_logits.log_softmax(dim=-1), scores.log_softmax(dim=-1)
        return (old.exp() * (old - new)).sum(dim=-1).mean()
    share = old_logits.sigmoid()
    cross = F.binary_cross_entropy_with_logits(scores, share, reduction="none")
    entropy = F.binary_cross_entropy_with_logits(old_logits, share, reduction="none")
    return (cross - entropy).sum(dim=-1).mean()


@torch.no_grad()
def _mean_fit_loss(router: Router, samples: RouterSamples, softmax: bool) -> float:
    """Return the mean loss over all tokens."""
    total = 0.0
    for inputs, old_scores in samples.batches():
        total += _fit_loss(_new_scores(router, inputs), old_scores, softmax).item() * len(inputs)
    return total / len(samples.inputs)


def _new_scores(new: Router, x: Tensor) -> Tensor:
    """Return the new router's scores of x, in float32 on the CPU."""
    like = next(new.parameters())
    return new(x.to(like.device, like.dtype)).float().cpu()


def _fit_by_adam(
    new: Router,
    samples: RouterSamples,
    softmax: bool,
    steps: int,
    seed: int,
    parameters: Sequence[nn.Parameter],
    log_scale: nn.Parameter | None,
) -> None:
    """Run Adam with a rate relative to each parameter's size, decaying linearly to 0."""
    required_gradients = [p.requires_grad for p in parameters]
    groups = [{"params": [p], "lr": LEARNING_RATE * _root_mean_square(p)} for p in parameters]
    if log_scale is not None:
        groups.append({"params": [log_scale], "lr": LEARNING_RATE})
    draw, tokens = torch.Generator().manual_seed(seed), len(samples.inputs)
    optimiser = torch.optim.Adam(groups)
    decay = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: 1 - n / steps)
    with torch.enable_grad():
        for parameter in parameters:
            parameter.requires_grad_(True)
        for _ in range(steps):
            rows = torch.randint(tokens, (min(BATCH_TOKENS, tokens),), generator=draw)
            scores = _new_scores(new, samples.inputs[rows])
            scores = scores if log_scale is None else scores * log_scale.exp()
            optimiser.zero_grad()
            _fit_loss(scores, samples.logits[rows], softmax).backward()
            optimiser.step()
            decay.step()
    for parameter, before in zip(parameters, required_gradients, strict=True):
        parameter.requires_grad_(before).grad = None


def _root_mean_square(parameter: Tensor) -> float:
    """Return the root mean square of the entries, at least 1e-4."""
    return max(parameter.detach().float().square().mean().sqrt().item(), 1e-4)
