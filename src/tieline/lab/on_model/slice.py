"""A plane slice through the input space of a model's router, checked against the router itself.

The plane goes through the hidden states of three tokens (Paper 3, section 3). Cells are exact
polygons (`tropical.plane_cells`), one per coalition of experts; the band is where the gap is below
the noise of the model (`measure_router_noise`). The router is then run at random points of the
plane: its choice must be the coalition of the cell that holds the point.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Unpack

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.analysis.inspect import linear_choice_status, router_inputs_fit
from tieline.analysis.inspect_records import NoiseReport
from tieline.analysis.rounded_runs import measure_router_noise
from tieline.core.errors import TraceError, UnsupportedModelError, require
from tieline.core.records import Result
from tieline.core.setting_fields import takes_settings
from tieline.lab.command_settings import SliceOptions, SliceSettings
from tieline.lab.on_model.subject import Progress, Subject, open_subject
from tieline.lab.tropical.plane_cells import Plane, Slice, plane_through, slice_router
from tieline.models.capture import RecorderSettings
from tieline.models.demo import DEMO
from tieline.models.families import family_of
from tieline.models.linear_routers import linear_router_bias, linear_weights
from tieline.models.model import Model, ModelSource
from tieline.models.router_output import read_output
from tieline.run.corpus import stacked_batches, token_texts
from tieline.run.forward import model_device, only_running
from tieline.run.observers import RouteRecorder
from tieline.run.plan import clean_plan
from tieline.run.runner import Runner
from tieline.trace.record import LayerTrace, RoutingTrace

CHECK_POINTS = 2000
"""Random points of the window at which the router is run."""
TIE_TOLERANCE = 1e-5
"""Gap, relative to the largest score, below which float32 may decide a tie either way."""
INPUT_RECORDING = RecorderSettings(ranks=4, epsilons=(), inputs=True, distances=False)
"""What is recorded of the clean run: four ranks beyond k, and the router inputs."""
TIE_TOLERANCE_UNITS = 4
"""The same for coarser formats, in units of their eps: states and scores are both rounded."""


@dataclass(frozen=True)
class SlicePoint:
    """One of the three tokens: document, position, text and experts."""

    document: int
    position: int
    text: str
    experts: tuple[int, ...]


@dataclass(frozen=True, repr=False)
class RouterSlice(Result):
    """A slice of one router through three tokens' hidden states.

    Attributes:
        model: name of the model.
        layer: name of the router.
        points: the three tokens.
        noise: source of the band's width as text; empty without a band.
        cut: the cells.
        checked: number of random points at which the router was run.
        agreed: points at which it chose the coalition of the cell.
        undecided: other points whose gap float32 cannot distinguish from a tie.
        provenance: text, tokens, batch size and seed.
    """

    format: ClassVar[str] = "tieline-slice"

    model: str
    layer: str
    points: tuple[SlicePoint, ...]
    noise: str
    cut: Slice
    checked: int
    agreed: int
    undecided: int
    provenance: dict[str, object]

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "coalitions", "band" (its share of the window), "agreed" (a share)."""
        decided = max(1, self.checked - self.undecided)
        sizes = {"coalitions": float(len(self.cut.cells)), "band": self.cut.band_share}
        return sizes | {"agreed": self.agreed / decided}


@dataclass(frozen=True)
class SliceChoice:
    """Router and tokens of the slice to draw.

    Attributes:
        layer: name or index of the router; None for the first with flat walls.
        tokens: places of three tokens in the text; None to draw them at random.
    """

    layer: str | int | None = None
    tokens: tuple[int, ...] | None = None

    def check(self, names: Sequence[str], tokens: int, inputs: bool) -> None:
        """Raise if the run cannot provide this slice.

        Args:
            names: names of the selected routers.
            tokens: tokens of the text.
            inputs: whether the router inputs can be kept.
        """
        require(tokens >= 3, f"a slice goes through three tokens, the text has {tokens}")
        require(inputs, f"the inputs of {tokens:,} tokens cannot be kept: take fewer tokens")
        if self.tokens is not None:
            _check_slice_tokens(self.tokens, tokens)
        if self.layer is not None:
            exists = self.layer in names if isinstance(self.layer, str) else True
            exists = exists and (isinstance(self.layer, str) or 0 <= self.layer < len(names))
            require(exists, f"no layer {self.layer!r} among the {len(names)} that are looked at")


@takes_settings(SliceSettings)
def slice_model(
    source: ModelSource = DEMO,
    *,
    settings: SliceSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[SliceOptions],
) -> RouterSlice:
    """Draw the plane through three tokens' hidden states at one router of a model.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones.
        progress: called with stage, done and total.
    """
    settings = SliceSettings.of(settings, options)
    tokens = None if settings.places is None else tuple(settings.places)
    choice = SliceChoice(settings.layer, tokens)
    subject = open_subject(source, settings, "slice takes")
    model, routers, count = subject.model, subject.routers, subject.text.tokens
    choice.check(routers, count, router_inputs_fit(model, routers, count))
    trace = _slice_trace(subject, settings.batch_size, progress)
    noise = measure_router_noise(model, routers, subject.text, settings.batch_size)
    return chosen_slice(subject, trace, choice, noise, settings.seed)


def _slice_trace(subject: Subject, batch_size: int, progress: Progress | None) -> RoutingTrace:
    """Run the text and return its routing with the router inputs."""
    recorder = RouteRecorder(subject.model, INPUT_RECORDING, subject.routers)
    numbered = dict(enumerate(stacked_batches(subject.text.sequences, batch_size)))
    Runner(Model(subject.model)).run(clean_plan("forward", numbered), [recorder], progress)
    return recorder.trace()


def chosen_slice(
    subject: Subject, trace: RoutingTrace, choice: SliceChoice, noise: NoiseReport, seed: int = 0
) -> RouterSlice:
    """Return the chosen slice, with a band of the model's noise if it is known."""
    weights = linear_weights(subject.model, trace)
    name = choice.layer
    if name is None:
        flat = [x.name for x in trace.layers if linear_choice_status(x, weights) == "ok"]
        name = flat[0] if flat else trace.layers[0].name
    name = trace.layers[name].name if isinstance(name, int) else name
    layer_noise, units = noise.layer(name), trace.layer(name).facts.units
    epsilon = layer_noise.epsilon if layer_noise is not None and units == "logits" else 0.0
    origin = f"noise of {layer_noise.precision}" if layer_noise is not None and epsilon else ""
    return _layer_slice(subject, trace, name, weights, choice.tokens, (epsilon, origin), seed)


def slice_tokens(trace: RoutingTrace, layer: LayerTrace, seed: int = 0) -> tuple[int, int, int]:
    """Draw three tokens at random, with different coalitions if possible."""
    require(
        trace.n_tokens >= 3,
        f"a slice goes through three tokens, got {trace.n_tokens}: give a longer text",
        TraceError,
    )
    order = torch.randperm(trace.n_tokens, generator=torch.Generator().manual_seed(seed)).tolist()
    tokens_of: dict[tuple[int, ...], int] = {}
    for token in order:
        tokens_of.setdefault(tuple(sorted(layer.experts[token, : layer.facts.k].tolist())), token)
        if len(tokens_of) == 3:
            break
    tokens = [*tokens_of.values(), *(token for token in order if token not in tokens_of.values())]
    return tokens[0], tokens[1], tokens[2]


def _layer_slice(
    subject: Subject,
    trace: RoutingTrace,
    name: str,
    weights: dict[str, Tensor],
    tokens: Sequence[int] | None,
    band: tuple[float, str],
    seed: int,
) -> RouterSlice:
    """Cut a layer by the plane through three of its inputs, and check its router there.

    Args:
        subject: the model and its text.
        trace: its routing, with inputs.
        name: name of the router.
        weights: matrices of linear routers (`linear_weights`).
        tokens: places of three tokens in the trace; None to draw them by `seed`.
        band: ε, the gap below which the band lies, in units of the logits, and its source.
        seed: of tokens and points.
    """
    layer = trace.layer(name)
    status = linear_choice_status(layer, weights)
    require(status == "ok", f"layer {name!r} has no slice: {status}", UnsupportedModelError)
    assert layer.inputs is not None
    token_triple = tuple(tokens) if tokens is not None else slice_tokens(trace, layer, seed)
    _check_slice_tokens(token_triple, trace.n_tokens)
    router = subject.model.get_submodule(name)
    bias = torch.zeros(layer.facts.n_experts, dtype=torch.float64)
    bias = (
        bias + linear_router_bias(router, len(bias)) + (0.0 if layer.bias is None else layer.bias)
    )
    points, k = layer.inputs[list(token_triple)], layer.facts.k
    cut = slice_router(points, weights[name], bias, k, epsilon=band[0])
    agreed, undecided = _slice_agreement(
        subject.model, router, layer, (cut, plane_through(points)), seed
    )
    pieces = token_texts(subject.text)
    marks = tuple(_slice_point(trace, layer, token, pieces) for token in token_triple)
    counts = (CHECK_POINTS, agreed, undecided)
    return RouterSlice(subject.name, name, marks, band[1], cut, *counts, subject.provenance)


def _check_slice_tokens(token_ids: Sequence[int], tokens: int) -> None:
    """Raise unless the ids are three different tokens of the text."""
    given_text = ", ".join(map(str, token_ids))
    require(
        len(token_ids) == 3 and len(set(token_ids)) == 3,
        f"a slice goes through three different tokens, got {given_text or 'none'}",
    )
    inside = all(0 <= token < tokens for token in token_ids)
    require(inside, f"no tokens {given_text}: the text has tokens 0 to {tokens - 1}")


def _slice_point(
    trace: RoutingTrace, layer: LayerTrace, token: int, pieces: Sequence[str]
) -> SlicePoint:
    """Return a token of the slice with its text and chosen experts."""
    experts = sorted(layer.experts[token, : layer.facts.k].tolist())
    text = pieces[token] if token < len(pieces) else ""
    document, position = int(trace.documents[token]), int(trace.positions[token])
    return SlicePoint(document, position, text, tuple(experts))


def _slice_agreement(
    model: nn.Module,
    router: nn.Module,
    layer: LayerTrace,
    cut_and_plane: tuple[Slice, Plane],
    seed: int,
) -> tuple[int, int]:
    """Return how many random points agree with the slice, and how many others are near a tie."""
    cut, plane = cut_and_plane
    low, high = np.array(cut.window[0]), np.array(cut.window[2])
    flat = low + (high - low) * np.random.default_rng(seed).random((CHECK_POINTS, 2))
    states = torch.from_numpy(plane.origin + flat @ plane.axes)
    logits, experts = router_choice(model, router, states)
    cell_experts = coalitions_at(cut, flat)
    same = (experts.sort(dim=1).values == cell_experts).all(dim=1)
    ranked = logits.double().sort(dim=1, descending=True).values
    gap = ranked[:, layer.facts.k - 1] - ranked[:, layer.facts.k]
    coarse = TIE_TOLERANCE_UNITS * torch.finfo(_router_dtype(router)).eps
    close = gap <= max(TIE_TOLERANCE, coarse) * logits.abs().amax().double()
    return int(same.sum()), int((~same & close).sum())


def router_choice(
    model: nn.Module, router: nn.Module, states: Float[Tensor, "points dim"]
) -> tuple[Tensor, Tensor]:
    """Run a router by itself and return logits (or probabilities) and chosen experts."""
    family = family_of(router)
    if family is None or family.bias_argument is not None:
        raise UnsupportedModelError(f"{type(router).__name__} cannot be called by itself")
    with only_running(model):
        rows = states.to(model_device(model), _router_dtype(router))
        output = read_output(family, router, ((rows,), {}), router(rows))
    return output.logits.cpu(), output.ids.cpu().long()


def _router_dtype(router: nn.Module) -> torch.dtype:
    """Return the dtype of the router's parameters; float32 if it has none."""
    return next((p.dtype for p in router.parameters()), torch.float32)


def coalitions_at(cut: Slice, flat: Float[np.ndarray, "points 2"]) -> Tensor:
    """Return the experts (points, k) of the cell that holds each point; -1 if none does."""
    experts = torch.full((len(flat), cut.k), -1)
    for cell in cut.cells:
        corners = np.array(cell.corners)
        along = np.roll(corners, -1, axis=0) - corners
        offsets = flat[:, None] - corners[None]
        inside = (along[:, 0] * offsets[..., 1] - along[:, 1] * offsets[..., 0] >= 0).all(axis=1)
        experts[torch.from_numpy(inside)] = torch.tensor(sorted(cell.coalition))
    return experts
