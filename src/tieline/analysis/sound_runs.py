"""Sound runs of a model in a format, emulated by rounding: the reference for the noise of B.

The model runs again in the expected format on up to 4,096 tokens, in ways in which engines differ
and that leave its function unchanged:

    plain       the batches of the comparison
    attention   the other of the implementations "eager" and "sdpa", if the model has both, two
                sequences at a time to keep the matrices of attention small
    padding     three sequences at a time, each followed by 24 more tokens, which causal attention
                ignores
    seed        noise on embeddings and states of the size of the format's own rounding, with new
                seeds until there are five runs

Runs in float32 differ in the last digits by the order of sums; there the noise is 2⁻²⁴.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor, nn

from tieline.analysis.compared_sides import ModelSide, trace_side
from tieline.analysis.noise_size import ExpectedFormat, recorded_format
from tieline.analysis.token_distances import DistanceObserver, TokenDistances
from tieline.core.errors import UnsupportedModelError
from tieline.models.emulate import Region
from tieline.models.number_formats import FORMATS
from tieline.run.condition import CLEAN, Condition, Perturbation, rounding_noise
from tieline.run.corpus import stacked_batches
from tieline.run.observers import RoutersAlone
from tieline.run.plan import Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.runner import Runner
from tieline.trace.record import RoutingTrace
from tieline.trace.selection import select_tokens

REFERENCE_TOKENS = 4096
"""Most tokens of a reference run."""
REFERENCE_RUNS = 5
PADDED_BATCH = 3
"""Sequences per pass with padding."""
ATTENTION_BATCH = 2
"""Sequences per pass of the other attention, which may hold matrices of all pairs of tokens."""
PADDING_TOKENS = 24
"""Tokens added to each sequence."""
FLOAT32_NOISE = 2.0**-24
"""Noise, over the root mean square of the states, of another order of sums in float32."""
OTHER_ATTENTION = {"eager": "sdpa", "sdpa": "eager"}
Sequences = Sequence[Int[Tensor, " _"]]


def sound_runs(
    sides: Sequence[ModelSide],
    traces: Sequence[RoutingTrace],
    sequences: Sequences,
    expected: ExpectedFormat | None,
    batch_size: int,
    region: Region | None = None,
    predictions: DistanceObserver | None = None,
    plain: RoutingTrace | None = None,
) -> list[RoutingTrace]:
    """Run a model of the comparison in the expected format, emulated in several ways.

    Empty if no format is expected, it cannot be emulated, or no model runs in float32.

    Args:
        sides: the models.
        traces: their own runs.
        sequences: token ids.
        expected: the expected format.
        batch_size: sequences per forward pass.
        region: region of the model in that format; by default the region that a side emulates in
            it, else "all".
        predictions: compares the predictions of the plain run with those of another run in float32.
        plain: the plain run if it was recorded before (`recorded_plain_run`).
    """
    exact = [
        side
        for side, trace in zip(sides, traces, strict=True)
        if recorded_format(trace.provenance) == "fp32"
    ]
    if expected is None or expected.name not in ("fp32", *FORMATS) or not exact:
        return []
    first = _reference_sequences(sequences)
    emulated: list[Region] = [side.region for side in sides if side.emulated == expected.name]
    default: Region = emulated[0] if emulated else "all"
    try:
        run = (exact[0], expected.name, region or default, first, batch_size, predictions)
        return _emulated_runs(*run, plain)
    except UnsupportedModelError:  # its routers cannot be emulated separately
        return []


def _reference_sequences(sequences: Sequences) -> Sequences:
    """The sequences within the first 4,096 tokens, at least one."""
    lengths = np.cumsum([len(sequence) for sequence in sequences])
    return sequences[: max(1, int(np.searchsorted(lengths, REFERENCE_TOKENS, side="right")))]


def recorded_plain_run(
    sides: tuple[ModelSide, ModelSide],
    traces: Sequence[RoutingTrace],
    distances: Sequence[TokenDistances],
    sequences: Sequences,
    expected: ExpectedFormat | None,
    batch_size: int,
) -> tuple[RoutingTrace, TokenDistances] | None:
    """The plain run and its distances to float32, if the compared runs contain them.

    They do if A is the model in float32, B the same object in the expected format, and batches end
    after the sequences of the first 4,096 tokens. None otherwise.

    Args:
        sides: A and B, run in batches of the same size.
        traces: their runs.
        distances: distances of their predictions, batch by batch.
        sequences: token ids.
        expected: the expected format.
        batch_size: sequences per forward pass.
    """
    a, b = sides
    is_exact = a.condition == CLEAN and recorded_format(traces[0].provenance) == "fp32"
    if expected is None or b.emulated != expected.name or b.model is not a.model or not is_exact:
        return None
    first = _reference_sequences(sequences)
    first_batches, batches = (list(stacked_batches(x, batch_size)) for x in (first, sequences))
    if not distances or any(
        x.shape != y.shape for x, y in zip(first_batches, batches, strict=False)
    ):
        return None
    tokens = slice(sum(map(len, first)))
    first_distances = TokenDistances(*(x[tokens] for x in TokenDistances.joined(distances)))
    return select_tokens(traces[1], tokens), first_distances


def _emulated_runs(
    exact: ModelSide,
    format_name: str,
    region: Region,
    sequences: Sequences,
    batch_size: int,
    predictions: DistanceObserver | None,
    plain: RoutingTrace | None,
) -> list[RoutingTrace]:
    """The runs in the table above, without "attention" if the model has one implementation."""
    name = None if format_name == "fp32" else format_name
    side = ModelSide(exact.model, name, region)
    runs = []
    if name is not None and plain is not None:
        runs.append(plain)
    elif name is not None and predictions is not None:
        runs.append(_trace_with_predictions(exact, side, sequences, batch_size, predictions))
    elif name is not None:
        runs.append(_trace_routers_only(side, sequences, batch_size))
    with _switched_attention(exact.model) as has_other:
        if has_other:
            size = min(batch_size, ATTENTION_BATCH)
            runs.append(_trace_routers_only(side, sequences, size))
    padded = [torch.cat((x, x[:1].expand(PADDING_TOKENS))) for x in sequences]
    trace = _trace_routers_only(side, padded, PADDED_BATCH)
    lengths = torch.tensor([len(x) for x in sequences], device="cpu")
    is_original = trace.positions.long() < lengths[trace.documents.long()]
    runs.append(select_tokens(trace, is_original.nonzero().flatten()))
    for seed in range(REFERENCE_RUNS - len(runs)):
        noisy_side = side._replace(own_condition=_with_seeded_noise(side.condition, seed))
        ratio = FLOAT32_NOISE if name is None else rounding_noise(name)
        with _noisy_embeddings(exact.model, ratio, seed):
            runs.append(_trace_routers_only(noisy_side, sequences, batch_size))
    return runs


def _trace_routers_only(side: ModelSide, sequences: Sequences, batch_size: int) -> RoutingTrace:
    """The routing of a model without running what follows its last router."""
    ranks = Ranks.share_batches(None, list(stacked_batches(sequences, batch_size)))
    return trace_side(side, ranks, [RoutersAlone(side.model)], logits="none")


@contextmanager
def _noisy_embeddings(model: nn.Module, ratio: float, seed: int) -> Iterator[None]:
    """Add noise of `ratio` times the root mean square of each embedded token."""
    generator = torch.Generator().manual_seed(seed)
    embed: Any = getattr(model, "get_input_embeddings", lambda: None)()
    if embed is None:
        yield
        return

    def add_noise(module: nn.Module, args: object, output: Tensor) -> Tensor:
        """The embeddings with new noise."""
        noise = torch.randn(output.shape, generator=generator, device=generator.device).to(output)
        return output + ratio * output.square().mean(-1, keepdim=True).sqrt() * noise

    handle = embed.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()


def _with_seeded_noise(condition: Condition, seed: int) -> Condition:
    """The condition with noise of the size of its rounding, drawn by a seed."""
    if condition.perturbation is None:
        noise = Perturbation("state noise", FLOAT32_NOISE, "model")
        return Condition(noise, seed=(seed,))
    return Condition(condition.perturbation, draw=1, seed=(seed,))


@contextmanager
def _switched_attention(model: nn.Module) -> Iterator[bool]:
    """Run with the other implementation of attention; yields whether the model has it."""
    config: Any = getattr(model, "config", None)
    implementation = getattr(config, "_attn_implementation", None)
    switch: Any = getattr(model, "set_attn_implementation", None)
    other = OTHER_ATTENTION.get(str(implementation))
    if other is None or switch is None:
        yield False
        return
    try:
        switch(other)
    except ValueError:  # transformers refuses what a model does not support
        yield False
        return
    try:
        yield True
    finally:
        switch(implementation)


def _trace_with_predictions(
    exact: ModelSide,
    side: ModelSide,
    sequences: Sequences,
    batch_size: int,
    predictions: DistanceObserver,
) -> RoutingTrace:
    """Record the routing of a side, and compare its predictions with those in float32."""
    ranks = Ranks.share_batches(None, list(stacked_batches(sequences, batch_size)))
    firsts = [Pass(n, exact.condition) for n in ranks.numbered]
    seconds = [Pass(first.batch, side.condition, first, model=1) for first in firsts]
    plan = Plan((Phase("forward", ranks.numbered, (*firsts, *seconds), logits="optional"),))
    recorder = side.recorder(1)
    Runner(exact.runner_model, side.runner_model, ranks=ranks).run(plan, [recorder, predictions])
    return recorder.trace()
