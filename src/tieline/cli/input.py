"""Reading what the user typed.

with_json_target   a bare --json means --json -
layer_choice       "0,2,5-7" or names of routers
read_text          a text file, refused if it is missing, empty or no text
"""

import re
from collections.abc import Sequence
from pathlib import Path

from tieline.core.errors import ParameterError, require

__all__ = ["layer_choice", "read_text", "with_json_target"]

MOST_LAYERS = 100_000
"""No range of layers is longer, so that a slip of the finger costs no memory."""

_PLACES = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)


def with_json_target(words: Sequence[str]) -> list[str]:
    """The words with "-" (stdout) after each --json that names no file.

    Only "-" and names that end in .json are taken for its value, so that a model or an option may
    follow a bare --json.
    """
    done: list[str] = []
    for place, word in enumerate(words):
        done.append(word)
        following = words[place + 1] if place + 1 < len(words) else ""
        if word == "--json" and following != "-" and not following.endswith(".json"):
            done.append("-")
    return done


def layer_choice(words: str | None) -> list[str | int] | None:
    """Places and names of layers from "0,2,5-7" or "model.layers.3.mlp.gate"; None for all."""
    if words is None:
        return None
    chosen: list[str | int] = []
    for part in (part.strip() for part in words.split(",")):
        require(bool(part), f"--layers: a layer is missing between the commas of {words!r}")
        chosen += _places(part)
    return chosen


def read_text(path: Path) -> tuple[str, str]:
    """The text of a file and the name of the file."""
    require(path.exists(), f"no such file: {path}")
    require(path.is_file(), f"not a file: {path}")
    data = path.read_bytes()
    require(b"\0" not in data, f"{path} is a binary file, not text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ParameterError(
            f"{path} is not UTF-8 text: byte {data[problem.start]:#04x} at offset {problem.start}"
        ) from problem
    require(bool(text.strip()), f"{path} is empty: there is nothing to route")
    return text, path.name


def _places(part: str) -> list[str | int]:
    match = _PLACES.fullmatch(part)
    if match is None:
        return [part]
    first, last = int(match[1]), int(match[2] or match[1])
    require(
        first <= last < MOST_LAYERS, f"--layers: a range goes up from a layer to one, got {part!r}"
    )
    return list(range(first, last + 1))
