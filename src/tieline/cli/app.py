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
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from tieline._version import __version__
from tieline.cli.input import with_json_target, with_new_names
from tieline.core.errors import TielineError

FINE, CONDITION_HELD, BAD_INPUT, OUR_BUG, INTERRUPTED = 0, 1, 2, 3, 130
GROUPS = {
    "Look": ("inspect", "diff", "audit"),
    "Repair": ("smooth", "upcycle"),
    "Files": ("merge",),
    "Lab": ("train", "design", "rates", "reproduce"),
}
"""The commands as the help groups them; each is a file of this folder."""

EXTRAS = {
    "transformers": "hf",
    "plotly": "report",
    "matplotlib": "report",
    "numba": "tropical",
    "highspy": "tropical",
    "accelerate": "train",
    "PIL": "train",
    "sklearn": "estimation",
    "joblib": "cluster",
    "distributed": "cluster",
}
"""The optional dependency that installs each package."""


class _Grouped(TyperGroup):
    """Lists the commands under the headings of `GROUPS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for names in GROUPS.values() for name in names]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, names in GROUPS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            rows = [(name, one.get_short_help_str(200)) for name, one in found if one is not None]
            with formatter.section(heading):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=_Grouped,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure, explain and remove the routing ties of Mixture-of-Experts models.",
)

ModelName = Annotated[
    str,
    typer.Argument(
        help="Folder or hub id; by default the model in the box.",
        metavar="MODEL",
        show_default=False,
    ),
]
TextFile = Annotated[
    Path | None, typer.Option(help="Text to run, UTF-8; by default the one in the box.")
]
BatchSize = Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow code that comes with MODEL to run.")
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="FILE.html", help="Write the page with charts.")
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE.json|-]", help="Write JSON to a file or to stdout."),
]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a bug.")]
Executor = Annotated[
    str, typer.Option("--executor", help="loky (processes here), dask (a cluster) or serial.")
]
Address = Annotated[str | None, typer.Option(help="Of the Dask scheduler, tcp://host:8786.")]
Jobs = Annotated[int, typer.Option(help="Processes at once; -1 for one per core.")]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with its code."""
    words = with_new_names(sys.argv[1:] if arguments is None else arguments)
    app(with_json_target(words), prog_name="tieline")
    raise SystemExit(FINE)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn every way a command can end into an exit code and one message."""

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
    """Print a message to stderr."""
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
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = None,
) -> None:
    """Options of `tieline` itself."""
