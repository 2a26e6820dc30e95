"""Options of the command line: options shared by commands, and options of settings classes.

with_settings   decorator that adds an option for each field of a command's settings classes
option_names    the option of each parameter and setting of a command
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
    """An option of a command for a field of a settings class."""

    name: str
    setting_field: SettingField
    default: Any
    type_hint: Any

    @property
    def switches_off(self) -> bool:
        """Whether the option is a flag such as --no-scores, of a field that is true by default."""
        return self.default is True and self.setting_field.options(self.name)[0].startswith("--no-")

    @property
    def parameter(self) -> inspect.Parameter:
        """The function parameter from which Typer makes the option."""
        setting_field = self.setting_field
        info = typer.Option(
            *setting_field.options(self.name),
            help=setting_field.help,
            metavar=setting_field.metavar,
            show_default=setting_field.show_default,
        )
        kind = setting_field.kind or (
            str if setting_field.read else _type_without_none(self.type_hint)
        )
        optional = self.default is None
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=self._typed_default,
            annotation=Annotated[kind | None if optional else kind, info],
        )

    @property
    def _typed_default(self) -> Any:
        """The default value in the form in which it is typed."""
        if self.default is MISSING:
            return inspect.Parameter.empty
        if isinstance(self.default, tuple):
            return ",".join(map(str, self.default))
        return False if self.switches_off else self.default

    def value(self, typed: Any) -> Any:
        """Return the value of the field for a typed value."""
        return not typed if self.switches_off else self.setting_field.value(self.name, typed)


def _type_without_none(type_hint: Any) -> Any:
    """Return the type T of a hint `T` or `T | None`."""
    if get_origin(type_hint) not in (Union, UnionType):
        return type_hint
    (kind,) = (kind for kind in get_args(type_hint) if kind is not NoneType)
    return kind


def _options_of_settings(settings: type[Settings]) -> list[_Option]:
    """Return the options of a settings class: first its own fields, then inherited ones."""
    type_hints, groups = get_type_hints(settings), settings.__mro__[1:]
    shared = {name for group in groups for name in getattr(group, "__annotations__", ())}
    options = [
        _Option(name, setting_field, settings.default(name), type_hints[name])
        for name, setting_field in settings.fields_by_name().items()
        if setting_field.options(name)
    ]
    return sorted(options, key=lambda option: option.name in shared)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command: replace each parameter with a settings class by options for its fields.

    The options take the position of that parameter.
    """
    classes: dict[str, list[_Option]] = {}
    parameters: list[inspect.Parameter] = []
    type_hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if isinstance(type_hints[name], type) and issubclass(type_hints[name], Settings):
            classes[name] = _options_of_settings(type_hints[name])
            parameters += [option.parameter for option in classes[name]]
        else:
            only = inspect.Parameter.KEYWORD_ONLY
            parameters.append(parameter.replace(kind=only, annotation=type_hints[name]))

    @functools.wraps(command)
    def run(**arguments: Any) -> None:
        for name, options in classes.items():
            values = {option.name: option.value(arguments.pop(option.name)) for option in options}
            arguments[name] = type_hints[name](**values)
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
    """Set the signature and annotations of a command, from which Typer makes options."""
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def option_names(command: Callable[..., None]) -> dict[str, str]:
    """Return the longest option of each parameter of a command, by the parameter's name."""
    names: dict[str, str] = {}
    for name, type_hint in get_type_hints(command, include_extras=True).items():
        for info in getattr(type_hint, "__metadata__", ()):
            if isinstance(info, OptionInfo):
                declared = (info.default, *(info.param_decls or ()))  # Typer stores one as default
                options = [text for text in declared if isinstance(text, str) and text[0] == "-"]
                longest = max(options, key=len, default=f"--{name.replace('_', '-')}")
                names[name] = longest.partition("/")[0]
    return names
