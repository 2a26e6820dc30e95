"""Smoothing a model: routing without jumps at ties, what that repairs and what it costs.

    repair = smooth("org/model", budget=8.5)
    repair.metrics["factor@router bf16"]
    repair.smoothed.save_pretrained("smoothed")

A copy is smoothed, with ε chosen on the first tokens of the text, and compared with the original
on the tokens that follow. Time is measured last, because the emulation of low precision only sees
the products of transformers' own experts.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch import Tensor, nn

from tieline.analysis.repair import Latency, Repair, repair_table, smoothing_latency
from tieline.analysis.sources import SHIPPED, ModelSource, Text, as_model, as_text, default_length
from tieline.analysis.text import tokenise
from tieline.core.errors import UnsupportedModelError, require
from tieline.hf.kernel import KERNEL
from tieline.hf.loading import LoadedModel, can_use_experts, use_experts
from tieline.hf.running import batches
from tieline.hf.smooth import smooth_

Progress = Callable[[str, int, int], None]


def smooth(
    source: ModelSource = SHIPPED,
    *,
    budget: float | None = None,
    noise: str | None = None,
    epsilon: float | None = None,
    a: float = 1.0,
    b: float = 1.0,
    k_max: int | None = None,
    text: Text = None,
    tokens: int = 16384,
    calibration: int = 4096,
    batch_size: int = 8,
    rounds: int = 12,
    experts_impl: str | None = None,
    seed: int = 0,
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Repair:
    """Make a copy of a model whose routing is continuous at ties, and compare it with the original.

    Args:
        source: a hub id, a folder, "shipped" for the model in the box, or `(model, tokenizer)`.
        budget: mean experts per token, between k and k_max; by default k + 0.5.
        noise: make the ramp wide against this precision instead: "bf16", "int8", "router bf16".
        epsilon: width of the band in units of the scores, for all layers, instead of both.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end: 1 is straight, 50 the paper's.
        k_max: slots per token; by default k + max(2, k/2).
        text: what to run: a str, the Path of a file, or None for the text in the box.
        tokens: tokens to measure on.
        calibration: tokens before those, to choose ε on.
        batch_size: sequences per forward pass.
        rounds: rounds to measure time in.
        experts_impl: experts to measure time with: "tieline", "grouped_mm", "eager", ...; by
            default those of the model, and "tieline" for the smoothed one.
        seed: seed of all noise.
        device: where to load a named model, in float32.
        revision: its branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with it may run.
        progress: called with stage, done and total while the work goes on.
    """
    alone = epsilon is None or budget is noise is None
    require(alone, "epsilon goes with no other choice of ε: leave out budget and noise")
    words, origin = as_text(text)
    options = {"device": device, "revision": revision, "trust_remote_code": trust_remote_code}
    loaded = as_model(source, "smooth takes", dtype="fp32", **options)
    plain = loaded.model
    _check_experts(plain, experts_impl)
    parts = _split(loaded, words, tokens, calibration)
    smoothed = copy.deepcopy(plain)
    record = smooth_(
        smoothed,
        epsilon=epsilon,
        budget=budget,
        noise=noise,
        a=a,
        b=b,
        k_max=k_max,
        calibration=list(batches(parts.calibration, batch_size)),
        progress=progress,
    )
    table = repair_table(
        plain, smoothed, parts.measured, batch_size=batch_size, seed=seed, progress=progress
    )
    ids = next(batches(parts.measured, batch_size))
    return Repair(
        model=loaded.name or type(plain).__name__,
        smoothing=record,
        repair=table,
        latency=_latencies(plain, smoothed, ids, rounds, experts_impl),
        provenance={"text": origin, "seed": seed, "batch_size": batch_size},
        smoothed=smoothed,
        tokenizer=loaded.tokenizer,
    )


def _check_experts(model: nn.Module, experts_impl: str | None) -> None:
    """Refuse an implementation that cannot be set, before any work."""
    before = getattr(model.config, "_experts_implementation", None)
    use_experts(model, experts_impl)
    use_experts(model, before if experts_impl else None)


class _Parts(NamedTuple):
    """Sequences to choose ε on, and those to measure on."""

    calibration: list[Tensor]
    measured: list[Tensor]


def _split(loaded: LoadedModel, words: str, tokens: int, calibration: int) -> _Parts:
    length = min(default_length(loaded.model), calibration, tokens)
    found = tokenise(loaded.tokenizer, words, calibration + tokens, length)
    first = -(-calibration // length)
    require(
        len(found.sequences) > first,
        f"the text has {found.tokens} tokens: too few to choose ε on {calibration} of them and to "
        "measure on others",
    )
    measured = [sequence for sequence in found.sequences[first:] if len(sequence) > 1]
    return _Parts(list(found.sequences[:first]), measured)


def _latencies(
    plain: Any, smoothed: Any, ids: Tensor, rounds: int, experts_impl: str | None
) -> tuple[Latency, ...]:
    """Time over the original's: with the experts asked for, or as they are and by our kernel."""
    for one in (plain, smoothed):
        use_experts(one, experts_impl)
    found = [smoothing_latency(plain, smoothed, ids, rounds)]
    if experts_impl is None and can_use_experts(smoothed):
        use_experts(smoothed, KERNEL)
        with suppress(UnsupportedModelError):  # experts of a layout that the kernel refuses
            found.append(smoothing_latency(plain, smoothed, ids, rounds))
        use_experts(smoothed, found[0].implementation)
    return tuple(found)
