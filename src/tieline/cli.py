"""The command line, the only file that prints.

tieline inspect [MODEL]        how near a model's tokens are to a routing tie
tieline merge A B ... -o C     one streaming summary of several

exit code 0   fine
          1   a condition of --fail-if holds
          2   bad input: one message on stderr, nothing written
          3   a bug of ours; --debug shows where
"""

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from tieline._version import __version__
from tieline.cli_input import layer_choice, read_text, with_json_target
from tieline.cli_progress import progress_bars
from tieline.errors import TielineError
from tieline.report.conditions import (
    Condition,
    check_names,
    held,
    metric_names,
    parse_condition,
)
from tieline.report.files import check_target, write_whole
from tieline.report.numbers import significant
from tieline.report.outputs import Outputs, to_json
from tieline.report.terminal import inspection_view

__all__ = ["app", "main"]

FINE, CONDITION_HELD, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130
EXTRAS = {"transformers": "hf", "plotly": "report", "matplotlib": "report"}

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Measures, explains and removes the routing ties of Mixture-of-Experts models.",
)

Json = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE.json|-]", help="Write JSON to a file or to stdout."),
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is drawn at random.", min=0)]
Debug = Annotated[bool, typer.Option("--debug", help="Show where a bug of ours happened.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code."""
    words = with_json_target(sys.argv[1:] if arguments is None else arguments)
    app(words, prog_name="tieline")
    raise SystemExit(FINE)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """The command with every way it can end turned into an exit code and one message."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except (typer.Exit, SystemExit):
            raise
        except (TielineError, OSError) as problem:
            _leave(BAD_INPUT, problem, f"error: {problem}", kwargs["debug"])
        except KeyboardInterrupt:
            _say("stopped")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as problem:
            extra = EXTRAS.get(getattr(problem, "name", None) or "")
            if isinstance(problem, ModuleNotFoundError) and extra:
                words = f"error: {problem}: pip install 'tieline[{extra}]'"
                _leave(BAD_INPUT, problem, words, kwargs["debug"])
            words = f"this is a bug of tieline: {type(problem).__name__}: {problem}"
            hint = "" if kwargs["debug"] else "; --debug shows where it happened"
            _leave(OUR_BUG, problem, words + hint, kwargs["debug"])

    return run


def _leave(code: int, problem: BaseException, words: str, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(problem)
    _say(words)
    raise typer.Exit(code) from problem


def _say(words: str) -> None:
    print(words, file=sys.stderr)


def _show_version(wanted: bool | None) -> None:
    if wanted:
        print(f"tieline {__version__}")
        raise typer.Exit(FINE)


@app.callback()
def _root(
    version: Annotated[
        bool | None,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and leave."
        ),
    ] = None,
) -> None:
    """What every command shares."""


@app.command()
@_guarded
def inspect(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder or hub id; without it, the model in the box.", metavar="MODEL"),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to route, UTF-8; by default one in the box.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens of it.", min=1)] = 16384,
    batch_size: Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)] = 8,
    dtype: Annotated[
        str, typer.Option(help="auto, fp32, bf16 or fp16: the precision the model runs in.")
    ] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")] = "cpu",
    layers: Annotated[
        str | None, typer.Option(help="Routed layers, such as 0,2,5-7, or names of routers.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="Write the page, report.html.")] = None,
    json_to: Json = None,
    figure: Annotated[
        Path | None, typer.Option(help="Write a figure for papers: .pdf, .png or .svg.")
    ] = None,
    save_trace: Annotated[
        Path | None, typer.Option(help="Save the routing itself in a new folder.")
    ] = None,
    fail_if: Annotated[
        list[str] | None,
        typer.Option(help="Leave with 1 if this holds, 'flip@bf16>0.02'; may be given often."),
    ] = None,
    loss_jumps: Annotated[
        bool, typer.Option("--loss-jumps", help="Also measure what flips do to the loss.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Let code that comes with MODEL run.")
    ] = False,
    debug: Debug = False,
) -> None:
    """How near a model's tokens are to a routing tie, in which layers, and what a flip costs."""
    conditions = [parse_condition(words) for words in fail_if or []]
    outputs = Outputs(out, json_to, figure, save_trace)
    outputs.check()
    chosen = layer_choice(layers)
    words, source = read_text(text) if text else ("", "shipped")
    check_names(conditions, _known_metrics(loss_jumps))
    loaded = _load(model, revision, dtype, device, trust_remote_code)
    with progress_bars() as progress:
        result, trace = _inspect(
            loaded,
            words,
            source=source,
            tokens=tokens,
            batch_size=batch_size,
            layers=chosen,
            seed=seed,
            loss_jumps=loss_jumps,
            progress=progress,
        )
        outputs.write(result, trace)
    _show(result, outputs)
    _judge(conditions, result["metrics"])


def _known_metrics(loss_jumps: bool) -> set[str]:
    from tieline.geometry.settings import MeasureSettings

    grid = MeasureSettings()
    known = metric_names(grid.precisions, grid.sigmas, grid.probabilities)
    return known if loss_jumps else known - {"loss"}


def _load(name: str | None, revision: str | None, dtype: str, device: str, trust: bool) -> Any:
    """The model; heavy imports wait until here, so that help and refusals come at once."""
    from transformers.utils import logging

    from tieline.hf.loading import load_model

    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    return load_model(name, revision=revision, dtype=dtype, device=device, trust_remote_code=trust)


def _inspect(loaded: Any, text: str, **options: Any) -> tuple[dict[str, Any], Any]:
    from tieline.audit.inspect import inspect_model
    from tieline.hf.shipped import shipped_text

    done = inspect_model(loaded.model, loaded.tokenizer, text or shipped_text(), **options)
    result: dict[str, Any] = done.inspection.to_dict()
    result["provenance"] |= {"model": loaded.name}
    return result, done.trace


def _show(result: dict[str, Any], outputs: Outputs) -> None:
    """The result in the terminal, or as JSON where stdout is asked for."""
    if outputs.to_stdout:
        sys.stdout.write(to_json(result))
    else:
        console = Console(highlight=False, soft_wrap=False)
        console.print(inspection_view(result, console.width))
    for path in outputs.files:
        _say(f"wrote {path}")
    if not outputs.files and not outputs.to_stdout:
        _say("add --out report.html for the page with charts")


def _judge(conditions: list[Condition], metrics: dict[str, float]) -> None:
    found = held(conditions, metrics)
    for condition, value in found:
        _say(f"failed: {condition.text} ({condition.metric} is {significant(value, 4)})")
    if found:
        raise typer.Exit(CONDITION_HELD)


@app.command()
@_guarded
def merge(
    summaries: Annotated[
        list[Path], typer.Argument(help="Folders of streaming summaries.", metavar="A B ...")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="New folder for the merged summary.")],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a summary that is there.")
    ] = False,
    seed: Seed = 0,
    json_to: Json = None,
    debug: Debug = False,
) -> None:
    """Merge streaming summaries of parts of a run into that of the whole, exactly.

    Nothing is drawn at random: --seed is accepted, as by every command, and changes nothing.
    """
    from tieline.trace import load_summary, save_summary
    from tieline.trace import merge as merged

    target = None if json_to in (None, "-") else Path(str(json_to))
    if target is not None:
        check_target(target)
    whole = merged([load_summary(folder) for folder in summaries])
    told = {
        "summaries": [str(folder) for folder in summaries],
        "output": str(out),
        "tokens": whole.tokens,
        "sampled": whole.sample.n_tokens,
        "layers": [layer.name for layer in whole.layers],
    }
    save_summary(whole, out, overwrite=overwrite)
    if target is not None:
        write_whole(target, to_json(told, "tieline-merge").encode())
    if json_to == "-":
        sys.stdout.write(to_json(told, "tieline-merge"))
    else:
        print(
            f"{out}: {whole.tokens:,} tokens of {len(summaries)} summaries, "
            f"{len(whole.layers)} layers"
        )
