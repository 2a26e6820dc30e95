"""Results as records, and the one way between records and JSON.

JSON from files is bounded in size and depth. Repeated keys, NaN, infinities, integers beyond 64
bits and strings that are not Unicode text raise `TraceError`, as does every other malformed file.
"""

import dataclasses
import importlib
import json
import math
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import (
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from tieline.core.errors import ParameterError, TraceError, require
from tieline.core.files import write_whole
from tieline.core.plugins import result_formats

LONGEST, LONGEST_RESULT = 16 << 20, 256 << 20
DEEPEST = 32

Record = TypeVar("Record")


class Worded:
    """Base of records that hold a verdict as data and whose sentences `tieline.report` writes.

    A subclass names its sentences; each is a property that returns `self.sentence(name)`. JSON
    holds them beside the fields, and reading ignores them.
    """

    sentences: ClassVar[tuple[str, ...]] = ()
    """Names of the properties that hold sentences."""

    def sentence(self, name: str) -> Any:
        """Write one of the sentences; the report is imported when this is called."""
        return _report_room().sentence(self, name)


class Result(Worded):
    """Base of the frozen dataclasses that front-door functions return.

    Subclasses set `format` and `version` and are decorated with `@dataclass(frozen=True,
    repr=False)`. Fields marked `field(metadata={"json": False}, default=...)` stay out of JSON and
    have their default after reading.
    """

    format: ClassVar[str]
    version: ClassVar[int] = 1
    nonfinite_as_text: ClassVar[bool] = False
    """Whether NaN and infinities are written as "nan" and "inf" instead of null."""

    def to_dict(self) -> dict[str, Any]:
        """Return format, version and all fields as JSON values."""
        head = {"format": self.format, "version": self.version}
        return head | to_plain(self, nonfinite_as_text=self.nonfinite_as_text)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Result":
        """Rebuild the result from the values of `to_dict`."""
        return from_plain(cls, values)

    def to_json(self, path: Path | str | None = None) -> str:
        """Return the result as JSON text, and write it to `path` if one is given."""
        text = json.dumps(self.to_dict(), allow_nan=False, indent=1) + "\n"
        return _written_text(text, path)

    def to_html(self, path: Path | str | None = None) -> str:
        """Return the result as one self-contained page, and write it to `path` if one is given."""
        return _written_text(_report_room().page(self), path)

    def plot(self, name: str | None = None) -> Any:
        """Draw a figure of the result with matplotlib; by default the first one.

        Args:
            name: name of the figure; an unknown one raises an error that lists all names.
        """
        drawings = _report_room().figures(self)
        require(bool(drawings), f"{self.format} has no figures")
        chosen = next(iter(drawings)) if name is None else name
        names = ", ".join(drawings)
        require(chosen in drawings, f"no figure {chosen!r}; the figures are: {names}")
        return drawings[chosen]()

    def __repr__(self) -> str:
        return _report_room().summary(self)

    def _repr_html_(self) -> str:
        return _report_room().notebook(self)


LONGEST_SHOWN = 80
"""Characters of one field that `short_repr` shows."""


def entry_named(entries: Sequence[Any], name: str) -> Any:
    """Return the record of that name; refuses a name that none has."""
    for entry in entries:
        if entry.name == name:
            return entry
    names = ", ".join(entry.name for entry in entries)
    raise ParameterError(f"nothing is named {name!r:.80}: there are {names}")


def short_repr(self: Any) -> str:
    """Return class and fields of a dataclass, what is long by its kind and size.

    A class takes it by `__repr__ = short_repr` in its body.
    """
    fields = (f"{f.name}={_short_value(getattr(self, f.name))}" for f in dataclasses.fields(self))
    return f"{type(self).__name__}({', '.join(fields)})"


def _short_value(value: Any) -> str:
    """A field in at most `LONGEST_SHOWN` characters."""
    if hasattr(value, "shape"):
        return f"{type(value).__name__}{tuple(value.shape)}"
    if dataclasses.is_dataclass(value) or hasattr(value, "state_dict"):
        text = f"{type(value).__name__}(...)"
    elif isinstance(value, Mapping) and len(value) > 1:
        text = f"<{next(iter(value.items()))!r:.60} and {len(value) - 1} more>"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        kinds = {type(item).__name__ for item in value} if isinstance(value, tuple | list) else ()
        text = repr(value) if kinds and kinds <= {"int", "float", "str"} and len(value) <= 4 else ""
        text = text or f"<{len(value)} {' or '.join(sorted(kinds)) or 'entries'}>"
    else:
        text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _report_room() -> Any:
    """The package that writes sentences and pages, imported when needed."""
    return importlib.import_module("tieline.report")


def _written_text(text: str, path: Path | str | None) -> str:
    """Return a text, written to `path` if one is given."""
    if path is not None:
        write_whole(Path(path), text.encode())
    return text


def read_result(path: Path | str) -> Result:
    """Read a result that `to_json` or a command wrote; anything else raises `TraceError`."""
    name = str(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(LONGEST_RESULT + 1)
    except OSError as error:
        raise TraceError(f"cannot read {name}: {error.strerror or error}") from error
    content = parse_json(data, name, LONGEST_RESULT)
    require(isinstance(content, dict), f"{name}: a result is a JSON object", TraceError)
    values = cast("dict[str, Any]", content)
    kind, version = values.get("format"), values.get("version")
    formats = result_formats()
    require(
        isinstance(kind, str) and kind in formats,
        f"{name}: unknown format {kind!r:.80}; known are {', '.join(formats)}",
        TraceError,
    )
    cls = result_class(cast("str", kind))
    require(
        type(version) is int and 1 <= version <= cls.version,
        f"{name}: version {version!r:.40} of {kind}; versions 1 to {cls.version} can be read",
        TraceError,
    )
    try:
        return cls.from_dict({k: v for k, v in values.items() if k not in ("format", "version")})
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from error


def result_class(name: str) -> type[Result]:
    """Import the record of a format."""
    module, _, name = result_formats()[name].record.partition(":")
    return getattr(importlib.import_module(module), name)


def to_plain(value: object, *, nonfinite_as_text: bool = False) -> Any:
    """Return a value as JSON values.

    Records and named tuples become objects with their fields as keys, other sequences and tensors
    become lists, enums their values, paths their text.

    Args:
        value: anything made of these.
        nonfinite_as_text: write numbers that are not finite as "nan", "inf" and "-inf", else None.
    """
    if isinstance(value, Enum):
        return to_plain(value.value, nonfinite_as_text=nonfinite_as_text)
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value)) if nonfinite_as_text else None
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {
            str(key): to_plain(item, nonfinite_as_text=nonfinite_as_text)
            for key, item in value.items()
        }
    names = _saved_fields(value)
    if names is not None:
        return {
            name: to_plain(getattr(value, name), nonfinite_as_text=nonfinite_as_text)
            for name in names
        }
    if isinstance(value, tuple | list):
        return [to_plain(item, nonfinite_as_text=nonfinite_as_text) for item in value]
    if hasattr(value, "tolist"):
        return to_plain(cast("Any", value).tolist(), nonfinite_as_text=nonfinite_as_text)
    return str(value) if isinstance(value, Path) else value


def _saved_fields(value: object) -> Sequence[str] | None:
    """Names of the sentences and fields that go into JSON; None for values other than records."""
    if dataclasses.is_dataclass(value):
        fields = [f.name for f in dataclasses.fields(value) if f.metadata.get("json", True)]
        return [*value.sentences, *fields] if isinstance(value, Worded) else fields
    return getattr(value, "_fields", None) if isinstance(value, tuple) else None


def from_plain(cls: type[Record], value: object) -> Record:
    """Rebuild a value of type `cls` from JSON values, by type hints.

    The inverse of `to_plain`: None becomes NaN where the hint is `float`. Keys that the record does
    not know are ignored, and fields that are absent take their default. Values that do not fit
    their hint raise `TraceError`, which names the place.
    """
    return cast("Record", _read_hinted(cls, value, cls.__name__, {}))


Bound = Mapping[Any, Any]
"""Types that stand for the type variables of a generic record."""


def _read_hinted(hint: Any, value: Any, path: str, bound: Bound) -> Any:
    """Read a value by its type hint; `path` is named in errors."""
    hint = bound.get(hint, hint) if isinstance(hint, TypeVar) else hint
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _read_union(args, value, path, bound)
    if origin is Literal:
        fits = any(type(value) is type(option) and value == option for option in args)
        return value if fits else _refuse_misfit(hint, value, path)
    if hint in _SCALARS:
        return _read_scalar(hint, value, path)
    if isinstance(hint, type) and issubclass(hint, Enum):
        fits = any(value == member.value for member in hint)
        return hint(value) if fits else _refuse_misfit(hint, value, path)
    owner = origin or hint
    if dataclasses.is_dataclass(owner) or hasattr(owner, "_fields"):
        variables = dict(zip(getattr(owner, "__parameters__", ()), args, strict=False))
        return _read_record(owner, value, path, {v: bound.get(t, t) for v, t in variables.items()})
    if isinstance(owner, type) and issubclass(owner, Mapping):
        return _read_mapping(args, value, path, bound)
    if isinstance(owner, type) and issubclass(owner, Sequence):
        return _read_sequence(owner, args, value, path, bound)
    return value if hint in (Any, object) else _refuse_misfit(hint, value, path)


_SCALARS = (bool, int, float, str, Path, None, type(None))


def _read_scalar(hint: Any, value: Any, path: str) -> Any:
    """Read a number, text, path or None."""
    kind = type(value)
    if hint is float:
        if value is None or value in ("nan", "inf", "-inf"):
            return float(value or "nan")
        return float(value) if kind in (int, float) else _refuse_misfit(hint, value, path)
    if hint is Path:
        return Path(value) if kind is str else _refuse_misfit(hint, value, path)
    return (
        value
        if kind is hint or (hint is None and value is None)
        else _refuse_misfit(hint, value, path)
    )


def _read_union(args: tuple[Any, ...], value: Any, path: str, bound: Bound) -> Any:
    """Read a value by the first type of a union that fits."""
    if value is None and type(None) in args:
        return None
    exact = [hint for hint in args if hint is type(value)]
    problem = None
    for hint in exact or [hint for hint in args if hint is not type(None)]:
        try:
            return _read_hinted(hint, value, path, bound)
        except TraceError as error:
            problem = error
    raise problem or TraceError(f"{path}: no value fits")


def _read_record(cls: Any, value: Any, path: str, bound: Bound) -> Any:
    """Read a dataclass or named tuple from a JSON object."""
    if not isinstance(value, Mapping):
        return _refuse_misfit(cls, value, path)
    hints = get_type_hints(cls)
    saved, required = _fields_to_read(cls)
    missing = [name for name in required if name not in value]
    require(not missing, f"{path}: without {', '.join(missing)}", TraceError)
    fields = {
        n: _read_hinted(hints[n], value[n], f"{path}.{n}", bound) for n in saved if n in value
    }
    try:
        return cls(**fields)
    except (ValueError, TypeError) as error:
        raise TraceError(f"{path}: {error}") from error


def _fields_to_read(cls: Any) -> tuple[list[str], list[str]]:
    """Fields that JSON may hold, and those among them that have no default."""
    if not dataclasses.is_dataclass(cls):
        return list(cls._fields), [name for name in cls._fields if name not in cls._field_defaults]
    saved = [f for f in dataclasses.fields(cls) if f.init and f.metadata.get("json", True)]
    absent = dataclasses.MISSING
    bare = [f.name for f in saved if f.default is absent and f.default_factory is absent]
    return [f.name for f in saved], bare


def _read_mapping(args: tuple[Any, ...], value: Any, path: str, bound: Bound) -> dict[Any, Any]:
    """Read a mapping from a JSON object."""
    if not isinstance(value, Mapping):
        return _refuse_misfit(dict, value, path)
    key, item = args or (str, Any)
    try:
        names = {name: int(name) if key is int else name for name in value}
    except ValueError:
        return _refuse_misfit(dict[int, item], value, path)
    return {names[n]: _read_hinted(item, v, f"{path}[{n!r:.40}]", bound) for n, v in value.items()}


def _read_sequence(
    owner: type, args: tuple[Any, ...], value: Any, path: str, bound: Bound
) -> Sequence[Any]:
    """Read a tuple or list from a JSON list."""
    if not isinstance(value, list | tuple):
        return _refuse_misfit(owner, value, path)
    repeated = len(args) == 2 and args[1] is ...
    fixed = issubclass(owner, tuple) and bool(args) and not repeated
    require(
        not fixed or len(value) == len(args) or args == ((),),
        f"{path}: {len(value)} entries, {len(args)} are needed",
        TraceError,
    )
    hints = args if fixed else (args[0] if args else Any,) * len(value)
    pairs = enumerate(zip(hints, value, strict=False))
    items = [_read_hinted(hint, item, f"{path}[{i}]", bound) for i, (hint, item) in pairs]
    return items if issubclass(owner, list) else tuple(items)


def _refuse_misfit(hint: Any, value: object, path: str) -> NoReturn:
    """Raise `TraceError` for a value that does not fit its hint."""
    expected = getattr(hint, "__name__", str(hint))
    raise TraceError(f"{path}: expected {expected}, got {value!r:.80}")


def canonical_json(value: object) -> str:
    """Return the one text of a JSON value: keys sorted, no spaces."""
    _check_json_values(value, "provenance")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def parse_json(data: bytes, name: str, longest: int = LONGEST) -> object:
    """Parse JSON from a file that anybody may have written.

    Args:
        data: the bytes of the file.
        name: what to call the file in an error.
        longest: most bytes to read.
    """
    length = len(data)
    require(
        length <= longest, f"{name}: {length} bytes of JSON, at most {longest} are read", TraceError
    )
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_json_object_without_repeats,
            parse_constant=_refuse_json_constant,
        )
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise TraceError(f"{name}: not valid JSON: {error}") from error
    _check_json_values(value, name)
    return value


def _check_json_values(value: object, name: str) -> None:
    """Check all values without recursion, so that depth cannot exhaust the stack."""
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        require(depth <= DEEPEST, f"{name}: JSON deeper than {DEEPEST} levels", TraceError)
        if isinstance(item, dict):
            texts = all(isinstance(key, str) for key in item)
            require(texts, f"{name}: keys must be strings, got {list(item)[:5]}", TraceError)
            pending += [(entry, depth + 1) for pair in item.items() for entry in pair]
        elif isinstance(item, list | tuple):
            pending += [(entry, depth + 1) for entry in item]
        elif not _is_json_scalar(item):
            raise TraceError(f"{name}: no JSON value: {item!r:.80}")


def _is_json_scalar(item: object) -> bool:
    """Whether a value is a JSON number, text, boolean or null."""
    if isinstance(item, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in item)
    if isinstance(item, float):
        return math.isfinite(item)
    if isinstance(item, bool) or item is None:
        return True
    return isinstance(item, int) and -(1 << 63) <= item < 1 << 63


def _json_object_without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; raises if a key is repeated."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is repeated")
    return value


def _refuse_json_constant(name: str) -> NoReturn:
    """Raise for NaN and Infinity, which are not JSON."""
    raise ValueError(f"{name} is not a JSON number")


def write_json(path: Path, value: Any, *, replace: bool = True) -> None:
    """Write a JSON file, whole or not at all; replaces one that is there only where allowed."""
    text = json.dumps(value, indent=1, allow_nan=False) + "\n"
    write_whole(path, text.encode(), replace=replace)
