"""Check whether the experts chosen by a running server depend on the batch: `tieline serve-check`.

The same prompts are sent in five ways. The choice of a token is the set of its k experts in a
layer; it flips if it differs from that of the same prompt sent alone:

    alone         one prompt at a time, each with a prefix cache of its own: the reference
    repeated      alone again: a server that is not repeatable flips already here
    cached        alone with the prefix cache of the first time
    batched       `batch_size` prompts in one request
    after_short   batched, behind as many prompts of a quarter of the length

A prompt is computed layer by layer, so flips in the first layer with flips do not follow from
others: these are the first flips. If the model is given, each is judged by its scores z: it is a
near-tie if max z(left) - min z(entered) <= 8 u max(1, |z_[k]|), u the rounding unit of the served
precision. Rounding does not explain a first flip that is not a near-tie.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Unpack

import numpy as np
import torch

from tieline.analysis.job_settings import ServeCheckOptions, ServeCheckSettings
from tieline.core.errors import TraceError, require
from tieline.core.records import Result
from tieline.core.setting_fields import require_setting, takes_settings
from tieline.engines.server_client import ServerError, is_server
from tieline.engines.server_prompts import server_prompts
from tieline.engines.server_routes import RouteServer, ServedRoutes
from tieline.models.model import Model
from tieline.models.router_checks import ROUNDINGS
from tieline.run.corpus import check_token_ids
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, recorded_routes
from tieline.trace.record import LayerTrace, RoutingTrace

WAYS = ("repeated", "cached", "batched", "after_short")
"""How prompts are sent besides alone."""

SHORT_DIVISOR = 4
"""Length of the prompts of a batch over that of the short prompts before it."""

ROUNDING_UNITS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class FirstFlip:
    """A changed choice in the first layer with changes, which no earlier change explains.

    Attributes:
        prompt: number of the prompt.
        token: position in the prompt.
        layer: number of the layer.
        left: experts chosen only if the prompt is sent alone.
        entered: experts chosen only if the prompt is sent this way.
        difference: max z(left) - min z(entered); None without a model, or if an expert is below
            the kept ranks.
        near_tie: whether rounding explains the flip; None without a model.
    """

    prompt: int
    token: int
    layer: int
    left: tuple[int, ...]
    entered: tuple[int, ...]
    difference: float | None = None
    near_tie: bool | None = None


@dataclass(frozen=True)
class ServedWay:
    """Number of flipped choices if prompts are sent in one way.

    Attributes:
        way: "repeated", "cached", "batched" or "after_short".
        tokens: number of tokens compared.
        flipped: number of tokens with a flip in some layer.
        prompts: number of prompts with a flip.
        by_layer: number of flips in each layer.
        first: the first flip in the lowest layer; None without flips.
        first_flips: number of flips in the first layer with flips of each prompt.
        near_ties: number of first flips that are near-ties; None without a model.
        next_tokens: number of prompts after which another token was generated; None if unknown.
    """

    way: str
    tokens: int
    flipped: int
    prompts: int
    by_layer: tuple[int, ...]
    first: FirstFlip | None
    first_flips: int
    near_ties: int | None
    next_tokens: int | None

    @property
    def share(self) -> float:
        """Share of the tokens with a flip."""
        return self.flipped / self.tokens


@dataclass(frozen=True, repr=False)
class ServeCheck(Result):
    """Result of a check of a server: flips of its choices by the way in which prompts are sent.

    Attributes:
        verdict: the result in a sentence.
        url: address of the server.
        engine: "vllm" or "sglang".
        model: name of the model that it serves.
        engine_version: version of the engine; empty if unknown.
        prompts: number of prompts.
        tokens: number of tokens of all prompts.
        layers: number of routed layers in the answers.
        k: experts per token.
        batch_size: prompts per batch.
        precision: served precision, which defines near-ties.
        judged_by: model whose scores define near-ties; None without a model.
        ways: one record for each way of sending.
    """

    format: ClassVar[str] = "tieline-serve-check"
    sentences: ClassVar[tuple[str, ...]] = ("verdict",)

    url: str
    engine: str
    model: str
    engine_version: str
    prompts: int
    tokens: int
    layers: int
    k: int
    batch_size: int
    precision: str
    judged_by: str | None
    ways: tuple[ServedWay, ...]

    def __post_init__(self) -> None:
        require(bool(self.ways), "a check of a server compares at least one way", TraceError)
        fits = all(len(way.by_layer) == self.layers and way.tokens > 0 for way in self.ways)
        require(fits, f"a check of a server has flips of {self.layers} layers", TraceError)

    @property
    def verdict(self) -> str:
        """The result in a sentence."""
        return self.sentence("verdict")

    @property
    def invariant(self) -> bool:
        """Whether no choice flipped in any way."""
        return not any(way.flipped for way in self.ways)

    @property
    def batch_flips(self) -> int:
        """Number of tokens that flip because of the batch: flips beyond those by repetition."""
        flipped = {way.way: way.flipped for way in self.ways}
        most = max(flipped.get("batched", 0), flipped.get("after_short", 0))
        return max(0, most - flipped.get("repeated", 0))

    @property
    def metrics(self) -> dict[str, float]:
        """Return "tokens", "batch_flips", and "flipped@WAY", the share of flipped tokens."""
        shares = {f"flipped@{way.way}": way.share for way in self.ways}
        return {"tokens": float(self.tokens), "batch_flips": float(self.batch_flips)} | shares


@takes_settings(ServeCheckSettings)
def serve_check(
    url: str,
    *,
    settings: ServeCheckSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[ServeCheckOptions],
) -> ServeCheck:
    """Send the same prompts to a server alone, repeated and in batches, and compare the choices.

    Args:
        url: address of the server, http://HOST:PORT.
        settings: the options; keyword arguments change single ones.
        progress: called with stage, done and total.
    """
    settings = ServeCheckSettings.of(settings, options)
    require_setting(is_server(url), "{url!r:.200} is no address such as http://HOST:PORT", url=url)
    server = RouteServer.open(url, settings.engine, settings)
    sizes = (settings.count * settings.length, settings.length)
    documents = server_prompts(server, settings, settings.text, sizes, progress).documents
    prompts = [row.tolist() for row in documents.sequences][: settings.count]
    scores = None if settings.model is None else _model_trace(settings.model, prompts)
    routes = _routes_by_way(server, prompts, settings.batch_size, progress)
    alone = routes.pop("alone")
    judge = _near_tie_judge(scores, settings.precision)
    ways = [_compare_way(way, prompts, alone, other, judge) for way, other in routes.items()]
    experts = alone[0].experts
    return ServeCheck(
        url=url,
        engine=server.engine,
        model=server.model,
        engine_version=server.version,
        prompts=len(prompts),
        tokens=sum(map(len, prompts)),
        layers=experts.shape[1],
        k=experts.shape[2],
        batch_size=min(settings.batch_size, len(prompts)),
        precision=settings.precision,
        judged_by=None if settings.model is None else str(settings.model),
        ways=tuple(ways),
    )


def _routes_by_way(
    server: RouteServer, prompts: list[list[int]], batch_size: int, progress: Progress | None
) -> dict[str, list[ServedRoutes]]:
    """Send the prompts in every way, "alone" first, and return their routes."""
    nonce = np.random.default_rng().integers(1 << 62)  # no other run has cached prefixes under it
    numbers = [*range(len(prompts))]
    groups = [numbers[first : first + batch_size] for first in numbers[::batch_size]]
    total, done = (len(WAYS) + 1) * len(prompts), 0
    routes: dict[str, list[ServedRoutes]] = {}
    for way in ("alone", *WAYS):
        in_batches = way in ("batched", "after_short")
        routes[way] = []
        for batch in groups if in_batches else [[number] for number in numbers]:
            salt = f"tieline-{nonce:x}-{'alone' if way == 'cached' else way}-{batch[0]}"
            batch_prompts = [prompts[number] for number in batch]
            short: list[list[int]] = []
            if way == "after_short":  # reversed, so that they share no prefix with the prompts
                short = [x[: max(2, len(x) // SHORT_DIVISOR)][::-1] for x in batch_prompts]
            routes[way] += server.route([*short, *batch_prompts], salt)[len(short) :]
            done += len(batch_prompts)
            if progress is not None:
                progress("server", done, total)
    return routes


def _compare_way(
    way: str,
    prompts: Sequence[Sequence[int]],
    alone: Sequence[ServedRoutes],
    other: Sequence[ServedRoutes],
    judge: "Callable[[FirstFlip], FirstFlip]",
) -> ServedWay:
    """Compare the routes of all prompts sent in one way with those sent alone."""
    masks = [
        _flipped_choices(a.experts, b.experts, len(prompt))
        for a, b, prompt in zip(alone, other, prompts, strict=True)
    ]
    firsts = [
        judge(flip)
        for number, mask in enumerate(masks)
        for flip in _first_flips(number, mask, alone[number].experts, other[number].experts)
    ]
    judged = [flip.near_tie for flip in firsts if flip.near_tie is not None]
    tokens = [(a.generated, b.generated) for a, b in zip(alone, other, strict=True)]
    all_generated = all(a is not None and b is not None for a, b in tokens)
    return ServedWay(
        way=way,
        tokens=sum(map(len, masks)),
        flipped=sum(int(mask.any(1).sum()) for mask in masks),
        prompts=sum(bool(mask.any()) for mask in masks),
        by_layer=tuple(np.sum([mask.sum(0) for mask in masks], 0).tolist()),
        first=min(firsts, key=lambda flip: (flip.layer, flip.prompt, flip.token), default=None),
        first_flips=len(firsts),
        near_ties=sum(judged) if len(judged) == len(firsts) else None,
        next_tokens=sum(a != b for a, b in tokens) if all_generated else None,
    )


def _flipped_choices(alone: np.ndarray, other: np.ndarray, tokens: int) -> np.ndarray:
    """Return where the sets of experts (tokens, layers, k) of a prompt differ, (tokens, layers)."""
    if alone.shape[1:] != other.shape[1:]:
        raise ServerError(
            f"the server returned routes of (layers, k) {alone.shape[1:]} and {other.shape[1:]}"
        )
    rows = min(tokens, len(alone), len(other))
    return (np.sort(alone[:rows], 2) != np.sort(other[:rows], 2)).any(2)


def _first_flips(
    prompt: int, mask: np.ndarray, alone: np.ndarray, other: np.ndarray
) -> list[FirstFlip]:
    """Return the flips of a prompt in its first layer with flips."""
    if not mask.any():
        return []
    layer = int(mask.any(0).argmax())
    return [
        FirstFlip(
            prompt,
            int(token),
            layer,
            tuple(sorted({*alone[token, layer].tolist()} - {*other[token, layer].tolist()})),
            tuple(sorted({*other[token, layer].tolist()} - {*alone[token, layer].tolist()})),
        )
        for token in np.flatnonzero(mask[:, layer])
    ]


def _model_trace(model: Any, prompts: Sequence[Sequence[int]]) -> list[RoutingTrace]:
    """Return the routing of each prompt, with scores, by the model in float32."""
    opened = Model.open(model, "serve-check takes")
    rows = [torch.tensor(prompt, device="cpu") for prompt in prompts]
    check_token_ids(opened.module, rows)
    return [recorded_routes(opened, Ranks.share_batches(None, [row[None]])) for row in rows]


def _near_tie_judge(
    traces: Sequence[RoutingTrace] | None, precision: str
) -> "Callable[[FirstFlip], FirstFlip]":
    """Return a function that judges first flips by the scores of a model; without one, identity."""
    if traces is None:
        return lambda flip: flip
    unit = torch.finfo(ROUNDING_UNITS[precision]).eps

    def judge_flip(flip: FirstFlip) -> FirstFlip:
        """Add the difference of scores to a flip, and whether it is a near-tie."""
        layer = _layer_numbered(traces[flip.prompt], flip.layer)
        difference, threshold = _score_difference(layer, flip)
        tolerance = ROUNDINGS * unit * max(1.0, abs(threshold))
        near_tie = difference is not None and abs(difference) <= tolerance
        return replace(flip, difference=difference, near_tie=near_tie)

    return judge_flip


def _layer_numbered(trace: RoutingTrace, number: int) -> LayerTrace:
    """Return the layer with this number in its name, because servers count dense layers too."""
    for layer in trace.layers:
        if str(number) in layer.name.split("."):
            return layer
    raise TraceError(f"the model has no routed layer {number}: is it the one that is served?")


def _score_difference(layer: LayerTrace, flip: FirstFlip) -> tuple[float | None, float]:
    """Return max z(left) - min z(entered), None below the kept ranks, and the threshold z_[k]."""
    assert layer.scores is not None
    experts = layer.experts[flip.token].tolist()
    scores = dict(zip(experts, layer.scores[flip.token].double().tolist(), strict=True))
    threshold = scores[experts[layer.facts.k - 1]]
    if not all(expert in scores for expert in (*flip.left, *flip.entered)):
        return None, threshold
    left, entered = ([scores[x] for x in group] for group in (flip.left, flip.entered))
    return max(left) - min(entered), threshold
