"""What every command shares: the application, its options, and how a command ends.

exit code 0   fine
          1   a stated condition failed
          2   bad input: one message on stderr, nothing written
          3   a bug of ours; --debug shows where
"""

import functools
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from tieline._version import __version__
from tieline.cli.input import with_json_target
from tieline.core.errors import TielineError

__all__ = [
    "BAD_INPUT",
    "CONDITION_HELD",
    "FINE",
    "Address",
    "Debug",
    "Engine",
    "Jobs",
    "Json",
    "Seed",
    "app",
    "guarded",
    "main",
    "say",
]

FINE, CONDITION_HELD, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130
EXTRAS = {
    "transformers": "hf",
    "plotly": "report",
    "matplotlib": "report",
    "numba": "tropical",
    "highspy": "tropical",
    "accelerate": "train",
    "sklearn": "estimation",
    "joblib": "cluster",
    "distributed": "cluster",
}

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
Engine = Annotated[str, typer.Option(help="loky (processes here), dask (a cluster) or serial.")]
Address = Annotated[str | None, typer.Option(help="Of the Dask scheduler, tcp://host:8786.")]
Jobs = Annotated[int, typer.Option(help="Processes at once; -1 for one per core.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and leave with its exit code."""
    words = with_json_target(sys.argv[1:] if arguments is None else arguments)
    app(words, prog_name="tieline")
    raise SystemExit(FINE)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
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
            say("stopped")
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
    say(words)
    raise typer.Exit(code) from problem


def say(words: str) -> None:
    """Tell the user on stderr."""
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
