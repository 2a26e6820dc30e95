"""What the sections about router inputs need: room for the inputs, and the routers' matrices.

Inspecting a model: what its routing looks like on a text, in one call.

loaded = load_model()
result = inspect_model(loaded.model, loaded.tokenizer, shipped_text())
result.inspection.verdict
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tieline.analysis.findings import findings, metrics, verdict
from tieline.analysis.inspection import Inspection, LayerJumps
from tieline.analysis.jump import BlockSampler, JumpSettings, measure_jumps, with_losses
from tieline.analysis.swap import block_of
from tieline.analysis.text import TokenisedText, text_sample, tokenise
from tieline.core.errors import require
from tieline.core.numerics import one_thread
from tieline.geometry.flips import logit_view
from tieline.geometry.measure_records import MeasureSettings
from tieline.geometry.measures import measure
from tieline.geometry.sections import scored
from tieline.hf.capture import capture
from tieline.hf.emulate import logits_matrix
from tieline.hf.families import chosen_routers, family_of, find_routers
from tieline.hf.running import batches, forward, only_running, text_config
from tieline.trace.ops import take_tokens
from tieline.trace.record import LayerTrace, RoutingTrace
from tieline.trace.store import save_trace

__all__ = ["Inspected", "Progress", "inputs_fit", "inspect_model", "linear_weights"]

MOST_BYTES = 1 << 30
"""Router inputs are kept, in memory and for the time of the measurement, up to this size."""

PROBES = 64
"""Tokens on which a matrix is checked to make the logits."""


def inputs_fit(model: nn.Module, names: Collection[str], tokens: int) -> bool:
    """Whether the inputs of these routers for so many tokens can be kept, and may be."""
    families = [family_of(model.get_submodule(name)) for name in names]
    if any(family is None or family.layout == "method" for family in families):
        return False
    width = getattr(text_config(model), "hidden_size", None)
    return isinstance(width, int) and 4 * len(names) * tokens * width <= MOST_BYTES


def linear_weights(model: nn.Module, trace: RoutingTrace) -> dict[str, Tensor]:
    """(E, D) matrix of each router whose logits are its product with the inputs, up to a bias."""
    found = {}
    for layer in trace.layers:
        router = model.get_submodule(layer.name)
        matrix = logits_matrix(router)
        if matrix is not None and layer.inputs is not None and scored(layer) == "ok":
            matrix = matrix.detach()[: layer.facts.n_experts].float().cpu()
            if _explains(layer, matrix, _offset(router, len(matrix))):
                found[layer.name] = matrix
    return found


def _offset(router: nn.Module, experts: int) -> Tensor | float:
    """What a linear layer with a bias adds to the product."""
    bias = getattr(router, "bias", None)
    if not isinstance(bias, Tensor) or bias.shape != (experts,) or bias.is_meta:
        return 0.0
    return bias.detach().double().cpu()


def _explains(layer: LayerTrace, matrix: Tensor, offset: Tensor | float) -> bool:
    """Whether the matrix makes the logits of the first tokens, up to the model's rounding."""
    some = take_tokens(layer, slice(PROBES))
    logits = logit_view(some).logits
    assert some.inputs is not None
    if logits is None or some.inputs.shape[1] != matrix.shape[1]:
        return False
    made = some.inputs.double() @ matrix.double().T + offset
    made = made.gather(1, some.experts.long())
    seen = logits.isfinite()
    return torch.allclose(made[seen], logits[seen], rtol=0.05, atol=0.05)


Progress = Callable[[str, int, int], None]
"""Told the stage ("forward", "jumps", "losses"), how much of it is done, and of how much."""

LONGEST = 512
"""Tokens per sequence where nothing else is asked for and the model takes as many."""

NO_JUMPS = "not measured: jumps were not asked for"


class Inspected(NamedTuple):
    """The results, and the routing that they were computed from."""

    inspection: Inspection
    trace: RoutingTrace


def inspect_model(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    tokens: int = 16384,
    batch_size: int = 8,
    sequence_length: int | None = None,
    layers: Collection[str | int] | None = None,
    seed: int = 0,
    jumps: bool = True,
    loss_jumps: bool = False,
    source: str = "",
    settings: MeasureSettings | None = None,
    jump_settings: JumpSettings | None = None,
    trace_folder: str | Path | None = None,
    progress: Progress | None = None,
) -> Inspected:
    """Everything about the routing of `model` on `text`, and what its flips cost.

    The text is cut into sequences without padding and run in evaluation mode without gradients.

    Args:
        model: a Mixture-of-Experts model of transformers.
        tokenizer: its tokenizer.
        text: what to route.
        tokens: how many tokens of it; a short text gives fewer.
        batch_size: sequences per forward pass.
        sequence_length: tokens per sequence; by default 512, or what the model takes if less.
        layers: routers to look at, by name or by place in the model; all by default.
        seed: of the random sample of tokens.
        jumps: whether jumps are measured.
        loss_jumps: whether what swaps do to the loss is measured too: 2 forward passes of a
            sequence for each of `jump_settings.loss_swaps` (32 unless told) tokens per layer.
        source: where the text is from, for the record.
        settings: grids and formats of the measures.
        jump_settings: sizes of the samples and levels; its seed is replaced by `seed`.
        trace_folder: a new folder to save the trace in.
        progress: is told how far the work is.
    """
    require(batch_size >= 1, f"batch_size must be at least 1, got {batch_size}")
    names = _chosen_names(model, layers)
    plan = replace(jump_settings or JumpSettings(), seed=seed)
    if loss_jumps and not plan.loss_swaps:
        plan = replace(plan, loss_swaps=32)
    clock, length = _Clock(), sequence_length or _default_length(model)
    with clock("tokenise"):
        tokenised = tokenise(tokenizer, text, tokens, length)
    run = _Run(model, names, tokenised, batch_size, progress or _silent)
    sampler = run.sampler(plan) if jumps else None
    with clock("forward"):
        trace = run.trace(sampler)
    trace = replace(trace, provenance=_provenance(trace, tokenised, source, batch_size, seed))
    with clock("measure"), one_thread():  # many small operations
        measures = measure(trace, settings, linear_weights(model, trace))
    with clock("jumps"):
        found = run.jumps(trace, sampler, plan, loss_jumps)
    trace = replace(trace, layers=tuple(replace(layer, inputs=None) for layer in trace.layers))
    if trace_folder is not None:
        save_trace(trace, trace_folder)
    inspection = Inspection(
        verdict=verdict(measures, found),
        findings=findings(measures, found),
        metrics=metrics(measures, found),
        measures=measures,
        jumps=found,
        sample=text_sample(trace, tokenised),
        provenance=dict(trace.provenance),
        timings=clock.timings(trace.n_tokens),
    )
    return Inspected(inspection, trace)


class _Run(NamedTuple):
    """The parts of an inspection that run the model."""

    model: nn.Module
    names: tuple[str, ...]
    text: TokenisedText
    batch_size: int
    progress: Progress

    def sampler(self, plan: JumpSettings) -> BlockSampler:
        """What looks at the blocks of the routers."""
        blocks = {name: block_of(self.model, name) for name in self.names}
        return BlockSampler(blocks, plan.near, plan.random, plan.seed)

    def trace(self, sampler: BlockSampler | None) -> RoutingTrace:
        """The routing of the whole text."""
        keep = "inputs" if inputs_fit(self.model, self.names, self.text.tokens) else "scores"
        with only_running(self.model), capture(self.model, keep=keep, layers=self.names) as seen:
            with sampler.watching(seen) if sampler else nullcontext():
                for ids in batches(self.text.sequences, self.batch_size):
                    forward(self.model, ids)
                    self.progress("forward", seen.n_tokens, self.text.tokens)
            return seen.trace()

    def jumps(
        self, trace: RoutingTrace, sampler: BlockSampler | None, plan: JumpSettings, losses: bool
    ) -> tuple[LayerJumps, ...]:
        """The jumps of every layer, with losses if asked for."""
        if sampler is None:
            return tuple(LayerJumps(layer.name, None, NO_JUMPS) for layer in trace.layers)
        with only_running(self.model):
            found = measure_jumps(self.model, trace, sampler, plan, self._told("jumps"))
            if not losses:
                return found
            done = []
            for layer, jumps in zip(trace.layers, found, strict=True):
                done.append(self._with_losses(trace, layer.name, jumps, plan))
                self.progress("losses", len(done), len(found))
        return tuple(done)

    def _with_losses(
        self, trace: RoutingTrace, name: str, jumps: LayerJumps, plan: JumpSettings
    ) -> LayerJumps:
        if jumps.value is None:
            return jumps
        arguments = (trace, trace.layer(name), jumps.value, plan.loss_swaps, self.batch_size)
        return replace(jumps, value=with_losses(self.model, *arguments))

    def _told(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.progress(stage, done, total)


class _Clock:
    """Seconds per stage."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._seconds[stage] = time.perf_counter() - before

    def timings(self, tokens: int) -> dict[str, float]:
        """Seconds of each stage, in all, and the tokens per second of the forward passes."""
        rate = tokens / max(self._seconds["forward"], 1e-9)
        total = time.perf_counter() - self._start
        return {**self._seconds, "total": total, "tokens_per_second": rate}


def _chosen_names(model: nn.Module, layers: Collection[str | int] | None) -> tuple[str, ...]:
    """Names of the routers, in the order of the model; places are counted from 0."""
    known = list(find_routers(model))
    if layers is None:
        return tuple(chosen_routers(model, None))
    wrong = [x for x in layers if isinstance(x, int) and not 0 <= x < len(known)]
    require(not wrong, f"no layers {wrong}: the model has routers 0 to {len(known) - 1}")
    return tuple(chosen_routers(model, [known[x] if isinstance(x, int) else x for x in layers]))


def _default_length(model: nn.Module) -> int:
    most = getattr(text_config(model), "max_position_embeddings", None)
    return min(LONGEST, most) if isinstance(most, int) and most > 1 else LONGEST


def _provenance(
    trace: RoutingTrace, text: TokenisedText, source: str, batch_size: int, seed: int
) -> dict[str, object]:
    digest = hashlib.sha256("".join(text.pieces).encode(errors="surrogatepass")).hexdigest()
    return {
        **trace.provenance,
        "text": {"source": source, "characters": text.characters, "sha256": digest},
        "tokens": trace.n_tokens,
        "sequences": len(text.sequences),
        "sequence_length": len(text.sequences[0]),
        "batch_size": batch_size,
        "seed": seed,
    }


def _silent(stage: str, done: int, total: int) -> None:
    """Report to nobody."""
