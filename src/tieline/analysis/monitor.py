"""Monitoring the routing of a model in training: a few scalars every n steps, and warnings.

    with RoutingMonitor(model, every=10, writers=[JsonlWriter("routing.jsonl")]) as monitor:
        for batch in batches:
            loss(model(batch)).backward()
            optimizer.step()
            monitor.step()

    gap_p1, gap_p10, gap_p50   quantiles of the gap, all layers together             Def. 2.4
    ties                       share of gaps that are exactly zero                   Def. 1.2
    near_bf16                  P(Δ <= q), q the bf16 spacing at the threshold        Def. 2.1, 7.1
    tie_bf16, flip_bf16        share that ties or flips when rounded to bf16         Def. 7.4
    flips_per_token            Σ over layers of the expected flips by bf16 rounding  Def. 7.2, 7.3
    confidence                 largest softmax probability of a token
    max_violation              busiest expert over an even load, minus 1; worst layer
    dead_share                 experts that no token used                            Def. 8.2
    diversity                  exp(H) / E, H the entropy of the load                 Def. 8.1
    score_rms, score_max       of all logits
    active                     experts in use per token
    epsilon                    width of the band of a smooth gate

Unless stated otherwise a scalar is the mean over layers. Scalars that cannot be computed are
absent: gaps if all experts are used, bf16 if the size of the logits is unknown. The functions are
those of `tieline.inspect`, so the same tokens give the same numbers.

Between logged steps the model has no hooks. On a logged step each router's scores are read once, in
the forward pass; repetitions by activation checkpointing are not counted, and all micro-batches of
a step are counted together. Under data parallelism the scalars cover the tokens of this process, or
of all processes with `over_ranks`.

A warning is raised once for an auxiliary loss that is silently off, because
    a transformers model has a coefficient for it but computes it only with
        `output_router_logits`, which is off by default;
    it carries no gradient, as under reentrant checkpointing;
    its coefficient is zero although it is computed;
    nothing collects the routing of a Tieline layer without a correction bias;
and for "router logits" that are probabilities already (rows >= 0 that sum to 1), whose softmax
makes all experts look alike.
"""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.analysis.loss_warnings import watch_losses
from tieline.analysis.tie_density import ThresholdSpacing
from tieline.core.collectives import gathered_plain, gathered_tensors
from tieline.core.errors import ParameterError, RoutingWarning, TielineError, require
from tieline.core.numerics import one_thread
from tieline.core.records import to_plain
from tieline.core.statistics import quantile_bands
from tieline.core.text import layer_label
from tieline.measure.expert_load import ExpertLoad, load_from_counts
from tieline.measure.measures import gap_status
from tieline.measure.noise_flips import logit_view
from tieline.measure.rounding_flips import precision_flips
from tieline.models.router_calls import LogitSums, RouterCall, watch_routing
from tieline.trace.record import LayerTrace, check_finite_scores

ROW_SUM_TOLERANCE = 0.02
"""Largest deviation from 1 of the sum of 64 probabilities in bf16."""


def probability_warning(layer: str, logits: LogitSums) -> str | None:
    """Return the warning for a router whose logits are probabilities; None if they are not."""
    if logits.least < 0 or logits.row_error > ROW_SUM_TOLERANCE:
        return None
    return (
        f'the "router logits" of {layer_label(layer)} are probabilities already (all >= 0, rows '
        "sum to 1): a balance or z-loss that takes their softmax is nearly blind: use logarithms"
    )


MONITORED_FORMAT = "bf16"
GAP_LEVELS = {"gap_p1": 0.01, "gap_p10": 0.1, "gap_p50": 0.5}


@dataclass(frozen=True, eq=False)
class LayerScalars:
    """Scalars of one layer over some tokens; gaps of layers with equal `units` can be pooled."""

    tokens: int
    gaps: Float[Tensor, " tokens"] | None
    units: str
    rounding: dict[str, float]
    load: ExpertLoad
    logits: LogitSums
    active: float
    epsilon: float | None


def layer_scalars(calls: Sequence[RouterCall]) -> LayerScalars:
    """Return the token-weighted statistics of one router's calls."""
    return join_scalars([_call_scalars(call) for call in calls])


def _call_scalars(call: RouterCall) -> LayerScalars:
    """Return the statistics of one call of a router."""
    assert call.logits is not None
    return LayerScalars(
        tokens=call.tokens,
        gaps=call.trace.gap if gap_status(call.trace) == "ok" else None,
        units=call.trace.facts.units,
        rounding=_bf16_rates(call.trace),
        load=load_from_counts(call.used),
        logits=call.logits,
        active=call.active,
        epsilon=call.epsilon,
    )


def join_scalars(pieces: Sequence[LayerScalars]) -> LayerScalars:
    """Return the statistics of all tokens of one layer from those of its calls or ranks."""
    tokens = torch.tensor([p.tokens for p in pieces], dtype=torch.float64, device="cpu")
    logits = [piece.logits for piece in pieces]
    gaps = [piece.gaps for piece in pieces if piece.gaps is not None]
    used = torch.tensor([piece.load.counts for piece in pieces], device="cpu").sum(dim=0)
    rates = pieces[0].rounding
    return LayerScalars(
        tokens=sum(piece.tokens for piece in pieces),
        gaps=torch.cat(gaps) if len(gaps) == len(pieces) else None,
        units=pieces[0].units,
        rounding={name: _token_mean([p.rounding[name] for p in pieces], tokens) for name in rates},
        load=load_from_counts(used),
        logits=LogitSums(
            _token_mean([entry.mean_square for entry in logits], tokens),
            max(entry.largest for entry in logits),
            _token_mean([entry.confidence for entry in logits], tokens),
            min(entry.least for entry in logits),
            max(entry.row_error for entry in logits),
        ),
        active=_token_mean([piece.active for piece in pieces], tokens),
        epsilon=pieces[-1].epsilon,
    )


def join_layers_of_ranks(layers: Mapping[str, LayerScalars] | None) -> dict[str, LayerScalars]:
    """Return the layer scalars over all ranks; empty if a rank could not measure its layers.

    Every rank must call it.

    Args:
        layers: layer scalars of this rank; None if they could not be measured.
    """
    gaps = {name: x.gaps for name, x in (layers or {}).items() if x.gaps is not None}
    facts = layers and {
        name: (x.tokens, x.units, x.rounding, x.load.counts, x.logits, x.active, x.epsilon)
        for name, x in layers.items()
    }
    by_rank, gaps_by_rank = gathered_plain(facts), gathered_tensors(gaps)
    pieces: dict[str, list[LayerScalars]] = defaultdict(list)
    for rank, gaps in zip(by_rank, gaps_by_rank, strict=True):
        if rank is None:
            return {}
        for name, (tokens, units, rounding, counts, logits, *rest) in rank.items():
            load = load_from_counts(torch.tensor(counts, device="cpu"))
            sums = LogitSums(*logits)
            piece = LayerScalars(tokens, gaps.get(name), units, rounding, load, sums, *rest)
            pieces[name].append(piece)
    return {name: join_scalars(layer_pieces) for name, layer_pieces in pieces.items()}


def model_scalars(layers: Mapping[str, LayerScalars]) -> dict[str, float]:
    """Return the scalars of all layers together."""
    records = list(layers.values())
    loads, logits = [layer.load for layer in records], [layer.logits for layer in records]
    scalars = _gap_scalars(records)
    for name in ("near_bf16", "tie_bf16", "flip_bf16"):
        rates = [layer.rounding[name] for layer in records if name in layer.rounding]
        if rates:
            scalars[name] = sum(rates) / len(rates)
    if "near_bf16" in scalars:
        scalars["flips_per_token"] = sum(layer.rounding.get("expected", 0.0) for layer in records)
    diversity = [math.exp(load.entropy) / len(load.counts) for load in loads]
    scalars |= {
        "confidence": sum(layer.confidence for layer in logits) / len(records),
        "max_violation": max(load.busiest for load in loads) - 1,
        "dead_share": sum(len(x.dead) for x in loads) / sum(len(x.counts) for x in loads),
        "diversity": sum(diversity) / len(records),
        "score_rms": math.sqrt(sum(layer.mean_square for layer in logits) / len(records)),
        "score_max": max(layer.largest for layer in logits),
        "active": sum(layer.active for layer in records) / len(records),
    }
    widths = [layer.epsilon for layer in records if layer.epsilon is not None]
    return scalars | ({"epsilon": sum(widths) / len(widths)} if widths else {})


def _bf16_rates(layer: LayerTrace) -> dict[str, float]:
    """Return the effect of bf16 on the choice of these tokens; empty if it is unknown."""
    check_finite_scores(layer)
    if gap_status(layer) != "ok":
        return {}
    view = logit_view(layer)
    if view.logits is None:
        return {}
    record, _ = precision_flips(layer, view, MONITORED_FORMAT)
    rates = {
        "near_bf16": ThresholdSpacing.from_layer(layer, view, MONITORED_FORMAT).mass().mass[0],
        "tie_bf16": record.tie_emulated.value,
        "flip_bf16": record.flip_emulated.value,
        "expected": record.flip.value,
    }
    return {name: value for name, value in rates.items() if value is not None}


def _gap_scalars(layers: Sequence[LayerScalars]) -> dict[str, float]:
    """Return the quantiles of all gaps and the share of ties; empty if units differ."""
    scored_layers = [layer for layer in layers if layer.gaps is not None]
    if not scored_layers or len({layer.units for layer in scored_layers}) > 1:
        return {}
    gaps = torch.cat([layer.gaps for layer in scored_layers if layer.gaps is not None])
    values = quantile_bands(gaps, tuple(GAP_LEVELS.values())).value.tolist()
    ties = (gaps == 0).double().mean().item()
    return {**dict(zip(GAP_LEVELS, values, strict=True)), "ties": ties}


def _token_mean(values: Sequence[float], tokens: Float[Tensor, " calls"]) -> float:
    """Return the mean over calls, weighted by their numbers of tokens."""
    column = torch.tensor(values, dtype=torch.float64, device="cpu")
    return ((column * tokens).sum() / tokens.sum()).item()


@runtime_checkable
class Writer(Protocol):
    """Interface of objects that store the scalars of logged steps."""

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Store the scalars of a step."""
        ...

    def close(self) -> None:
        """Finish writing; no more scalars follow."""
        ...


class JsonlWriter:
    """Writes a line of JSON per logged step, {"step": n, name: value, ...}; null if not finite.

    Args:
        path: file to append to; its folders are created.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Append a line; the file is closed after each, so it can be read at any time."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **to_plain(scalars)}) + "\n")

    def close(self) -> None:
        """Do nothing: the file is closed after each line."""


class TensorBoardWriter:
    """Writes scalars to TensorBoard.

    Args:
        target: a folder, which requires TensorBoard, or any writer with `add_scalar`.
    """

    def __init__(self, target: Any) -> None:
        self._opened_here = isinstance(target, str | Path)
        self._writer = target
        if self._opened_here:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as missing:
                raise ParameterError(
                    "TensorBoardWriter was given a folder, but TensorBoard is not installed: "
                    "pip install tensorboard, or pass a writer that has add_scalar"
                ) from missing
            self._writer = SummaryWriter(str(target))

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Add one point to the curve of each scalar."""
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the writer if this object opened it."""
        if self._opened_here:
            self._writer.close()


class RoutingMonitor:
    """Logs scalars of the routing of a model every n steps, as `dict[str, float]` and to writers.

    The scalars and their formulas are listed in `tieline.analysis.monitor`. Failures to measure
    raise one `RoutingWarning` and never stop the training.

    Args:
        model: a model with Tieline's `MoE` layers or transformers routers.
        every: n; steps 0, n, 2n, ... are logged.
        writers: receive the scalars of each logged step.
        prefix: prefix of the name of each scalar.
        per_layer: also return the scalars of each layer, as prefix + layer + "/" + name.
        training_only: ignore forward passes in evaluation mode.
        check_losses: warn if an auxiliary loss is silently off.
        start: number of the first step.
        over_ranks: compute the scalars over the tokens of all ranks; each rank must then make the
            same calls of `step` or `read`.

    Attributes:
        last: scalars of the last logged step.
        warnings: the warnings so far.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 10,
        writers: Sequence[Writer] = (),
        prefix: str = "routing/",
        per_layer: bool = False,
        training_only: bool = True,
        check_losses: bool = True,
        start: int = 0,
        over_ranks: bool = False,
    ) -> None:
        require(every >= 1, f"a monitor logs every n >= 1 steps, got every={every}")
        self.every, self.writers, self.prefix = every, tuple(writers), prefix
        self.per_layer, self.training_only = per_layer, training_only
        self.check_losses, self.over_ranks = check_losses, over_ranks
        self.last: dict[str, float] = {}
        self.warnings: list[str] = []
        self._warned_kinds: set[str] = set()
        self._model, self._step = model, start
        self._calls: dict[str, list[RouterCall]] = defaultdict(list)
        self._first_error: TielineError | None = None
        self._hooks: ExitStack | None = None
        with watch_routing(model, lambda call: None):  # raises now for a model without routers
            pass
        if start % every == 0:
            self.arm()

    def arm(self) -> None:
        """Add hooks that record the routers until `read`."""
        if self._hooks is not None:
            return
        self._calls.clear()
        self._first_error = None
        hooks = ExitStack()
        hooks.enter_context(
            watch_routing(
                self._model,
                self._keep_call,
                training_only=self.training_only,
                on_failure=self._keep_failure,
            )
        )
        if self.check_losses:
            hooks.enter_context(watch_losses(self._model, self._warn))
        self._hooks = hooks

    def read(self, step: int) -> dict[str, float]:
        """Remove the hooks, return the scalars and pass them to the writers.

        Args:
            step: step number that the scalars are written with.
        """
        self.disarm()
        layers = self._layer_scalars(step)
        if self.over_ranks:
            layers = join_layers_of_ranks(layers)
        if not layers:
            return {}
        scalars = model_scalars(layers)
        if self.per_layer:
            for name, layer in layers.items():
                of_layer = model_scalars({"": layer})
                scalars |= {f"{name}/{key}": value for key, value in of_layer.items()}
        self.last = {self.prefix + name: value for name, value in scalars.items()}
        for writer in self.writers:
            writer.write(step, self.last)
        return self.last

    def step(self) -> dict[str, float]:
        """End a training step and return its scalars; empty if the step is not logged."""
        scalars = self.read(self._step) if self._hooks is not None else {}
        self._step += 1
        if self._step % self.every == 0:
            self.arm()
        return scalars

    def disarm(self) -> None:
        """Remove all hooks from the model."""
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None

    def close(self) -> None:
        """Remove all hooks from the model and close the writers."""
        self.disarm()
        for writer in self.writers:
            writer.close()

    def __enter__(self) -> "RoutingMonitor":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _layer_scalars(self, step: int) -> dict[str, LayerScalars] | None:
        """Return the scalars of each layer; None if a call could not be read."""
        calls = {name: layer_calls for name, layer_calls in self._calls.items() if layer_calls}
        self._calls.clear()
        first_error, self._first_error = self._first_error, None
        try:
            if first_error is not None:
                raise first_error
            with one_thread():  # many small operations
                layers = {name: layer_scalars(layer_calls) for name, layer_calls in calls.items()}
        except TielineError as error:
            self._warn(f"routing was not measured (first at step {step}): {error}", str(error))
            return None
        for name, layer in layers.items():
            self._warn(probability_warning(name, layer.logits), "probabilities")
        return layers

    def _keep_call(self, call: RouterCall) -> None:
        """Record a call that has tokens."""
        if call.tokens and call.logits is not None:
            self._calls[call.trace.name].append(call)

    def _keep_failure(self, error: TielineError) -> None:
        """Record the first error of a step."""
        self._first_error = self._first_error or error

    def _warn(self, message: str | None, kind: str) -> None:
        """Raise a warning once for each kind."""
        if message is None or kind in self._warned_kinds:
            return
        self._warned_kinds.add(kind)
        self.warnings.append(message)
        warnings.warn(message, RoutingWarning, stacklevel=4)
