"""Write the JSON Schema of every result into docs/schemas, from the records themselves.

    python tools/schemas.py            # write them
    python tools/schemas.py --check    # exit with 1 if one is out of date

A schema is named after the format and its version, `tieline-inspection.v1.json`. Descriptions are
those of the records' docstrings.
"""

import argparse
import dataclasses
import inspect
import json
import re
import sys
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from tieline.core.plugins import result_formats
from tieline.core.records import Result, result_class

__all__ = ["schema", "schemas"]

FOLDER = Path(__file__).parents[1] / "docs" / "schemas"
DIALECT = "https://json-schema.org/draft/2020-12/schema"
WORDS = {"anyOf": [{"type": ["number", "null"]}, {"enum": ["nan", "inf", "-inf"]}]}
"""Numbers of results that write what is not finite as words."""
SCALARS = {bool: "boolean", int: "integer", str: "string", Path: "string", type(None): "null"}


def schemas() -> dict[str, str]:
    """Return the text of each schema by the name of its file."""
    documents = {}
    for name in result_formats():
        cls = result_class(name)
        text = json.dumps(schema(cls), indent=1, ensure_ascii=False) + "\n"
        documents[f"{cls.format}.v{cls.version}.json"] = text
    return documents


def schema(cls: type[Result]) -> dict[str, Any]:
    """Return the schema of a result: its head, its fields, and the records that they hold."""
    records: dict[str, Any] = {}
    body = _record(cls, {float: WORDS} if cls.nonfinite_as_text else {}, records)
    head = {"format": {"const": cls.format}, "version": {"const": cls.version}}
    required = ["format", "version", *body["required"]]
    document = body | {"properties": head | body["properties"], "required": required}
    return (
        {"$schema": DIALECT, "title": cls.format}
        | document
        | {"$defs": dict(sorted(records.items()))}
    )


def _record(cls: Any, bound: Mapping[Any, Any], records: dict[str, Any]) -> dict[str, Any]:
    """The schema of one record; records inside it are added to `records`."""
    texts, sentences = _field_texts(cls), getattr(cls, "sentences", ())
    made_on_demand = {x: get_type_hints(getattr(cls, x).fget)["return"] for x in sentences}
    hints = get_type_hints(cls) | made_on_demand
    properties = {}
    for name in _fields(cls):
        text = {"description": texts[name]} if name in texts else {}
        properties[name] = text | _value(hints[name], bound, records)
    summary = (inspect.getdoc(cls) or "").partition("\n")[0]
    return {
        "description": summary,
        "type": "object",
        "properties": properties,
        "required": _required(cls),
    }


def _fields(cls: Any) -> list[str]:
    if dataclasses.is_dataclass(cls):
        fields = [f.name for f in dataclasses.fields(cls) if f.metadata.get("json", True)]
        return [*getattr(cls, "sentences", ()), *fields]
    return list(cls._fields)


def _required(cls: Any) -> list[str]:
    """Fields without a default: those that came later have one, so that older files still read."""
    if not dataclasses.is_dataclass(cls):
        return [name for name in cls._fields if name not in cls._field_defaults]
    absent = dataclasses.MISSING
    bare = {f.name for f in dataclasses.fields(cls) if f.default is f.default_factory is absent}
    bare |= set(getattr(cls, "sentences", ()))
    return [name for name in _fields(cls) if name in bare]


def _field_texts(cls: Any) -> dict[str, str]:
    """Descriptions of the fields in the "Attributes:" section of a docstring."""
    section = (inspect.getdoc(cls) or "").partition("Attributes:\n")[2]
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", section, re.MULTILINE)
    return {name: re.sub(r"\s+", " ", text).strip() for name, text in entries}


def _value(hint: Any, bound: Mapping[Any, Any], records: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value of a type hint; a number that is not finite is null."""
    if hint is float and float in bound:
        return bound[float]
    hint = bound.get(hint, hint) if isinstance(hint, TypeVar) else hint
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_value(arg, bound, records) for arg in args]}
    if origin is Literal:
        return {"enum": list(args)}
    if hint is float:
        return {"type": ["number", "null"]}
    if hint in SCALARS:
        return {"type": SCALARS[hint]}
    if isinstance(hint, type) and issubclass(hint, Enum):
        return {"enum": [member.value for member in hint]}
    owner = origin or hint
    if dataclasses.is_dataclass(owner) or hasattr(owner, "_fields"):
        return _reference(owner, args, bound, records)
    if isinstance(owner, type) and issubclass(owner, Mapping):
        return {
            "type": "object",
            "additionalProperties": _value((args or (str, Any))[1], bound, records),
        }
    if isinstance(owner, type) and issubclass(owner, Sequence):
        return _array(args, bound, records)
    return {}


def _reference(
    owner: Any, args: tuple[Any, ...], bound: Mapping[Any, Any], records: dict[str, Any]
) -> dict[str, Any]:
    variables = getattr(owner, "__parameters__", ())
    named = {name: bound.get(arg, arg) for name, arg in zip(variables, args, strict=False)}
    name_words = [owner.__name__, *(word for arg in named.values() for word in _words(arg))]
    inner = named | {key: value for key, value in bound.items() if key is float}
    name = "_".join(name_words)
    if name not in records:
        records[name] = {}  # a record may hold itself
        records[name] = _record(owner, inner, records)
    return {"$ref": f"#/$defs/{name}"}


def _words(hint: Any) -> list[str]:
    """Names of the types inside a type hint, which tell generic records apart."""
    inside = [word for arg in get_args(hint) if arg is not ... for word in _words(arg)]
    return [getattr(get_origin(hint) or hint, "__name__", str(hint)), *inside]


def _array(
    args: tuple[Any, ...], bound: Mapping[Any, Any], records: dict[str, Any]
) -> dict[str, Any]:
    repeated = len(args) < 2 or args[1] is ...
    if repeated:
        return {"type": "array", "items": _value(args[0], bound, records) if args else {}}
    items = [_value(arg, bound, records) for arg in args]
    return {
        "type": "array",
        "prefixItems": items,
        "minItems": len(items),
        "maxItems": len(items),
    }


def main() -> int:
    """Write the schemas, or say which are out of date."""
    parser = argparse.ArgumentParser(description="Write the JSON Schema of every result.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    stale = []
    for name, text in schemas().items():
        path = FOLDER / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
            if not check:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text, encoding="utf-8")
    sys.stdout.write("".join(f"{'out of date' if check else 'wrote'}: {name}\n" for name in stale))
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
