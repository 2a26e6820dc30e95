"""Options of the command line: those that commands share, and those made from settings classes.

with_settings   a command with one option for each field of the settings classes that it takes
option_names    what the command line calls each parameter and setting of a command
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from tieline.core.setting_fields import SettingField, Settings

__all__ = [
    "Debug",
    "Figure",
    "Html",
    "Json",
    "ModelName",
    "Overwrite",
    "add_command_parameter",
    "option_names",
    "with_settings",
]

ModelName = Annotated[
    str,
    typer.Argument(
        help="Folder or hub id; by default the model in the box.",
        metavar="MODEL",
        show_default=False,
    ),
]
Html = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE.html|-", help="Write the page with charts; - is stdout."),
]
Json = Annotated[
    str | None,
    typer.Option("--json", metavar="[FILE.json|-]", help="Write JSON to a file or to stdout."),
]
Figure = Annotated[Path | None, typer.Option(help="Write the plot: .pdf, .png or .svg.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace an existing output folder made by Tieline. (Files that are there when a "
        "command starts are always replaced.)",
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of a bug.")]


class _Option(NamedTuple):
    """A field of a settings class as an option of a command."""

    name: str
    described: SettingField
    default: Any
    hint: Any

    @property
    def switches_off(self) -> bool:
        """Whether the option is a flag such as --no-scores, of a field that is true by default."""
        return self.default is True and self.described.options(self.name)[0].startswith("--no-")

    @property
    def parameter(self) -> inspect.Parameter:
        """The parameter of a function that Typer makes the option from."""
        described = self.described
        info = typer.Option(
            *described.options(self.name),
            help=described.help,
            metavar=described.metavar,
            show_default=described.show_default,
        )
        kind = described.kind or (str if described.read else _type_without_none(self.hint))
        optional = self.default is None
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self._typed_default,
            annotation=Annotated[kind | None if optional else kind, info],
        )

    @property
    def _typed_default(self) -> Any:
        """The default as one would type it."""
        if self.default is MISSING:
            return inspect.Parameter.empty
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return False if self.switches_off else self.default

    def value(self, typed: Any) -> Any:
        """The value of the field for what was typed."""
        return not typed if self.switches_off else self.described.value(self.name, typed)


def _type_without_none(hint: Any) -> Any:
    """The type of a hint `T` or `T | None`."""
    if get_origin(hint) not in (Union, UnionType):
        return hint
    (kind,) = (kind for kind in get_args(hint) if kind is not NoneType)
    return kind


def _options_of_settings(settings: type[Settings]) -> list[_Option]:
    """The options of a settings class: first its own fields, then those of the groups it has."""
    hints, groups = get_type_hints(settings), settings.__mro__[1:]
    shared = {name for group in groups for name in getattr(group, "__annotations__", ())}
    options = [
        _Option(name, described, settings.default(name), hints[name])
        for name, described in settings.described().items()
        if described.options(name)
    ]
    return sorted(options, key=lambda option: option.name in shared)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with one option for each field of the settings classes that it takes.

    The options stand where the parameter with the settings class stands.
    """
    classes: dict[str, list[_Option]] = {}
    parameters: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(hints[name], type) and issubclass(hints[name], Settings):
            classes[name] = _options_of_settings(hints[name])
            parameters += [option.parameter for option in classes[name]]
        else:
            only = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=only, annotation=hints[name]))

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for name, options in classes.items():
            values = {option.name: option.value(arguments.pop(option.name)) for option in options}
            arguments[name] = hints[name](**values)
        command(**arguments)

    _set_command_parameters(run, parameters)
    return run


def add_command_parameter(
    command: Callable[..., None], name: str, default: object, annotation: object
) -> None:
    """Add a parameter to the end of a command's signature, in place."""
    only = inspect.Parameter.KEYWORD_ONLY
    added = inspect.Parameter(name, only, default=default, annotation=annotation)
    _set_command_parameters(command, [*inspect.signature(command).parameters.values(), added])


def _set_command_parameters(command: Any, parameters: list[inspect.Parameter]) -> None:
    """Give a command the signature and annotations that Typer makes options from."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def option_names(command: Callable[..., None]) -> dict[str, str]:
    """Return the options of a command by the names of their parameters, the longest of each."""
    names: dict[str, str] = {}
    for name, hint in get_type_hints(command, include_extras=True).items():
        for info in getattr(hint, "__metadata__", ()):
            if isinstance(info, OptionInfo):
                declared = (info.default, *(info.param_decls or ()))  # Typer takes one for default
                options = [text for text in declared if isinstance(text, str) and text[0] == "-"]
                longest = max(options, key=len, default=f"--{name.replace('_', '-')}")
                names[name] = longest.partition("/")[0]
    return names
