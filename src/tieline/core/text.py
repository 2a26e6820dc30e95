r"""Text from outside made safe to show, and names of layers for sentences and tables.

Names of models, files, layers and arrays, texts of tokens, values of JSON and messages of libraries
may hold characters that act instead of showing: escape sequences that write to the clipboard or
hide lines, carriage returns, marks that mirror the words around them. Everything that is printed or
written on a page goes through `printable`.

Only the standard library is imported here, so that errors are printed before others are loaded.
"""

import functools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

_ACTING = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but not the tab and the end of a line
    r"\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # directions of writing
    r"\u2028\u2029"  # ends of lines that few programs take for such
    r"\u180e\u200b\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # unseen
    r"\ud800-\udfff"  # halves of surrogate pairs, which no file can hold
)
_UNPRINTABLE = re.compile(f"[{_ACTING}]")
_NOT_ON_A_LINE = re.compile(rf"[\n\t{_ACTING}]")


def printable(text: str) -> str:
    r"""Return the text with every character that would act written as \r, \x1b or \u202e.

    Ends of lines and tabs stay.
    """
    return _UNPRINTABLE.sub(_escape_sequence, text)


def printable_line(text: str) -> str:
    r"""Return the text on one line: as `printable`, with \n and \t written so too."""
    return _NOT_ON_A_LINE.sub(_escape_sequence, text)


def _escape_sequence(match: re.Match[str]) -> str:
    r"""A character as Python's escape, such as \x1b."""
    return repr(match[0])[1:-1]


class PrintableStream:
    """A text stream that writes printable text only; in all else the stream below it."""

    def __init__(self, stream: Any) -> None:
        self.below = stream

    def write(self, text: str) -> int:
        """Write the printable form of a text."""
        self.below.write(printable(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write the printable form of some texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def __iter__(self) -> Any:
        return iter(self.below)


def unfiltered_stream(stream: Any) -> Any:
    """Return the stream below a `PrintableStream`, or the stream itself."""
    return stream.below if isinstance(stream, PrintableStream) else stream


def layer_labels(names: Sequence[str]) -> dict[str, str]:
    """Label "layer 3" for the name "model.layers.3.mlp.gate", where that tells the layers apart."""
    numbers = [re.search(r"\d+", name) for name in names]
    counts = Counter(match.group() for match in numbers if match)
    return {
        name: f"layer {match.group()}"
        if match and counts[match.group()] == 1
        else f"layer {name!r}"
        for name, match in zip(names, numbers, strict=True)
    }


def layer_numbers(names: Sequence[str]) -> list[int] | None:
    """Return the number in the name of each layer; None unless all names have different numbers."""
    names_split = [name.split(".") for name in names]
    for depth in range(min(map(len, names_split), default=0)):
        column = [segments[depth] for segments in names_split]
        if all(word.isascii() and word.isdecimal() and len(word) < 10 for word in column):
            numbers = [int(word) for word in column]
            if len(set(numbers)) == len(numbers):
                return numbers
    return None


@functools.lru_cache(maxsize=1024)  # asked for at every record of a layer
def layer_label(name: str | None) -> str:
    """Return "layer 3" for "model.layers.3.mlp.gate", "encoder layer 3" for a router of an encoder.

    A name with no number, or with several, is quoted: "layer 'gate'".
    """
    path = (name or "").split(".")
    numbers = [part for part in path if part.isdecimal()]
    if len(numbers) != 1:
        return f"layer {name!r}"
    stack = next((f"{part} " for part in path if part in ("encoder", "decoder")), "")
    return f"{stack}layer {int(numbers[0])}"


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the dotted parts that all share in front and behind.

    `model.layers.3.mlp.gate` becomes `3` beside its likes; a single name stays as it is.
    """
    paths = [name.split(".") for name in names]
    shortest = min((len(path) for path in paths), default=0)
    front = _shared_segments(paths, range(shortest))
    back = _shared_segments(paths, range(-1, -shortest - 1, -1))
    if len(set(names)) < 2 or front + back >= shortest:
        return list(names)
    return [".".join(path[front : len(path) - back]) for path in paths]


def _shared_segments(paths: list[list[str]], indices: range) -> int:
    """Number of leading indices at which all paths agree."""
    count = 0
    for index in indices:
        if len({path[index] for path in paths}) > 1:
            break
        count += 1
    return count
