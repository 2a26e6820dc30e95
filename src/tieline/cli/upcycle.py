"""tieline upcycle MODEL -o OUT: a dense model becomes a Mixture of Experts of the same function."""

import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tieline.cli.app import Debug, Json, Seed, app, guarded, say
from tieline.cli.input import layer_choice, read_text
from tieline.cli.progress import Report, progress_bars
from tieline.core.errors import require
from tieline.core.files import check_targets, json_target, whole_folder, write_whole
from tieline.report.outputs import to_json

__all__ = ["upcycle"]


@app.command()
@guarded
def upcycle(
    model: Annotated[
        str, typer.Argument(help="Folder or hub id, or a .bin file of llama2.c.", metavar="MODEL")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the mixture.")],
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 8,
    topk: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    layers: Annotated[
        str | None, typer.Option(help="Feed-forward networks, such as 0,2,5-7; all by default.")
    ] = None,
    router_init: Annotated[str, typer.Option(help="normal or orthogonal.")] = "normal",
    router_scale: Annotated[float, typer.Option(help="Size of the router's entries.")] = 0.02,
    noise: Annotated[
        float, typer.Option(help="Noise on the copies, relative to their size; 0 for none.")
    ] = 0.0,
    text: Annotated[
        Path | None, typer.Option(help="Text on which the loss is compared, UTF-8.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of it.", min=2)] = 4096,
    tokenizer: Annotated[
        Path | None, typer.Option(help="tokenizer.bin of llama2.c, for a .bin model.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT.")] = False,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Copy a dense model's feed-forward networks into experts; the function stays, to rounding."""
    target = json_target(json_to)
    check_targets(target)
    _check_out(out, overwrite)
    chosen = layer_choice(layers)
    words = read_text(text)[0] if text else None
    loaded = _load(model, tokenizer, revision, dtype)
    require(
        words is None or loaded.tokenizer is not None,
        "the model has no tokenizer, so no loss on --text (a .bin model takes one by --tokenizer)",
    )
    options = {"n_experts": experts, "k": topk, "layers": chosen, "router_init": router_init}
    options |= {"router_scale": router_scale, "noise": noise, "seed": seed}
    with progress_bars() as progress:
        told = _upcycle(loaded, words, tokens, options, progress)
        _save(loaded, out)
    told |= {"model": loaded.name, "output": str(out)}
    if target is not None:
        write_whole(target, to_json(told, "tieline-upcycling").encode())
    if json_to == "-":
        sys.stdout.write(to_json(told, "tieline-upcycling"))
    else:
        _show(told)
    say(f"wrote {out}")


def _check_out(out: Path, overwrite: bool) -> None:
    require(not out.exists() or out.is_dir(), f"not a folder: {out}")
    empty = not out.exists() or not any(out.iterdir())
    require(empty or overwrite, f"{out} is not empty: choose another folder or add --overwrite")
    ours = empty or (out / "config.json").is_file()
    require(ours, f"{out} holds something that is no model: it is not replaced")
    require(out.absolute().parent.is_dir(), f"no such folder: {out.absolute().parent}")


def _load(model: str, tokenizer: Path | None, revision: str | None, dtype: str) -> Any:
    from transformers.utils import logging

    from tieline.hf.loading import load_dense

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return load_dense(model, tokenizer=tokenizer, revision=revision, dtype=dtype)


def _upcycle(
    loaded: Any, words: str | None, tokens: int, options: dict[str, Any], progress: Report
) -> dict[str, Any]:
    """Do it, and measure the model's output and loss before and after."""
    from tieline.hf.loading import probe_output
    from tieline.hf.upcycle import upcycle_

    before = probe_output(loaded.model)
    loss_before = _loss(loaded, words, tokens, partial(progress, "loss before"))
    done = upcycle_(loaded.model, **options)
    after = probe_output(loaded.model)
    loss_after = _loss(loaded, words, tokens, partial(progress, "loss after"))
    change = ((after - before).abs().max() / before.abs().max()).item()
    return asdict(done) | {
        "noise": options["noise"],
        "output_change": change,
        "loss_before": loss_before,
        "loss_after": loss_after,
    }


def _loss(
    loaded: Any, words: str | None, tokens: int, progress: Callable[[int, int], None]
) -> dict[str, float | None] | None:
    from tieline.analysis.text import text_loss

    if words is None:
        return None
    model, tokenizer = loaded.model, loaded.tokenizer
    return text_loss(model, tokenizer, words, tokens=tokens, progress=progress)._asdict()


def _save(loaded: Any, out: Path) -> None:
    """Written beside and moved into place, so that no half-written folder is left."""
    with whole_folder(out, replace=True) as folder:
        loaded.model.save_pretrained(folder)
        if loaded.tokenizer is not None:
            loaded.tokenizer.save_pretrained(folder)


def _show(told: dict[str, Any]) -> None:
    kinds = f"{told['n_experts']} experts, top-{told['k']}"
    print(f"{len(told['layers'])} networks became mixtures of {kinds}")
    print(
        f"parameters: {told['parameters_before']:,} before, {told['parameters_after']:,} after, "
        f"{told['parameters_per_token']:,} per token"
    )
    print(f"largest change of an output, relative: {told['output_change']:.1e}")
    if told["loss_before"] is not None:
        before, after = told["loss_before"], told["loss_after"]
        error = "" if before["error"] is None else f" (± {before['error']:.4f} over sequences)"
        print(
            f"loss on {before['tokens']:,} tokens: {before['value']:.6f} before, "
            f"{after['value']:.6f} after{error}"
        )
