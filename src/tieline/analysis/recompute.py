"""Check whether a repeated forward pass routes like the first, and find the cause if it does not.

Activation checkpointing discards activations of a forward pass and recomputes them in the backward
pass. At a tie the repetition may choose another expert: tensors then have other shapes
(`CheckpointError`), or the gradients silently belong to another function than the loss.

    way           compared with the first pass
    recompute     the repetition by `torch.utils.checkpoint`, in the backward pass
    split         the same rows in several smaller batches
    threads       another number of threads
    compiled      `torch.compile`

The verdict is that of the first layer where choices differ; later layers follow from it:

    identical                      the same choices and the same output, bit for bit
    exact tie                      other choices, at gaps that are exactly zero
    near-tie flip                  other choices, at gaps no wider than rounding of the scores
    differs, but not by routing    the same choices and another output, or other choices that
                                   rounding does not explain: random numbers, other inputs, a bug
"""

import inspect
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from tieline.core.errors import TielineError, require
from tieline.core.ranking import sets_differ
from tieline.core.records import to_plain
from tieline.core.text import layer_label
from tieline.models.router_calls import RouterCall, watch_routing

VERDICTS = ("identical", "differs, but not by routing", "exact tie", "near-tie flip")
"""Verdicts by severity; the verdict of several repetitions is the most severe."""

IDENTICAL, NOT_BY_ROUTING, EXACT_TIE, NEAR_TIE = VERDICTS

MOST_ROUNDINGS, MOST_SCORE_SHARE = 1024, 0.05
"""Largest difference of two runs' scores that counts as rounding, in roundings and as a share of
the token's largest score: sums of thousands of terms, over some layers."""


@dataclass(frozen=True, eq=False)
class RecomputeRun:
    """A forward pass: output (None if it failed), calls of its routers, and relative rounding.

    `error` is the message of a `CheckpointError`.
    """

    output: Tensor | None
    calls: tuple[RouterCall, ...]
    rounding: float
    error: str | None = None


@dataclass(frozen=True)
class Flip:
    """A token that chose different experts in the repetition.

    Attributes:
        layer: name of the router.
        token: index of the token among those that the layer routed.
        gap: its gap in the first run.
        moved: largest change of a score of this token between the runs.
        left: experts chosen in the first run only.
        entered: experts chosen in the repetition only.
        follows: whether choices differ in an earlier layer, which may have caused this flip.
    """

    layer: str
    token: int
    gap: float
    moved: float
    left: tuple[int, ...]
    entered: tuple[int, ...]
    follows: bool


@dataclass(frozen=True)
class Repetition:
    """One way of running the batch again, against the first run.

    Attributes:
        way: one of `KINDS`.
        verdict: one of `VERDICTS`.
        explanation: the reason in words.
        flipped: number of flips in all layers.
        flips: the listed flips, ordered by layer and gap.
        score_change: largest change of a score.
        output_change: largest change of the output over its largest entry; None without an output.
        error: message of the `CheckpointError`, if one was raised.
    """

    way: str
    verdict: str
    explanation: str
    flipped: int
    flips: tuple[Flip, ...]
    score_change: float
    output_change: float | None
    error: str | None = None


@dataclass(frozen=True, eq=False)
class _RecomputedLayer:
    """One layer in both runs: choices, gaps, changes of scores and their limit for rounding."""

    name: str
    before: Bool[Tensor, "tokens experts"]
    after: Bool[Tensor, "tokens experts"]
    gap: Float[Tensor, " tokens"]
    moved: Float[Tensor, " tokens"]
    limit: Float[Tensor, " tokens"]

    @property
    def flipped_tokens(self) -> Int[Tensor, " flips"]:
        """Indices of the tokens whose choices differ."""
        return sets_differ(self.before, self.after).nonzero().squeeze(1)


def compare_repetition(
    way: str, first: RecomputeRun, repeated: RecomputeRun, most_flips: int
) -> Repetition:
    """Compare a repetition with the first run: flips, verdict and explanation."""
    layers = _recomputed_layers(first, repeated)
    flips = _recompute_flips(layers)
    change = _output_change(first.output, repeated.output)
    moved = max((layer.moved.max().item() for layer in layers if len(layer.moved)), default=0.0)
    first_flipped = next((layer for layer in layers if len(layer.flipped_tokens)), None)
    if first_flipped is not None:
        verdict, explanation = _cause_in_layer(first_flipped)
    elif moved or change != 0.0 or repeated.error:
        size = (
            "no output" if change is None else f"the output differs by {change:.3g} of its largest"
        )
        explanation = f"the same experts everywhere; scores moved by up to {moved:.3g}, {size}"
        verdict = NOT_BY_ROUTING
    else:
        verdict, explanation = IDENTICAL, "the same experts, scores and output, bit for bit"
    listed_flips = tuple(flips[:most_flips])
    return Repetition(
        way, verdict, explanation, len(flips), listed_flips, moved, change, repeated.error
    )


def _cause_in_layer(layer: _RecomputedLayer) -> tuple[str, str]:
    """Verdict and explanation for the first layer whose choices differ."""
    rows = layer.flipped_tokens
    gap, moved, limit = layer.gap[rows], layer.moved[rows], layer.limit[rows]
    tied = (gap == 0) & (moved <= limit)
    near = (gap > 0) & (moved > 0) & (moved <= limit)
    unexplained = int((~(tied | near)).sum())
    where = (
        f"{len(rows)} of {len(layer.gap)} tokens choose other experts in {layer_label(layer.name)}"
    )
    size = f"gaps up to {gap.max().item():.3g}, scores moved by up to {moved.max().item():.3g}"
    if unexplained:
        return (
            NOT_BY_ROUTING,
            f"{where}, {unexplained} of them not by rounding ({size}): {_non_rounding_text(layer)}",
        )
    if bool(tied.all()):
        return EXACT_TIE, f"{where}, all of them at exact ties, which the top-k breaks as it likes"
    return NEAR_TIE, f"{where}: near-ties ({size}), which rounding decides"


def _non_rounding_text(layer: _RecomputedLayer) -> str:
    """Cause, other than rounding, of the changed choices of a layer."""
    rows = layer.flipped_tokens
    if bool((layer.moved[rows] > layer.limit[rows]).any()):
        return "the scores differ beforehand, as by dropout, jitter, other inputs or a bug"
    return "the same scores gave another choice, so the router draws at random or is broken"


def _recomputed_layers(first: RecomputeRun, repeated: RecomputeRun) -> list[_RecomputedLayer]:
    """Compare the layers with equal token counts in both runs, in order of depth."""
    first_calls, repeated_calls = _calls_by_layer(first), _calls_by_layer(repeated)
    differences = []
    for name, calls in first_calls.items():
        others = repeated_calls.get(name, [])
        tokens = [sum(call.tokens for call in layer_calls) for layer_calls in (calls, others)]
        if tokens[0] == tokens[1] and all(c.trace.has_gaps for c in (*calls, *others)):
            differences.append(_recomputed_layer(name, calls, others, first.rounding))
    return differences


def _recomputed_layer(
    name: str, calls: list[RouterCall], others: list[RouterCall], rounding: float
) -> _RecomputedLayer:
    """Compare the calls of one layer in both runs."""
    before, after = _scores_and_choices(calls), _scores_and_choices(others)
    moved = (before[0] - after[0]).abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=1)
    size = before[0].masked_fill(before[0].isinf(), 0.0).abs().amax(dim=1)
    roundoff = max(rounding, *(call.rounding for call in calls))
    limit = min(MOST_ROUNDINGS * roundoff, MOST_SCORE_SHARE) * size
    gap = torch.cat([call.trace.gap for call in calls])
    return _RecomputedLayer(name, before[1], after[1], gap, moved, limit)


def _scores_and_choices(
    calls: list[RouterCall],
) -> tuple[Float[Tensor, "t e"], Bool[Tensor, "t e"]]:
    """Scores in float64 and masks of the chosen experts, over all calls of a layer."""
    scores, chosen = [], []
    for call in calls:
        trace = call.trace
        assert trace.scores is not None
        ids = trace.experts.long()
        no_scores = torch.full(
            (len(ids), trace.facts.n_experts), -torch.inf, dtype=torch.float64, device="cpu"
        )
        scores.append(no_scores.scatter(1, ids, trace.scores.double()))
        no_experts = torch.zeros_like(no_scores, dtype=torch.bool)
        chosen.append(no_experts.scatter(1, ids[:, : trace.facts.k], True))
    return torch.cat(scores), torch.cat(chosen)


def _recompute_flips(layers: list[_RecomputedLayer]) -> list[Flip]:
    """All flips, ordered by layer and gap."""
    flips: list[Flip] = []
    follows = False
    for layer in layers:
        rows = layer.flipped_tokens
        for token in rows[layer.gap[rows].argsort(stable=True)].tolist():
            before, after = layer.before[token], layer.after[token]
            left, entered = (_experts_in_mask(before & ~after), _experts_in_mask(after & ~before))
            gap, moved = layer.gap[token].item(), layer.moved[token].item()
            flips.append(Flip(layer.name, token, gap, moved, left, entered, follows))
        follows = follows or len(rows) > 0
    return flips


def _experts_in_mask(mask: Bool[Tensor, " experts"]) -> tuple[int, ...]:
    """Indices of the true elements of a mask."""
    return tuple(mask.nonzero().squeeze(1).tolist())


def _calls_by_layer(run: RecomputeRun) -> dict[str, list[RouterCall]]:
    """Calls of each router, by its name."""
    calls: dict[str, list[RouterCall]] = defaultdict(list)
    for call in run.calls:
        calls[call.trace.name].append(call)
    return calls


def _output_change(first: Tensor | None, repeated: Tensor | None) -> float | None:
    """Largest change over the largest entry; None unless both outputs have the same shape."""
    if first is None or repeated is None or first.shape != repeated.shape:
        return None
    if torch.equal(first, repeated):
        return 0.0
    before, after = first.double(), repeated.double()
    return ((before - after).abs().max() / before.abs().max().clamp(min=1e-300)).item()


@dataclass(frozen=True)
class CallInputs:
    """Arguments of a call, which can be split along the batch axis."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def from_batch(cls, module: nn.Module, batch: Any) -> "CallInputs":
        """Arguments from a tensor, a mapping or a tuple; ids become `input_ids`."""
        if isinstance(batch, Mapping):
            return cls((), {**_no_cache(module), **batch})
        if (
            isinstance(batch, Tensor)
            and not batch.is_floating_point()
            and hasattr(module, "config")
        ):
            return cls((), {"input_ids": batch, **_no_cache(module)})
        return cls(batch if isinstance(batch, tuple) else (batch,), {})

    @property
    def rows(self) -> int:
        """Size of the first axis of the first tensor."""
        for value in (*self.args, *self.kwargs.values()):
            if isinstance(value, Tensor) and value.ndim:
                return len(value)
        raise TielineError("the batch holds no tensor: nothing can be run")

    def pieces(self, count: int) -> list["CallInputs"]:
        """Split the call into `count` smaller ones, which share arguments without a batch axis."""
        rows = self.rows
        edges = [rows * index // count for index in range(count + 1)]
        spans = itertools.pairwise(edges)
        return [self._cut(slice(start, stop), rows) for start, stop in spans]

    def _cut(self, span: slice, rows: int) -> "CallInputs":
        """The call on some rows of the batch."""

        def cut(value: Any) -> Any:
            has_rows = isinstance(value, Tensor) and value.ndim > 0 and len(value) == rows
            return value[span] if has_rows else value

        return CallInputs(
            tuple(cut(value) for value in self.args),
            {name: cut(value) for name, value in self.kwargs.items()},
        )


def plain_run(module: nn.Module, inputs: CallInputs) -> RecomputeRun:
    """A forward pass without gradients."""
    with torch.no_grad():
        return _observed_run(module, lambda: module(*inputs.args, **inputs.kwargs))


def split_run(module: nn.Module, inputs: CallInputs, count: int) -> RecomputeRun:
    """Run the batch as `count` smaller batches, one after the other."""
    runs = [plain_run(module, piece) for piece in inputs.pieces(count)]
    calls = [call for run in runs for call in run.calls]
    outputs = [run.output for run in runs if run.output is not None]
    return RecomputeRun(torch.cat(outputs), tuple(calls), runs[0].rounding)


def other_threads_run(module: nn.Module, inputs: CallInputs) -> RecomputeRun:
    """Run on one thread, or on two if torch uses one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if before == 1 else 1)
    try:
        return plain_run(module, inputs)
    finally:
        torch.set_num_threads(before)


def compiled_run(module: nn.Module, inputs: CallInputs, backend: str) -> RecomputeRun:
    """A forward pass of the compiled module."""
    compiled: Any = torch.compile(module, backend=backend)
    with torch.no_grad():
        return _observed_run(module, lambda: compiled(*inputs.args, **inputs.kwargs))


def checkpointed_runs(module: nn.Module, inputs: CallInputs) -> tuple[RecomputeRun, RecomputeRun]:
    """A pass under checkpointing and its repetition in the backward pass.

    If nothing needs a gradient, nothing is repeated, and a second plain pass takes its place.
    """
    outputs: list[Tensor] = []
    errors: list[str] = []

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        """Run the module and store its output."""
        output = main_tensor(module(*args, **kwargs))
        outputs.append(output.detach())
        return output

    def run() -> Tensor:
        """Run forward and backward under checkpointing; stores the text of a `CheckpointError`."""
        tensors = (*module.parameters(), *inputs.args, *inputs.kwargs.values())
        leaves = [t for t in tensors if isinstance(t, Tensor) and t.requires_grad]
        with torch.enable_grad(), set_checkpoint_early_stop(False):
            output = checkpoint(forward, *inputs.args, use_reentrant=False, **inputs.kwargs)
            assert isinstance(output, Tensor)
            if output.requires_grad and leaves:
                try:
                    torch.autograd.grad(output.float().sum(), leaves, allow_unused=True)
                except CheckpointError as problem:
                    errors.append(str(problem))
        return output

    observed = _observed_run(module, run)
    first_calls = [call for call in observed.calls if not call.recomputed]
    repeated_calls = [call for call in observed.calls if call.recomputed]
    first = RecomputeRun(outputs[0], tuple(first_calls), observed.rounding)
    if not repeated_calls and not errors:
        return first, plain_run(module, inputs)
    repeated = outputs[1] if len(outputs) > 1 else None
    error = errors[0] if errors else None
    return first, RecomputeRun(repeated, tuple(repeated_calls), observed.rounding, error)


def main_tensor(output: Any) -> Tensor:
    """Logits or hidden states in the output of a module."""
    for candidate in (output, getattr(output, "logits", None)):
        if isinstance(candidate, Tensor):
            return candidate
    first = output[0] if isinstance(output, tuple) or hasattr(output, "keys") else None
    require(isinstance(first, Tensor), f"no tensor in an output of type {type(output).__name__}")
    assert isinstance(first, Tensor)
    return first


def _observed_run(module: nn.Module, run: Callable[[], Any]) -> RecomputeRun:
    """Run a callable and record the calls of the module's routers; restores the random state."""
    calls: list[RouterCall] = []
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with (
        torch.random.fork_rng(devices=[device.index for device in devices]),
        watch_routing(module, calls.append, ranks=None, repetitions=True),
    ):
        output = main_tensor(run()).detach()
    kinds = {p.dtype for p in module.parameters() if p.dtype.is_floating_point}
    if torch.is_autocast_enabled("cpu"):
        kinds.add(torch.get_autocast_dtype("cpu"))
    if torch.is_autocast_enabled("cuda"):
        kinds.add(torch.get_autocast_dtype("cuda"))
    roundoff = max((torch.finfo(kind).eps for kind in kinds), default=0.0)
    return RecomputeRun(output, tuple(calls), roundoff)


def _no_cache(module: nn.Module) -> dict[str, Any]:
    """Arguments that turn off the key-value cache of a transformers model."""
    has_cache = "use_cache" in inspect.signature(module.forward).parameters
    return {"use_cache": False} if has_cache else {}


KINDS = ("recompute", "split", "threads", "compiled")
DEFAULT_KINDS = ("recompute", "split", "threads")


@dataclass(frozen=True)
class RecomputeReport:
    """The verdicts of all repetitions of a forward pass.

    Attributes:
        verdict: the most severe verdict of all repetitions.
        explanation: the explanation of that repetition.
        repetitions: one record per way.
        layers: names of the routers, in order of depth.
        tokens: number of tokens of the batch.
        left_out: ways that the batch does not allow, with the reason.
    """

    verdict: str
    explanation: str
    repetitions: tuple[Repetition, ...]
    layers: tuple[str, ...]
    tokens: int
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        """The report as JSON values."""
        return to_plain(self)


def recompute_check(
    block_or_model: nn.Module,
    batch: Tensor | Mapping[str, Any] | tuple[Any, ...],
    *,
    kinds: Collection[str] = DEFAULT_KINDS,
    splits: int = 2,
    backend: str = "inductor",
    most_flips: int = 100,
) -> RecomputeReport:
    """Repeat a forward pass in several ways, and report whether and why its routing differs.

    The module stays in its mode (training or evaluation). Its gradients and the random number
    generators are unchanged, and every run draws the same random numbers.

    Args:
        block_or_model: a block or model with `MoE` layers or transformers routers.
        batch: its arguments: a tensor (token ids of a transformers model or the input of a block),
            a mapping of named arguments, or a tuple of arguments.
        kinds: the ways, a subset of `KINDS`; "compiled" is slow and not a default.
        splits: number of parts of the batch for "split".
        backend: backend of `torch.compile`.
        most_flips: most flips listed per repetition; all are counted.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    require(bool(kinds) and not unknown, f"kinds must be some of {KINDS}, got {sorted(kinds)}")
    require(splits >= 2, f"a split has 2 parts or more, got {splits=}")
    module, inputs = block_or_model, CallInputs.from_batch(block_or_model, batch)
    rows = inputs.rows
    first = plain_run(module, inputs)
    require(bool(first.calls), "no router ran: nothing can be compared")
    runs: dict[str, Callable[[], tuple[RecomputeRun, RecomputeRun]]] = {
        "recompute": lambda: checkpointed_runs(module, inputs),
        "split": lambda: (first, split_run(module, inputs, splits)),
        "threads": lambda: (first, other_threads_run(module, inputs)),
        "compiled": lambda: (first, compiled_run(module, inputs, backend)),
    }
    left_out = {}
    if "split" in kinds and rows < splits:
        left_out["split"] = f"a batch of {rows} rows has no {splits} parts"
    chosen_kinds = [kind for kind in KINDS if kind in kinds and kind not in left_out]
    repetitions = [compare_repetition(kind, *runs[kind](), most_flips) for kind in chosen_kinds]
    worst = max(repetitions, key=lambda repetition: VERDICTS.index(repetition.verdict))
    layers = tuple(dict.fromkeys(call.trace.name for call in first.calls))
    tokens = sum(call.tokens for call in first.calls if call.trace.name == layers[0])
    return RecomputeReport(
        worst.verdict, worst.explanation, tuple(repetitions), layers, tokens, left_out
    )
