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

`tie_density` predicts the ties of a training step from a trace taken before it:

    within      P(Δ <= q): tokens within one spacing of the threshold            Def. 2.1, 7.1
    tie         mean (1 - Δ/q)+: expected ties of these tokens                   Def. 7.2
    population  f_gap(0) q / 2: expected ties in the population, also for formats so fine
                that a small sample has no ties                                  Def. 7.2
    exact       gaps that are zero in the trace itself

q is the spacing of the format at the logit of rank k. Tokens at ties are those that recomputation,
another kernel or another batch may route differently: the verdicts of `recompute_check`.
"""

import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tieline.core.collectives import gathered_plain, gathered_tensors
from tieline.core.errors import ParameterError, TielineError, require
from tieline.core.numerics import PRECISIONS, float_step, grid_step, is_recomputing, one_thread
from tieline.core.records import to_plain
from tieline.core.statistics import Estimate, mean_estimate, quantile_bands
from tieline.core.text import layer_label
from tieline.measure.boundary import MassProfile, boundary_mass, gap_density
from tieline.measure.expert_load import ExpertLoad, load_from_counts
from tieline.measure.measures import UNKNOWN_LOGIT_SIZE, gap_status
from tieline.measure.noise_flips import LogitView, logit_view, mark_first_order
from tieline.measure.rounding_flips import precision_flips, shared_cell_probability
from tieline.models.class_changes import untraced
from tieline.models.configuration import text_config
from tieline.models.documents import module_taking_tokens
from tieline.models.router_calls import LogitSums, RouterCall, watch_routing
from tieline.routing.gates import SelectiveGate
from tieline.routing.layer import MoE
from tieline.routing.losses import is_collected
from tieline.trace.record import LayerTrace, RoutingTrace, check_finite_scores

LOSS_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "ffn_config.moe_loss_weight")
"""Paths in a model's configuration to the coefficient of its auxiliary loss."""

ROW_SUM_TOLERANCE = 0.02
"""Largest deviation from 1 of the sum of 64 probabilities in bf16."""

WarnCallback = Callable[[str | None, str], None]
"""Called with a message, or None for no warning, and the kind of warning."""


class RoutingWarning(UserWarning):
    """Warning about the routing of a model in training."""


def probability_warning(layer: str, logits: LogitSums) -> str | None:
    """Return the warning for a router whose logits are probabilities; None if they are not."""
    if logits.least < 0 or logits.row_error > ROW_SUM_TOLERANCE:
        return None
    return (
        f'the "router logits" of {layer_label(layer)} are probabilities already (all >= 0, rows '
        "sum to 1): a balance or z-loss that takes their softmax is nearly blind: use logarithms"
    )


@contextmanager
def watch_losses(model: nn.Module, warn: WarnCallback) -> Iterator[None]:
    """Warn if training passes inside the block have auxiliary losses that are off."""

    def check_output(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Warn if the auxiliary loss of this forward pass is off."""
        if _is_training_pass(module):
            warn(transformers_loss_warning(module, output), "auxiliary loss")

    with ExitStack() as hooks:
        if _loss_coefficient(model) is not None:
            hooks.callback(model.register_forward_hook(untraced(check_output)).remove)
        for name, layer in model.named_modules():
            if isinstance(layer, MoE):
                hook = untraced(_layer_loss_hook(name, layer, warn))
                hooks.callback(layer.register_forward_hook(hook).remove)
        yield


def transformers_loss_warning(model: nn.Module, output: Any) -> str | None:
    """Return the warning about the auxiliary loss in a model's output; None if it works."""
    coefficient = _loss_coefficient(model)
    if coefficient is None or not hasattr(output, "loss"):
        return None
    name, value = coefficient
    loss = getattr(output, "aux_loss", None)
    if value > 0 and loss is None:
        return (
            f"the auxiliary loss is silently off: {name} = {value:g}, but the model did not "
            "compute it; set model.config.output_router_logits = True, if its class has this loss"
        )
    if isinstance(loss, Tensor) and value > 0 and not loss.requires_grad:
        return (
            f"the auxiliary loss ({name} = {value:g}) carries no gradient, so it balances nothing: "
            "frozen routers, or reentrant checkpointing (pass use_reentrant=False)"
        )
    if isinstance(loss, Tensor) and value == 0:
        return f"the auxiliary loss is computed, but silently off: {name} = 0"
    return None


def _layer_loss_hook(name: str, layer: MoE, warn: WarnCallback) -> Callable[..., None]:
    """Return a forward hook that warns if no auxiliary loss can reach a layer."""

    def check_layer(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Warn if nothing can balance the layer."""
        gate = layer.gate
        if not (_is_training_pass(layer) and isinstance(gate, SelectiveGate)):
            return
        if gate.selection_bias is None and not is_collected(layer):
            warn(
                f"no auxiliary loss can reach {layer_label(name)}: nothing collects its routing "
                "(collect_routing, auxiliary_loss) and its gate has no selection_bias that a "
                "controller could move",
                "auxiliary loss",
            )

    return check_layer


def _is_training_pass(module: nn.Module) -> bool:
    """Return whether the current forward pass of the module is a training pass."""
    return module.training and torch.is_grad_enabled() and not is_recomputing()


def _loss_coefficient(model: nn.Module) -> tuple[str, float] | None:
    """Return name and value of the auxiliary loss coefficient in the model's configuration."""
    config = text_config(module_taking_tokens(model))
    for path in LOSS_COEFFICIENTS:
        value: Any = config
        for name in path.split("."):
            value = getattr(value, name, None)
        if isinstance(value, int | float):
            return path, float(value)
    return None


MONITORED_FORMAT = "bf16"
GAP_LEVELS = {"gap_p1": 0.01, "gap_p10": 0.1, "gap_p50": 0.5}
TINY = 1e-300


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
        "near_bf16": _ThresholdSpacing.of(layer, view, MONITORED_FORMAT).mass().mass[0],
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


FORMAT_NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


@dataclass(frozen=True)
class LayerTies:
    """Expected ties of one layer in a number format.

    Attributes:
        name: name of the router.
        status: "ok", or the reason why all other fields are None.
        spacing: mean q, in units of the logits.
        within: share of tokens within q of a tie, with its 95 % band (`low`, `high`).
        tie: expected share of ties of these tokens.
        population: expected share of ties in the population.
        exact: number of tokens of the trace that tie exactly.
    """

    name: str
    status: str
    spacing: float | None = None
    within: float | None = None
    low: float | None = None
    high: float | None = None
    tie: Estimate | None = None
    population: Estimate | None = None
    exact: int | None = None


@dataclass(frozen=True)
class TieDensity:
    """Expected ties per token if the router's logits have a number format.

    Attributes:
        precision: name of the format.
        layers: one record per layer.
        per_token: expected number of ties of a token in all layers: the rate of the population if
            it is known, else that of the tokens of the trace.
        tokens: number of tokens of the trace.
        message: advice if `per_token` exceeds the limit; else None.
    """

    precision: str
    layers: tuple[LayerTies, ...]
    per_token: float
    tokens: int
    message: str | None

    def expected(self, tokens: int) -> float:
        """Return the expected number of ties in a step of `tokens` tokens."""
        return self.per_token * tokens

    def to_dict(self) -> dict[str, object]:
        """Return all fields as JSON values."""
        return to_plain(self)


def tie_density(
    trace: RoutingTrace, dtype: torch.dtype | str, *, warn_above: float = 1e-3
) -> TieDensity:
    """Predict the ties per token if logits are stored in `dtype`; warns if there are many.

    Args:
        trace: routing of some text by the model that will be trained, from `capture`.
        dtype: a floating-point type, or its name: "fp32" or one of `PRECISIONS`.
        warn_above: expected ties per token, in all layers, above which a `RoutingWarning` is
            raised.
    """
    formats = ("fp32", *PRECISIONS)
    name = FORMAT_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name is None or name not in formats:
        raise ParameterError(f"unknown dtype {dtype!r}: one of {', '.join(formats)}")
    layers = tuple(_layer_ties(layer, name) for layer in trace.layers)
    per_token = sum(_tie_rate(layer) for layer in layers)
    message = None
    if per_token > warn_above:
        remedy = "keep the router's logits in fp32" if name != "fp32" else "smooth the choice"
        message = (
            f"with logits in {name} a token meets {per_token:.2g} ties on average: recomputation "
            f"and other kernels may route it otherwise; {remedy}"
        )
        warnings.warn(message, RoutingWarning, stacklevel=2)
    return TieDensity(name, layers, per_token, trace.n_tokens, message)


def _layer_ties(layer: LayerTrace, precision: str) -> LayerTies:
    """Return the expected ties of one layer in a number format."""
    check_finite_scores(layer)
    status = gap_status(layer)
    view = logit_view(layer) if status == "ok" else None
    if view is None or view.logits is None:
        return LayerTies(layer.name, UNKNOWN_LOGIT_SIZE if status == "ok" else status)
    at_threshold = _ThresholdSpacing.of(layer, view, precision)
    mass, gaps, spacing = at_threshold.mass(), at_threshold.gaps, at_threshold.in_scores
    return LayerTies(
        name=layer.name,
        status="ok",
        spacing=at_threshold.in_logits.mean().item(),
        within=mass.mass[0],
        low=mass.low[0],
        high=mass.high[0],
        tie=mean_estimate(shared_cell_probability(gaps, spacing)),
        population=mark_first_order(gap_density(gaps / spacing).times(0.5)),
        exact=int((layer.gap == 0).sum()),
    )


def _tie_rate(layer: LayerTies) -> float:
    """Return the ties per token: the rate of the population if it is known, else of the sample."""
    for estimate in (layer.population, layer.tie):
        if estimate is not None and estimate.value is not None and estimate.status == "ok":
            return max(0.0, estimate.value)
    return 0.0


class _ThresholdSpacing(NamedTuple):
    """Spacing q of a format at each token's threshold, in units of logits and scores, and gaps."""

    in_logits: Float[Tensor, " tokens"]
    in_scores: Float[Tensor, " tokens"]
    gaps: Float[Tensor, " tokens"]

    @classmethod
    def of(cls, layer: LayerTrace, view: LogitView, precision: str) -> "_ThresholdSpacing":
        """Compute spacing and gaps of a layer whose logits are known."""
        assert view.logits is not None
        rank = layer.facts.k - 1
        if precision == "fp32":
            steps = float_step(view.logits.nan_to_num(neginf=0.0), 23, -126)
        else:
            steps = grid_step(view.logits, precision)
        in_scores = (steps[:, rank] * view.slope[:, rank]).clamp(min=TINY)
        return cls(steps[:, rank], in_scores, view.scores[:, rank] - view.scores[:, rank + 1])

    def mass(self) -> MassProfile:
        """Return P(Δ <= q), the share of tokens within one spacing of a tie (Def. 2.1)."""
        unit = torch.ones(1, dtype=torch.float64, device=self.gaps.device)
        return boundary_mass(self.gaps / self.in_scores, unit)
