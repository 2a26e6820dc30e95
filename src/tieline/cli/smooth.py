"""tieline smooth [MODEL] -o OUT: routing without jumps, and what that repairs."""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tieline.cli.app import Debug, Json, Seed, app, guarded, say
from tieline.cli.input import read_text
from tieline.cli.models import (
    BatchSize,
    Device,
    ModelName,
    Revision,
    TextFile,
    TrustRemoteCode,
    load,
)
from tieline.cli.progress import progress_bars
from tieline.core.errors import UnsupportedModelError, require
from tieline.core.files import check_targets, json_target, write_whole
from tieline.report.outputs import to_json

__all__ = ["smooth"]

FORMAT = "tieline-smooth"
TABLE = "tieline-smooth.json"
LONGEST = 512


@app.command()
@guarded
def smooth(
    model: ModelName = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="New folder for the smoothed model.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Mean experts per token, between k and k_max; k + 0.5 by default."),
    ] = None,
    noise: Annotated[
        str | None,
        typer.Option(help="Make the ramp wide against a precision: bf16, int8, 'router bf16', ..."),
    ] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Width of the band in units of the scores, all layers.")
    ] = None,
    a: Annotated[float, typer.Option("-a", help="Exponent at the lower end of the ramp.")] = 1.0,
    b: Annotated[
        float, typer.Option("-b", help="Exponent at its upper end: 1 is straight, 50 the paper's.")
    ] = 1.0,
    k_max: Annotated[int | None, typer.Option(help="Slots per token; k + max(2, k/2).")] = None,
    text: TextFile = None,
    tokens: Annotated[int, typer.Option(help="Tokens to measure on.", min=64)] = 16384,
    calibration: Annotated[
        int, typer.Option(help="Tokens before those, to choose ε on.", min=64)
    ] = 4096,
    batch_size: BatchSize = 8,
    rounds: Annotated[int, typer.Option(help="Rounds to measure time in.", min=2)] = 12,
    experts: Annotated[
        str | None,
        typer.Option(
            help="Experts to measure time with: tieline, grouped_mm, eager, ...; by default those "
            "of the model, and tieline for the smoothed one."
        ),
    ] = None,
    device: Device = "cpu",
    revision: Revision = None,
    seed: Seed = 0,
    json_to: Json = None,
    trust_remote_code: TrustRemoteCode = False,
    debug: Debug = False,
) -> None:
    """Make routing continuous at ties, in place of top-k, and tell what that repairs and costs."""
    _check(out, json_to)
    require(epsilon is None or budget is noise is None, "--epsilon goes with no other choice of ε")
    words, source = read_text(text) if text else ("", "shipped")
    loaded = load(model, revision, "fp32", device, trust_remote_code)
    wanted = {"epsilon": epsilon, "budget": budget, "noise": noise, "a": a, "b": b, "k_max": k_max}
    with progress_bars() as progress:
        done = _Run(loaded, experts, words, tokens, calibration, batch_size)
        result = done.measured(wanted, rounds, seed, progress)
        result["provenance"] = {"text": source, "seed": seed, "batch_size": batch_size}
        if out is not None:
            done.save(out, result)
    if (target := json_target(json_to)) is not None:
        write_whole(target, to_json(result, FORMAT).encode())
    _show(result, out, json_to)


def _check(out: Path | None, json_to: str | None) -> None:
    if out is not None:
        new = not out.exists() or (out.is_dir() and not any(out.iterdir()))
        require(new, f"{out} exists: a smoothed model is saved in a new folder")
    check_targets(json_target(json_to))


class _Run:
    """One model, before and after."""

    def __init__(
        self,
        loaded: Any,
        experts: str | None,
        words: str,
        tokens: int,
        calibration: int,
        batch_size: int,
    ) -> None:
        from tieline.analysis.text import tokenise
        from tieline.hf.loading import use_experts
        from tieline.hf.running import batches, text_config
        from tieline.hf.shipped import shipped_text

        before = getattr(loaded.model.config, "_experts_implementation", None)
        use_experts(loaded.model, experts)  # refuses a name that cannot be set before any work
        use_experts(loaded.model, before if experts else None)
        self._loaded, self._experts, self._batch_size = loaded, experts, batch_size
        most = getattr(text_config(loaded.model), "max_position_embeddings", None)
        length = min(LONGEST, most) if isinstance(most, int) and most > 1 else LONGEST
        length = min(length, calibration, tokens)
        found = tokenise(loaded.tokenizer, words or shipped_text(), calibration + tokens, length)
        first = -(-calibration // length)
        require(
            len(found.sequences) > first,
            f"the text has {found.tokens} tokens: too few to choose ε on {calibration} of them and "
            "to measure on others",
        )
        self._chosen_on = list(batches(found.sequences[:first], batch_size))
        self._measured_on = [s for s in found.sequences[first:] if len(s) > 1]
        self._smoothed: Any = None

    def measured(
        self, wanted: dict[str, Any], rounds: int, seed: int, progress: Callable[..., None]
    ) -> dict[str, Any]:
        """Smooth a copy, and compare it with the original."""
        import copy
        from dataclasses import asdict

        from tieline.analysis.repair import repair_table
        from tieline.core.records import to_plain
        from tieline.hf.running import batches
        from tieline.hf.smooth import smooth_

        plain = self._loaded.model
        self._smoothed = copy.deepcopy(plain)
        record = smooth_(self._smoothed, **wanted, calibration=self._chosen_on, progress=progress)
        options = {"batch_size": self._batch_size, "seed": seed, "progress": progress}
        table = repair_table(plain, self._smoothed, self._measured_on, **options)
        ids = next(batches(self._measured_on, self._batch_size))
        return {
            "model": self._loaded.name,
            "smoothing": record.to_dict(),
            "repair": to_plain(table),
            "latency": [asdict(one) for one in self._latencies(ids, rounds)],
        }

    def _latencies(self, ids: Any, rounds: int) -> list[Any]:
        """Time over the original's: with the asked experts, or as it is and by our kernel."""
        from tieline.analysis.repair import smoothing_latency
        from tieline.hf.kernel import KERNEL
        from tieline.hf.loading import can_use_experts, use_experts

        # only now: the emulation of low precision sees only products of transformers' own
        for one in (self._loaded.model, self._smoothed):
            use_experts(one, self._experts)
        found = [smoothing_latency(self._loaded.model, self._smoothed, ids, rounds)]
        if self._experts is None and can_use_experts(self._smoothed):
            use_experts(self._smoothed, KERNEL)
            with suppress(UnsupportedModelError):  # experts of a layout that the kernel refuses
                found.append(smoothing_latency(self._loaded.model, self._smoothed, ids, rounds))
            use_experts(self._smoothed, found[0].implementation)
        return found

    def save(self, out: Path, result: dict[str, Any]) -> None:
        """The model, its tokenizer and the table."""
        self._smoothed.save_pretrained(out)
        self._loaded.tokenizer.save_pretrained(out)
        write_whole(out / TABLE, to_json(result, FORMAT).encode())


def _show(result: dict[str, Any], out: Path | None, json_to: str | None) -> None:
    from tieline.report.smooth_table import smooth_view

    if json_to == "-":
        sys.stdout.write(to_json(result, FORMAT))
    else:
        Console(highlight=False, soft_wrap=False).print(smooth_view(result))
    for path in (out, json_target(json_to)):
        if path is not None:
            say(f"wrote {path}")
    if out is None and json_to != "-":
        say("add -o FOLDER to save the smoothed model")
