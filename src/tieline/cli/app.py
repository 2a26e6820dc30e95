"""The Typer application: groups of commands, exit codes and error messages.

`tieline.cli.terminal_session` lists the exit codes.
"""

import functools
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from tieline._version import __version__
from tieline.cli.options import Debug, add_command_parameter, option_names, with_settings
from tieline.cli.progress import progress_bars
from tieline.cli.terminal_session import (
    BAD_INPUT,
    FINE,
    INTERRUPTED,
    OUR_BUG,
    closed_pipe_ignored,
    handle_interrupts,
    mute_stdout,
    print_to_stderr,
    uncollected_imports,
    warnings_as_notes,
    was_stopped,
)
from tieline.cli.torchrun import claims_error_report, joined_processes
from tieline.core.errors import (
    PrecisionWarning,
    StreamingWarning,
    TielineError,
    UnusedTensorsWarning,
    require,
    shortened_message,
)
from tieline.core.files import out_of_space
from tieline.core.memory import share_one_heap
from tieline.core.plugins import command_groups, import_command
from tieline.core.setting_fields import SettingError, Settings
from tieline.core.untrusted_input import admit_source

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
"""The extra of Tieline that installs each optional package."""

NO_MEMORY = "can't allocate memory"
"""Text in torch's error for what Python raises as MemoryError."""


class _GroupedCommands(TyperGroup):
    """Lists the commands under the headings of the plug-ins."""

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
            if rows:  # a plug-in that cannot be imported has none
                with formatter.section(heading):
                    formatter.write_dl(rows)


app = typer.Typer(
    cls=_GroupedCommands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Measure, explain and remove the routing ties of Mixture-of-Experts models.",
)

TAKES_MODEL = (
    *("inspect", "diff", "audit", "smooth", "capture", "reroute", "upcycle"),
    *("soften", "slice", "walks", "attention", "frontier"),
)
"""Commands with models among their arguments."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        arguments = sys.argv[1:] if arguments is None else arguments
        _check_operands(arguments)
        app_with_commands(next(iter(arguments), ""))(
            with_json_target(arguments), prog_name="tieline"
        )
        code = FINE
    except SystemExit as exit_error:
        code = exit_error.code if isinstance(exit_error.code, int) else FINE
        if isinstance(exit_error.__context__, BrokenPipeError):  # of help, an error for Click
            mute_stdout()
            return FINE
    except TielineError as problem:
        print_to_stderr(f"error: {problem}")
        code = BAD_INPUT
    except OSError as problem:
        code = _stdout_error(problem)
    try:  # flush stdout here: Python itself would report an error too late
        with closed_pipe_ignored():
            return code
    except OSError as problem:
        return _stdout_error(problem)


def _check_operands(arguments: Sequence[str]) -> None:
    """Raise for unfit models and files among the first arguments, before Typer loads its parser."""
    command, *words = arguments or [""]
    operands = 1 if command in TAKES_MODEL or command == "convert" else 0
    operands = len(words) if command in ("diff", "check", "merge") else operands
    for word in takewhile(lambda word: not word.startswith("-"), words[:operands]):
        admit_source(word, "--trust-remote-code" in words)


def app_with_commands(first: str = "") -> typer.Typer:
    """Return the application with the command called `first`, or with all if there is none.

    With --version no command is imported, so that it prints at once.
    """
    commands = [command for group in command_groups().values() for command in group]
    matching = [command for command in commands if command.name == first]
    for command in [] if first == "--version" else matching or commands:
        import_command(command)
    return app


def _stdout_error(problem: OSError) -> int:
    """Report that stdout cannot be written to, and return the exit code."""
    mute_stdout()
    print_to_stderr(f"error: cannot write to stdout: {problem.strerror}")
    return BAD_INPUT


def run_job(job: str, *sources: object, settings: Settings, activity: str = "") -> Any:
    """Import and run a job on models, with its progress on stderr.

    Args:
        job: "module:function".
        sources: positional arguments of the function: models and files.
        settings: settings of the job.
        activity: what the job does ("auditing"), if the job may run on several processes.
    """
    for source in sources:
        admit_source(source, bool(getattr(settings, "trust_remote_code", False)))
    if getattr(settings, "stream", False) is not False:
        share_one_heap()  # before the progress bar has a thread
    with progress_bars() as progress, ExitStack() as processes:
        options: dict[str, Any] = {"settings": settings, "progress": progress}
        if activity:
            parallel = getattr(settings, "parallel", None)
            options["parallel"] = processes.enter_context(joined_processes(parallel, activity))
        with uncollected_imports():
            from tieline.models.saved_models import quiet_transformers

            module, _, function = job.partition(":")
            run_function = getattr(import_module(module), function)
        quiet_transformers()
        return run_function(*sources, **options)


def guarded(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command so that every error ends it with an exit code and one message."""
    run_command = with_settings(command)

    @functools.wraps(run_command)
    def run(debug: bool = False, **values: Any) -> None:
        printed = warnings_as_notes(PrecisionWarning, StreamingWarning, UnusedTensorsWarning)
        try:
            with handle_interrupts(), closed_pipe_ignored(), printed:
                run_command(**values)
        except (typer.Exit, SystemExit):
            raise
        except BaseException as problem:
            if debug:
                traceback.print_exception(problem)
            code, message = exit_message(problem, run_command)
            hint = "; --debug shows where it happened" if code == OUR_BUG else ""
            if claims_error_report():
                print_to_stderr(shortened_message(message) + ("" if debug else hint))
            raise typer.Exit(code) from problem

    add_command_parameter(run, "debug", False, Debug)
    return run


def exit_message(problem: BaseException, command: Callable[..., None]) -> tuple[int, str]:
    """Return the exit code and the message for an exception that a command raised."""
    if isinstance(problem, KeyboardInterrupt | typer.Abort) or was_stopped():
        return INTERRUPTED, "stopped"
    if isinstance(problem, SettingError):
        return BAD_INPUT, f"error: {problem.message_naming(option_names(command))}"
    if isinstance(problem, TielineError):
        return BAD_INPUT, f"error: {problem}"
    if out_of_space(problem):
        paths = (getattr(x, "filename", None) for x in (problem, problem.__cause__))
        path = next(filter(None, paths), "the output")
        return BAD_INPUT, f"error: no space left on the disk of {path}"
    if isinstance(problem, OSError) and problem.filename is not None and problem.strerror:
        return BAD_INPUT, f"error: {problem.filename}: {problem.strerror.lower()}"
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


def _print_version(asked: bool | None) -> None:
    """Print the version and exit, if requested."""
    if asked:
        print(f"tieline {__version__}")
        raise typer.Exit(FINE)


@app.callback()
def _tieline_options(
    version: Annotated[
        bool | None,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = None,
) -> None:
    """Options of `tieline` itself."""


def with_json_target(arguments: Sequence[str]) -> list[str]:
    """Insert "-" (stdout) after each --json without a file.

    Only "-" and names that end in .json count as its value, so a model or an option may follow a
    bare --json. A following word that looks like another file raises an error.
    """
    complete: list[str] = []
    for argument, following in pairwise([*arguments, "--"]):
        complete.append(argument)
        if argument == "--json" and following != "-" and not following.endswith(".json"):
            require(
                following.startswith("-") or not _looks_like_file(following, arguments[0]),
                f"--json {following}: a file of JSON ends in .json; write --json={following} for "
                "this name, or --json - for stdout",
            )
            complete.append("-")
    return complete


def _looks_like_file(word: str, command: str) -> bool:
    """Return whether a word after --json looks like a file to write, not like an argument."""
    if Path(word).exists() or word == "demo":
        return False
    if command in TAKES_MODEL and "/" not in word:  # hub ids are ORGANISATION/NAME
        return True
    return re.search(r"\.[A-Za-z][A-Za-z0-9]{0,4}$", word) is not None
