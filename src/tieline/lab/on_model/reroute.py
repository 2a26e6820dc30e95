"""Replace a model's routers by others that are fitted to its choices (paper 2).

    done = reroute("org/model", router="perturbed")
    done.metrics["kept"], done.loss_change
    done.save("rerouted")

A copy of the model gets a new router in every layer, fitted to the old choices on the first tokens
of the text, and is compared with the original on the tokens that follow:

    kept         share of a token's k experts that both choose, each model with its own inputs
    loss         of the original, and the change, paired by token, clustered by sequence
    moved        KL of the new predictions to the old ones
    flip@bf16    share of tokens that change experts if the scores are rounded, before and after
    at zero      max |z(δx̂) − z(0)| for δ = 1e-6: how far scores jump at the zero vector
"""

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.errors import ParameterError, require
from tieline.core.numerics import one_thread
from tieline.core.predictions import kl_divergence, next_token_losses
from tieline.core.records import Result
from tieline.core.setting_fields import takes_settings
from tieline.core.statistics import Estimate, SequenceSums
from tieline.lab.command_settings import ROUTER_KINDS, RerouteOptions, RerouteSettings
from tieline.lab.on_model.rerouted_model import FEATURE, ROUTER, reroute_
from tieline.lab.on_model.router_fit import (
    RouterFit,
    RouterSamples,
    fit_router,
    is_softmax,
    router_inputs_and_logits,
)
from tieline.lab.on_model.subject import Progress
from tieline.measure.measures import LayerMeasures, measure
from tieline.models.capture import capture
from tieline.models.demo import DEMO
from tieline.models.families import chosen_routers
from tieline.models.model import Model, ModelSource
from tieline.models.saved_models import changes_of, save_model
from tieline.models.smoothed_router import LayerPlan, layer_plan
from tieline.routing.routers import Router
from tieline.run.corpus import default_sequence_length, stacked_batches, text_and_origin, tokenise
from tieline.run.forward import forward, only_running
from tieline.trace.record import RoutingTrace

NEAR_ZERO = 1e-6
"""Norm δ of the vectors whose scores are compared with the scores of the zero vector."""


@dataclass(frozen=True)
class ReroutedLayer:
    """One layer before and after rerouting.

    Attributes:
        name: name of its router.
        fit: divergence of the new router from the old one on the text that it was fitted to.
        kept: share of a token's k experts that both routers choose.
        gap_before: median gap of the old scores.
        gap_after: median gap of the new scores.
        flips_before: share of tokens that bf16 rounding of the scores flips; None if unknown.
        flips_after: the same for the new router.
        at_zero: largest jump of a new score at the zero vector.
    """

    name: str
    fit: RouterFit
    kept: Estimate
    gap_before: float | None
    gap_after: float | None
    flips_before: float | None
    flips_after: float | None
    at_zero: float


@dataclass(frozen=True, repr=False)
class Rerouted(Result):
    """A rerouted model, compared with the original.

    Attributes:
        model: name of the model.
        router: "cosine", "perturbed", "linear" or "quadratic".
        options: arguments of the new routers that all layers share.
        layers: one record per router.
        kept: share of experts that both models choose, over all layers.
        loss: mean loss of the original, nats per token.
        loss_change: loss of the rerouted model minus `loss`.
        moved: KL of the new predictions to the old ones, nats per token.
        tokens: tokens that were measured.
        sequences: sequences that hold them, the clusters of the standard errors.
        fit_tokens: tokens that the routers were fitted to.
        provenance: texts and seed.
        rerouted: the model itself; not part of the JSON.
        tokenizer: its tokenizer; not part of the JSON.
    """

    format: ClassVar[str] = "tieline-reroute"

    model: str
    router: str
    options: dict[str, object]
    layers: tuple[ReroutedLayer, ...]
    kept: Estimate
    loss: Estimate
    loss_change: Estimate
    moved: Estimate
    tokens: int
    sequences: int
    fit_tokens: int
    provenance: dict[str, object]
    rerouted: Any = field(default=None, metadata={"json": False}, compare=False)
    tokenizer: Any = field(default=None, metadata={"json": False}, compare=False)

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "kept", "loss", "loss_change", "moved", "at_zero", ...."""
        estimates = {"kept": self.kept, "loss": self.loss, "loss_change": self.loss_change}
        numbers = {name: item.value for name, item in (estimates | {"moved": self.moved}).items()}
        numbers["kept:worst"] = min((item.kept.value or 0.0 for item in self.layers), default=None)
        numbers["at_zero"] = max((item.at_zero for item in self.layers), default=None)
        return {name: value for name, value in numbers.items() if value is not None}

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Save the rerouted model, its tokenizer and this result in a new folder.

        Args:
            folder: the folder to make.
            overwrite: whether an existing model may be replaced.
        """
        texts = {"tieline_reroute": self.to_json()}
        save_model(folder, self.rerouted, self.tokenizer, overwrite=overwrite, **texts)


@takes_settings(RerouteSettings)
def reroute(
    source: ModelSource = DEMO,
    *,
    settings: RerouteSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[RerouteOptions],
) -> Rerouted:
    """Copy a model and replace its routers by others, fitted to the old choices.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones. `fit` and `text` may also be
            the texts themselves. `text` defaults to the rest of `fit`, or to the text in the
            box. A named model is loaded in float32.
        progress: called with stage, done and total while the work goes on.
    """
    settings = RerouteSettings.of(settings, options)
    loaded = Model.open(
        source,
        "reroute takes",
        dtype="fp32",
        trust_remote_code=settings.trust_remote_code,
        device=settings.device,
        revision=settings.revision,
    )
    require_not_rerouted(loaded.module)
    texts = _fit_and_measure_texts(loaded, settings)
    size = settings.batch_size
    fitted, measured = (list(stacked_batches(rows, size)) for rows in (texts.fit, texts.measured))
    routers = chosen_routers(loaded.module, None)
    plans = [layer_plan(name, router) for name, router in routers.items()]
    changed, fits, samples = _rerouted_copy(loaded.module, plans, fitted, settings, progress)
    sides = _compare_rerouted(loaded.module, changed, measured, progress)
    return Rerouted(
        model=loaded.name or type(loaded.module).__name__,
        router=settings.router,
        options=settings.router_options,
        layers=_rerouted_layers(plans, fits, samples, changed, sides),
        kept=sides.kept_overall(),
        loss=sides.loss.mean(),
        loss_change=sides.change.mean(),
        moved=sides.moved.mean(),
        tokens=sum(ids.numel() for ids in measured),
        sequences=sum(len(ids) for ids in measured),
        fit_tokens=sum(ids.numel() for ids in fitted),
        provenance={"fit": texts.origins[0], "text": texts.origins[1], "seed": settings.seed},
        rerouted=changed,
        tokenizer=loaded.tokenizer,
    )


def require_not_rerouted(model: nn.Module) -> None:
    """Raise if the model was rerouted already, since its own choices are gone."""
    before = changes_of(getattr(model, "config", None)).get(FEATURE)
    if before is not None:
        kind = before.get("router") or before.get("gate")
        raise ParameterError(
            f"the model was rerouted already (to {kind!r}): reroute the model that it was made of"
        )


class _TokenisedTexts(NamedTuple):
    """Sequences to fit to and to measure on, and the origin of both texts."""

    fit: list[Tensor]
    measured: list[Tensor]
    origins: tuple[str, str]


def _fit_and_measure_texts(loaded: Model, settings: RerouteSettings) -> _TokenisedTexts:
    """Tokenise one text, or two, into sequences to fit to and others to measure on."""
    fit, text = settings.fit, settings.text
    fit_tokens, tokens = settings.fit_tokens, settings.tokens
    length = min(default_sequence_length(loaded.module), fit_tokens, tokens)
    if fit is not None and text is not None:
        (fit_text, origin), (other_text, second) = text_and_origin(fit), text_and_origin(text)
        first = tokenise(loaded.tokenizer, fit_text, fit_tokens, length).sequences
        other_sequences = tokenise(loaded.tokenizer, other_text, tokens, length).sequences
    else:
        only_text, origin = text_and_origin(text if fit is None else fit)
        second, count = origin, -(-fit_tokens // length)
        sequences = tokenise(loaded.tokenizer, only_text, fit_tokens + tokens, length).sequences
        first, other_sequences = sequences[:count], sequences[count:]
    measured = [sequence for sequence in other_sequences if len(sequence) > 1]
    require(
        bool(first) and bool(measured),
        f"the text is too short to fit to {fit_tokens} of its tokens and to measure on others",
    )
    return _TokenisedTexts(list(first), measured, (origin, second))


def _rerouted_copy(
    model: nn.Module,
    plans: list[LayerPlan],
    fitted: list[Tensor],
    settings: RerouteSettings,
    progress: Progress | None,
) -> tuple[nn.Module, dict[str, RouterFit], dict[str, RouterSamples]]:
    """Return a copy with fitted routers, the quality of each fit, and the samples fitted to."""
    kind, seed = ROUTER_KINDS[settings.router], settings.seed
    options = dict(settings.router_options)
    changed = copy.deepcopy(model)
    samples = router_inputs_and_logits(model, plans, fitted, progress)
    record = reroute_(changed, router=kind, router_options=options, seed=seed)
    fits = {}
    for index, plan in enumerate(plans):
        new: Any = changed.get_submodule(f"{plan.name}.{ROUTER}")
        softmax = is_softmax(plan)
        fits[plan.name] = fit_router(
            new,
            samples[plan.name],
            softmax=softmax,
            steps=settings.steps,
            seed=seed,
            temperature=settings.temperature,
        )
        if progress is not None:
            progress("fit", index + 1, len(plans))
    temperatures = {name: fit.temperature for name, fit in fits.items()}
    layer_options = {n: {"temperature": t} for n, t in temperatures.items() if t is not None}
    record.save_layer_options(changed, layer_options)
    return changed, fits, samples


@dataclass
class _BothModels:
    """Routing, loss and KL of both models on the same tokens."""

    before: RoutingTrace
    after: RoutingTrace
    shape: list[tuple[int, int]]
    loss: SequenceSums
    change: SequenceSums
    moved: SequenceSums

    def kept(self, index: int) -> SequenceSums:
        """Return sums of the share of experts that both models choose, for a layer's tokens."""
        old, new = (
            trace.layers[index].experts[:, : trace.layers[index].facts.k].long()
            for trace in (self.before, self.after)
        )
        same = (old.unsqueeze(2) == new.unsqueeze(1)).any(dim=2).double().mean(dim=1)
        sums, start = SequenceSums(), 0
        for rows, length in self.shape:
            sums.add(same[start : start + rows * length].view(rows, length))
            start += rows * length
        return sums

    def kept_overall(self) -> Estimate:
        """Return the mean share of experts that both models choose, over all layers."""
        first, *others = (self.kept(index) for index in range(len(self.before.layers)))
        return first.joined(*others).mean()


def _compare_rerouted(
    model: nn.Module, changed: nn.Module, measured: list[Tensor], progress: Progress | None
) -> _BothModels:
    """Run the model and its rerouted copy on the same tokens."""
    sums = [SequenceSums() for _ in range(3)]
    with only_running(model), only_running(changed), capture(model) as old, capture(changed) as new:
        for number, ids in enumerate(measured):
            before, after = (forward(side, ids).logits for side in (model, changed))
            clean = next_token_losses(before, ids)
            quantities = (
                clean,
                next_token_losses(after, ids) - clean,
                kl_divergence(before, after),
            )
            for item, values in zip(sums, quantities, strict=True):
                item.add(values)
            if progress is not None:
                progress("compare", number + 1, len(measured))
    shape = [(ids.shape[0], ids.shape[1]) for ids in measured]
    return _BothModels(old.trace(), new.trace(), shape, *sums)


def _rerouted_layers(
    plans: list[LayerPlan],
    fits: dict[str, RouterFit],
    samples: dict[str, RouterSamples],
    changed: nn.Module,
    sides: _BothModels,
) -> tuple[ReroutedLayer, ...]:
    """Return one record per router: choices kept, fit, gaps and bf16 flips before and after."""
    names = [layer.name for layer in sides.before.layers]
    with one_thread():
        measures = [measure(trace).layers for trace in (sides.before, sides.after)]
    records = []
    for plan in plans:
        index = names.index(plan.name)
        gaps = [trace.layers[index].gap.median().item() for trace in (sides.before, sides.after)]
        flips = [_bf16_flips(layers[index]) for layers in measures]
        new: Any = changed.get_submodule(f"{plan.name}.{ROUTER}")
        zero = jump_at_zero(new, samples[plan.name].inputs)
        kept = sides.kept(index).mean()
        numbers = (gaps[0], gaps[1], flips[0], flips[1], zero)
        records.append(ReroutedLayer(plan.name, fits[plan.name], kept, *numbers))
    return tuple(records)


def _bf16_flips(layer: LayerMeasures) -> float | None:
    """Return the share of tokens that bf16 rounding flips; None if unknown."""
    rates = {row.precision: row.flip for row in layer.precision.value or ()}
    return rates["bf16"].value if "bf16" in rates else None


@torch.no_grad()
def jump_at_zero(router: Router, inputs: Float[Tensor, "tokens width"]) -> float:
    """Return the largest |z(δ x̂) − z(0)| over tokens, δ = `NEAR_ZERO`: ≈ 0 if z is continuous.

    A plain cosine router depends on the direction alone for x ≠ 0 and is 0 at the zero vector;
    with τ2 > 0 its scores are at most δ / (τ2 t) (paper 2, eq. 7).
    """
    double_router = copy.deepcopy(router).double().cpu()
    directions = inputs[:1024].double()
    directions = directions / directions.norm(dim=1, keepdim=True).clamp(min=1e-30)
    scores_beside, scores_at_zero = (
        double_router(NEAR_ZERO * directions),
        double_router(torch.zeros_like(directions[:1])),
    )
    return (scores_beside - scores_at_zero).abs().max().item()
