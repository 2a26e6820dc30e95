"""What every command shares: the application, its options, what users type, what errors say.

with_json_target   a bare --json means --json -
in_options         a message of the library, with the names of the command's options
layer_choice       "0,2,5-7" or names of routers
numbers            1,2,4
memory_size        8G
share              0.01 or 1%

`tieline.cli.ending` lists the exit codes.
"""

import functools
import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperGroup
from typer.models import OptionInfo

from tieline._version import __version__
from tieline.cli.ending import (
    BAD_INPUT,
    CONDITION_HELD,
    FINE,
    INTERRUPTED,
    OUR_BUG,
    closed_pipe_ignored,
    handle_interrupts,
    mute_stdout,
    notes,
    say,
    was_stopped,
)
from tieline.cli.options import Debug, option_names, with_settings
from tieline.cli.ranks import claims_error_report
from tieline.core.errors import (
    ParameterError,
    PrecisionWarning,
    StreamingWarning,
    TielineError,
    require,
    shortened,
)
from tieline.core.files import out_of_space
from tieline.core.plugins import command_groups, import_command
from tieline.core.settings import SettingError

__all__ = [
    "BAD_INPUT",
    "CONDITION_HELD",
    "OUR_BUG",
    "Address",
    "BatchSize",
    "Debug",
    "Device",
    "Executor",
    "Html",
    "Jobs",
    "Json",
    "Keep",
    "Memory",
    "ModelName",
    "Overwrite",
    "Resume",
    "Revision",
    "Seed",
    "Stream",
    "TextFile",
    "TrustRemoteCode",
    "app",
    "guarded",
    "in_options",
    "layer_choice",
    "memory_size",
    "numbers",
    "run",
    "say",
    "share",
    "whole_app",
    "with_json_target",
]

EXTRAS = {
    "transformers": "hf",
    "plotly": "report",
    "matplotlib": "report",
    "jinja2": "report",
    "numba": "tropical",
    "highspy": "tropical",
    "accelerate": "train",
    "PIL": "train",
    "sklearn": "estimation",
    "joblib": "cluster",
    "dask": "cluster",
    "distributed": "cluster",
}
"""The optional dependency that installs each package."""

NO_MEMORY = "can't allocate memory"
"""What torch says where Python raises MemoryError."""


class _Grouped(TyperGroup):
    """Lists the commands under the headings that the plug-ins name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [command.name for group in command_groups().values() for command in group]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for heading, group in command_groups().items():
            commands = [(entry.name, self.get_command(ctx, entry.name)) for entry in group]
            rows = [
                (name, command.get_short_help_str(200))
                for name, command in commands
                if command is not None
            ]
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
    Path | None,
    typer.Option(help="Text to run, UTF-8, or - for stdin; by default the one in the box."),
]
BatchSize = Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow code that comes with MODEL to run.")
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html|-", help="Write the page with charts; - is stdout."),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Replace what is there: files unasked, folders of its kind."),
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE.json|-]", help="Write JSON to a file or to stdout."),
]
Seed = Annotated[int, typer.Option(help="Seed of all random numbers.", min=0)]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Read the weights layer by layer; by default where they exceed the free memory.",
        show_default=False,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="8G", help="Memory that a streamed model may take; by default all free."),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on where a killed streamed run with the same options was."),
]
Keep = Annotated[
    bool,
    typer.Option("--keep/--no-keep", help="Keep files fetched from the hub to be streamed."),
]
Executor = Annotated[
    str, typer.Option("--executor", help="loky (processes here), dask (a cluster) or serial.")
]
Address = Annotated[str | None, typer.Option(help="Of the Dask scheduler, tcp://host:8786.")]
Jobs = Annotated[int, typer.Option(help="Processes at once; -1 for one per core.")]


TAKES_MODEL = (
    *("inspect", "diff", "audit", "smooth", "capture", "reroute", "upcycle"),
    *("soften", "slice", "walks", "attention", "frontier"),
)
"""Commands whose arguments are models and files."""

LIBRARY_NAMES = {
    "upcycle": {"k": "--topk"},
    "design": {"k": "--topk", "N": "--n-experts", "width": "--expert-width"},
    "rates": {"d": "--dim", "radii": "--radius"},
    "merge": {'documents="renumber"': "--renumber", "allow overwriting": "add --overwrite"},
}
"""Arguments of the library whose options have another name, by command."""

MOST_LAYERS = 100_000
"""Longest range of layers, so that a typing error costs no memory."""

Number = TypeVar("Number", int, float)
_PLACES = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        typed = sys.argv[1:] if arguments is None else arguments
        whole_app()(with_json_target(typed), prog_name="tieline")
        code = FINE
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else FINE
        if isinstance(left.__context__, BrokenPipeError):  # of help, which Click takes for an error
            mute_stdout()
            return FINE
    except TielineError as problem:
        say(f"error: {problem}")
        code = BAD_INPUT
    except OSError as problem:
        code = _unwritten(problem)
    return _flushed(code)


def whole_app() -> typer.Typer:
    """The application with all its commands."""
    for group in command_groups().values():
        for command in group:
            import_command(command)
    return app


def _flushed(code: int) -> int:
    """Write out what stdout still holds; Python would only notice trouble when it is too late."""
    try:
        with closed_pipe_ignored():
            pass
    except OSError as problem:
        return _unwritten(problem)
    return code


def _unwritten(problem: OSError) -> int:
    mute_stdout()
    say(f"error: cannot write to stdout: {problem.strerror}")
    return BAD_INPUT


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Turn every way a command can end into an exit code and one message."""
    run_command = with_settings(command)
    takes_debug = "debug" in inspect.signature(command).parameters

    @functools.wraps(run_command)
    def run(debug: bool = False, **values: Any) -> None:
        try:
            with (
                handle_interrupts(),
                closed_pipe_ignored(),
                notes(PrecisionWarning, StreamingWarning),
            ):
                run_command(**values, **({"debug": debug} if takes_debug else {}))
        except (typer.Exit, SystemExit):
            raise
        except BaseException as problem:
            if debug:
                traceback.print_exception(problem)
            code, message = exit_message(problem, run_command)
            hint = "; --debug shows where it happened" if code == OUR_BUG else ""
            if claims_error_report():
                say(shortened(message) + ("" if debug else hint))
            raise typer.Exit(code) from problem

    if takes_debug:
        return run
    signature = inspect.signature(run_command)
    debug = inspect.Parameter(
        "debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug
    )
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), debug])  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {**run_command.__annotations__, "debug": Debug}
    return run


def exit_message(problem: BaseException, command: Callable[..., None]) -> tuple[int, str]:
    """Return the exit code and the message for whatever a command raised."""
    if isinstance(problem, KeyboardInterrupt | typer.Abort) or was_stopped():
        return INTERRUPTED, "stopped"
    if isinstance(problem, SettingError):
        return BAD_INPUT, f"error: {problem.naming(option_names(command))}"
    if isinstance(problem, TielineError):
        return BAD_INPUT, f"error: {in_options(str(problem), command)}"
    if out_of_space(problem):
        return BAD_INPUT, f"error: no space left on the disk of {_place(problem)}"
    if isinstance(problem, OSError):
        return BAD_INPUT, f"error: {problem}"
    if isinstance(problem, MemoryError) or NO_MEMORY in str(problem):
        return BAD_INPUT, f"error: not enough memory: {problem}"
    extra = EXTRAS.get((getattr(problem, "name", None) or "").partition(".")[0])
    if isinstance(problem, ModuleNotFoundError) and extra:
        if command.__name__ == "train" and extra == "hf":
            extra = "train"  # which brings transformers and what training needs besides
        return BAD_INPUT, f"error: {problem}: pip install 'tieline[{extra}]'"
    return OUR_BUG, f"this is a bug of tieline: {type(problem).__name__}: {problem}"


def _place(problem: BaseException) -> str:
    """The file that an error of the operating system names."""
    named = getattr(problem, "filename", None) or getattr(problem.__cause__, "filename", None)
    return str(named or "the output")


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


def with_json_target(words: Sequence[str]) -> list[str]:
    """Insert "-" (stdout) after each --json that names no file.

    Only "-" and names that end in .json are taken as its value, so a model or an option may follow
    a bare --json; what can be neither a model nor a file is refused, not looked for on the hub.
    """
    done: list[str] = []
    for place, word in enumerate(words):
        done.append(word)
        following = words[place + 1] if place + 1 < len(words) else "--"
        if word == "--json" and following != "-" and not following.endswith(".json"):
            require(
                following.startswith("-") or not _looks_like_file(following, words[0]),
                f"--json {following}: a file of JSON ends in .json; write --json={following} for "
                "this name, or --json - for stdout",
            )
            done.append("-")
    return done


def _looks_like_file(word: str, command: str) -> bool:
    """Whether a word after --json is a file to write rather than an argument of the command."""
    if Path(word).exists() or word == "demo":
        return False
    if command in TAKES_MODEL and "/" not in word:  # hub ids are ORGANISATION/NAME
        return True
    return re.search(r"\.[A-Za-z][A-Za-z0-9]{0,4}$", word) is not None


def in_options(message: str, command: Callable[..., None]) -> str:
    """The message of an error with the options of a command for the arguments of the library.

    Names with an underscore are replaced everywhere, other words only where a value, a comparison
    or a rule follows ("noise must be ..."), because they are English words too.
    """
    names = _options(command) | LIBRARY_NAMES.get(command.__name__, {})
    for name, option in sorted(names.items(), key=lambda pair: -len(pair[0])):
        if not name.isidentifier():
            message = message.replace(name, option)
            continue
        word = rf"(?<![\w./'\"-]){name}(?![\w.'\"-])"
        message = re.sub(rf"{word}\s?=(?!=)\s?", f"{option} ", message)
        message = re.sub(rf"{word}(?= (?:[<>]=?|must|and \w+ must) )", option, message)
        message = re.sub(rf"^{word}(?= )", option, message)
        if "_" in name:
            message = re.sub(word, option, message)
    return message


def _options(command: Callable[..., None]) -> dict[str, str]:
    """The options of a command by the names of their parameters."""
    found: dict[str, str] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, OptionInfo):
                words = (
                    info.default,
                    *(info.param_decls or ()),
                )  # Typer keeps the first as default
                own = [word for word in words if isinstance(word, str) and word.startswith("-")]
                found[name] = max(own, key=len, default=f"--{name.replace('_', '-')}")
    return found


def layer_choice(words: str | None) -> list[str | int] | None:
    """Places and names of layers from "0,2,5-7" or "model.layers.3.mlp.gate"; None for all."""
    if words is None:
        return None
    chosen: list[str | int] = []
    for part in (part.strip() for part in words.split(",")):
        require(bool(part), f"--layers: a layer is missing between the commas of {words!r}")
        chosen += _places(part)
    return chosen


_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def memory_size(text: str | None) -> int | None:
    """Bytes in words such as 8G, 800M or 8.5GB; None for None."""
    if text is None:
        return None
    match = re.fullmatch(
        r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.ASCII | re.IGNORECASE
    )
    require(match is not None, f"--memory is a size such as 8G or 800M, got {text!r}")
    assert match is not None
    found = int(float(match[1]) * _SIZES[match[2].upper()])
    require(found > 0, f"--memory must be positive, got {text!r}")
    return found


def numbers(
    option: str, words: str | None, kind: Callable[[float], Number]
) -> tuple[Number, ...] | None:
    """Finite numbers from "1,2,4"; None for no words."""
    if words is None:
        return None
    try:
        values = [float(part) for part in words.split(",")]
    except ValueError as problem:
        raise ParameterError(f"{option} takes numbers such as 1,2,4, got {words!r}") from problem
    require(all(map(math.isfinite, values)), f"{option} takes finite numbers, got {words!r}")
    found = tuple(kind(value) for value in values)
    require(list(found) == values, f"{option} takes whole numbers, got {words!r}")
    return found


def share(option: str, words: str | None) -> float | None:
    """A share between 0 and 1 from "0.01" or "1%"; None for no words."""
    if words is None:
        return None
    try:
        number = float(words.removesuffix("%")) / (100 if words.endswith("%") else 1)
    except ValueError:
        raise ParameterError(f"{option}: write a share such as 0.01 or 1%, got {words!r}") from None
    require(0 <= number <= 1, f"{option}: a share lies between 0 and 1, got {words!r}")
    return number


def _places(part: str) -> list[str | int]:
    match = _PLACES.fullmatch(part)
    if match is None:
        return [part]
    first, last = int(match[1]), int(match[2] or match[1])
    require(
        first <= last < MOST_LAYERS,
        f"--layers: a range goes from a lower layer to a higher one, got {part!r}",
    )
    return list(range(first, last + 1))
