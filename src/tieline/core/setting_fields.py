"""Settings: the options of a job as one frozen class, for Python and the command line alike.

    class MergeSettings(Settings):
        renumber: bool = setting(False, help="Give documents new numbers.")

A field is one keyword argument of the job's function and one option of its command, with one help
text and one check. Rules between fields are in `Settings.check`. An error names its fields by
placeholders (`SettingError`), so that Python reads `max_moved` and the command line `--max-moved`.

    Settings         base of the classes; `Settings.of` joins settings and keyword arguments
    setting          a field with default, help, check and the form it has on the command line
    takes_settings   lists the fields in the signature and the documentation of a function
    SettingError     a value, or a combination of values, that breaks a rule
    at_least, ...    checks of single values
    read_layers, ... values from text such as "0,2,5-7", "1,2,4", "1%" or "8G"
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from numbers import Integral
from typing import Any, TypeVar, dataclass_transform, get_type_hints

from tieline.core.errors import ParameterError, TraceError

MOST_LAYERS = 100_000
"""Longest range of layers, so that a typing error costs no memory."""

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
"""Bytes of the units of memory."""

Function = TypeVar("Function", bound=Callable[..., Any])
Chosen = TypeVar("Chosen", bound="Settings")
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.ASCII | re.IGNORECASE)


class SettingError(ParameterError):
    """A setting, or a combination of settings, breaks a rule.

    Args:
        template: the message. `{name}` is the name of a setting, which every caller spells in its
            own way, or one of `values`.
        values: what else the message quotes.
    """

    def __init__(self, template: str, **values: object) -> None:
        self.template, self.values = template, values
        super().__init__(self.message_naming({}))

    def message_naming(self, names: Mapping[str, str]) -> str:
        """Return the message with settings called by `names`, or as in Python where absent."""
        return self.template.format_map(_FieldNames({**names, **self.values}))

    def __reduce__(self) -> Any:
        return _rebuilt_error, (type(self), self.template, self.values)


class TraceSettingError(SettingError, TraceError):
    """A setting that a file of routes or a folder of a trace needs is missing or wrong."""


def _rebuilt_error(
    kind: type[SettingError], template: str, values: dict[str, object]
) -> SettingError:
    """Rebuild an error that came from another process."""
    return kind(template, **values)


class _FieldNames(dict[str, Any]):
    """Names by field; a field without one keeps its own."""

    def __missing__(self, name: str) -> str:
        return name


def require_setting(condition: bool, template: str, **values: object) -> None:
    """Raise `SettingError(template, **values)` unless `condition` holds."""
    if not condition:
        raise SettingError(template, **values)


@dataclass(frozen=True)
class SettingField:
    """What a field of a settings class has besides name, type and default.

    Attributes:
        help: one sentence for the documentation and `--help`.
        check: returns the rule that a value breaks ("must be positive"), or "".
        read: turns text into the value, at both doors; raises ValueError with the rule.
        kind: type on the command line; by default the type of the field, or text with `read`.
        option: names on the command line, such as "-k --k" or "--stream/--no-stream"; by default
            the name of the field with dashes, None for a field that only Python can set. A field
            that is true by default and has the option "--no-scores" is switched off by it.
        metavar: what `--help` shows for the value.
        show_default: whether `--help` shows the default.
    """

    help: str
    check: Callable[[Any], str] | None = None
    read: Callable[[str], Any] | None = None
    kind: Any = None
    option: str | None = ""
    metavar: str | None = None
    show_default: bool = True

    def value(self, name: str, value: Any) -> Any:
        """Return a value as the field holds it; raises `SettingError` if it breaks the rule."""
        rule, held = "", value
        try:
            held = self.read(value) if self.read and isinstance(value, str) else value
        except ValueError as problem:
            rule = str(problem)
        if isinstance(held, Integral) and not isinstance(held, bool):
            held = int(held)  # also of numpy, which JSON does not take
        if held is not None and not rule and self.check is not None:
            rule = self.check(held)
        message = f"{{{name}}} {{rule}}, got {{value}}"
        require_setting(not rule, message, rule=rule, value=_quoted_value(value))
        return held

    def options(self, name: str) -> list[str]:
        """Return the names of a field's option on the command line; empty without one."""
        if self.option is None:
            return []
        return self.option.split() or [f"--{name.replace('_', '-')}"]


def _quoted_value(value: object) -> str:
    """A value as errors quote it."""
    return f"{value:g}" if isinstance(value, float) else f"{value!r:.80}"


def setting(
    default: Any = MISSING,
    *,
    help: str,  # noqa: A002
    check: Callable[[Any], str] | None = None,
    read: Callable[[str], Any] | None = None,
    kind: Any = None,
    option: str | None = "",
    metavar: str | None = None,
    show_default: bool = True,
) -> Any:
    """Declare a field of a settings class, by default one that must be given.

    Arguments as of `SettingField`, which describes them.
    """
    described = SettingField(help, check, read, kind, option, metavar, show_default)
    return dataclasses.field(default=default, metadata={"setting": described})


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Settings:
    """The options of a job; every subclass is a frozen, keyword-only dataclass."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for name, described in self.fields_by_name().items():
            object.__setattr__(self, name, described.value(name, getattr(self, name)))
        self.check()

    def check(self) -> None:
        """Raise `SettingError` if the settings contradict each other."""

    @classmethod
    def of(cls: type[Chosen], settings: Chosen | None, options: Mapping[str, Any]) -> Chosen:
        """Return `settings`, by default those of the class, with `options` changed."""
        described = cls.fields_by_name()
        for name in options.keys() - described.keys():
            near = get_close_matches(name, described, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(described)}"
            raise TypeError(f"{cls.__name__} has no option {name!r}: {hint}")
        for name in described.keys() & options.keys():
            optional = options[name] is not None or cls.default(name) is None
            require_setting(optional, f"{{{name}}} must be given a value, got None")
        values = {name: described[name].value(name, value) for name, value in options.items()}
        if settings is None:
            return cls(**values)
        if not isinstance(settings, cls):
            raise ParameterError(f"settings must be {cls.__name__}, got {settings!r:.80}")
        return type(settings)(**{**vars(settings), **values})

    @classmethod
    def fields_by_name(cls) -> dict[str, SettingField]:
        """Return the declaration of each field (help, check, option), by name."""
        return {field.name: field.metadata["setting"] for field in _setting_fields(cls)}

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the default of a field; `dataclasses.MISSING` if it must be given."""
        return next(field.default for field in _setting_fields(cls) if field.name == name)

    def changed(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, by name."""
        values = {name: getattr(self, name) for name in self.fields_by_name()}
        return {name: value for name, value in values.items() if value != self.default(name)}


def _setting_fields(settings: type[Settings]) -> tuple[dataclasses.Field[Any], ...]:
    """Dataclass fields of a settings class."""
    return dataclasses.fields(settings) if dataclasses.is_dataclass(settings) else ()


def takes_settings(settings: type[Settings]) -> Callable[[Function], Function]:
    """List the fields of a settings class in the signature and docstring of a function.

    The function has `**options`, which it joins with its argument `settings` by `Settings.of`.
    """

    def with_fields_listed(function: Function) -> Function:
        signature, hints = inspect.signature(function), get_type_hints(settings)
        only = inspect.Parameter.KEYWORD_ONLY
        fields = [
            inspect.Parameter(
                field.name, only, default=_signature_default(field), annotation=hints[field.name]
            )
            for field in _setting_fields(settings)
        ]
        given = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=given + fields)
        heading = f"Options, fields of `{settings.__name__}`:"
        helps = [f"    {name}: {field.help}" for name, field in settings.fields_by_name().items()]
        text = inspect.cleandoc(function.__doc__ or "")
        function.__doc__ = "\n".join([text, "", heading, *helps])
        return function

    return with_fields_listed


def _signature_default(field: dataclasses.Field[Any]) -> Any:
    """Default of a field as `inspect.Signature` holds it."""
    return inspect.Parameter.empty if field.default is MISSING else field.default


LARGEST_INT, LARGEST_FLOAT = 2**63 - 1, 3.4028234663852886e38
"""The largest whole number and the largest float32 that torch takes."""


def at_least(least: int, most: int = LARGEST_INT) -> Callable[[Any], str]:
    """Return the check of a whole number between two bounds."""

    def check(value: Any) -> str:
        if not isinstance(value, int) or isinstance(value, bool):
            return "must be a whole number"
        if value > most:
            return f"must be at most {most:,}"
        return "" if value >= least else f"must be at least {least}"

    return check


def above(bound: float, rule: str = "", most: float = LARGEST_FLOAT) -> Callable[[Any], str]:
    """Return the check of a float32 above a bound; `rule` is what it says of one below."""
    sentence = rule or ("must be positive and finite" if bound == 0 else f"must be above {bound:g}")

    def check(value: Any) -> str:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and bound < value < math.inf):
            return sentence
        return "" if value <= most else f"must be at most {most:.3g}"

    return check


def one_of(*names: str) -> Callable[[Any], str]:
    """Return the check of a word among several."""

    def check(value: Any) -> str:
        return "" if value in names else f"must be one of {', '.join(names)}"

    return check


def read_layers(text: str) -> list[str | int]:
    """Read positions and names of layers: "0,2,5-7" or "model.layers.3.mlp.gate"."""
    layers: list[str | int] = []
    for item in (item.strip() for item in text.split(",")):
        if not item:
            raise ValueError("takes layers such as 0,2,5-7: one is missing between the commas")
        layers += _layer_range(item)
    return layers


def _layer_range(item: str) -> list[str | int]:
    """The layers of one item: a name, a number or a range."""
    match = _RANGE.fullmatch(item)
    if match is None:
        return [item]
    first, last = int(match[1]), int(match[2] or match[1])
    if not first <= last < MOST_LAYERS:
        raise ValueError(f"has ranges from a lower layer to a higher one, not {item!r}")
    return list(range(first, last + 1))


def read_memory(text: str) -> int:
    """Read a number of bytes: "8G", "800M" or "8.5GB"."""
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise ValueError("is a size such as 8G or 800M")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size <= 0:
        raise ValueError("must be positive")
    return size


def read_numbers(text: str) -> tuple[float, ...]:
    """Read finite numbers: "0.05,0.2"."""
    try:
        values = tuple(float(item) for item in text.split(","))
    except ValueError as problem:
        raise ValueError("takes numbers such as 1,2,4") from problem
    if not all(map(math.isfinite, values)):
        raise ValueError("takes finite numbers")
    return values


def read_whole_numbers(text: str) -> tuple[int, ...]:
    """Read whole numbers: "1,2,4"."""
    values = read_numbers(text)
    if not all(map(float.is_integer, values)):
        raise ValueError("takes whole numbers")
    return tuple(map(int, values))


def read_share(text: str) -> float:
    """Read a share between 0 and 1: "0.01" or "1%"."""
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError as problem:
        raise ValueError("is a share such as 0.01 or 1%") from problem
    if not 0 <= share <= 1:
        raise ValueError("is a share between 0 and 1")
    return share


def read_names(text: str) -> list[str]:
    """Read names between commas; "none" for no names."""
    return [] if text.strip() == "none" else [name.strip() for name in text.split(",")]
