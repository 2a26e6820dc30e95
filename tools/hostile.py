"""Changes that make a sound file hostile; each takes the bytes and a generator.

mutated           flipped, cut, doubled and inserted bytes, and other numbers
hostile_json      other values, keys and entries in a JSON value
hostile_lines     lines of JSON or CSV changed, removed, doubled or replaced
hostile_gzip      the text in a gzip changed, or a bomb
hostile_archive   members of a zip changed, renamed, doubled, packed, or of false sizes
"""

import copy
import gzip
import io
import json
import random
import struct
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

NUMBERS = [b"-1", b"0", b"1e400", b"NaN", b"99999999999999999999", b"2147483648", b"null", b'"x"']


ESCAPES = ("\x1b]0;title\x07", "\x1b[2J", "\u202egnp.exe", "a\rb", "\u2066x", "\x9b31m", "\ufeff")
"""Texts that would act on a terminal or mirror the words around them."""


VALUES: tuple[Any, ...] = (
    *ESCAPES,
    *(-1, 0, 1, 3, 3_000_000, 1 << 31, 1 << 62, -(1 << 63), 10**30, 0.5, -0.0, 1e308, 1e400),
    *(
        None,
        True,
        False,
        "",
        "x",
        "org/repo",
        "../../etc/passwd",
        "{x}",
        "%s",
        "9" * 40,
        "é" * 5000,
    ),
    *([], {}, [[]], [0] * 100, {"a": {"b": []}}, [None], ["\ud800"], [1.5, "2"], [[0, 1], [2]]),
)
"""What a hostile file may hold where another value belongs."""


Mutation = Callable[[bytes, random.Random], bytes]


def mutated(data: bytes, draw: random.Random) -> bytes:
    """The bytes with one to four changes."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(changed) + 1)
        kind = draw.randrange(7)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at:]
        elif kind == 2:
            del changed[at : at + draw.randrange(1, 40)]
        elif kind == 3:
            changed[at:at] = draw.randbytes(draw.randrange(1, 16))
        elif kind == 4:
            changed[at:at] = changed[at : at + draw.randrange(1, 200)]
        elif kind == 5 and at < len(changed):
            changed[at : at + 8] = draw.choice((b"\xff" * 8, b"\0" * 8, b"\x7f" * 8))
        else:
            _change_number(changed, draw)
    return bytes(changed)


def _change_number(data: bytearray, draw: random.Random) -> None:
    """Replace a number in the text of a file."""
    digits = [i for i in range(min(len(data), 20_000)) if 48 <= data[i] <= 57]
    if digits:
        first = last = draw.choice(digits)
        while last < len(data) and 48 <= data[last] <= 57:
            last += 1
        data[first:last] = draw.choice(NUMBERS)


def hostile_json(data: bytes, draw: random.Random) -> bytes:
    """A JSON file with one to three values, keys or entries replaced, doubled or removed."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):  # changed already
        return mutated(data, draw)
    for _ in range(draw.choice((1, 1, 2, 3))):
        value = _changed_value(value, draw)
    return json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")


def _changed_value(value: Any, draw: random.Random) -> Any:
    """A JSON value with a change at a random depth."""
    if not isinstance(value, dict | list) or not value or draw.random() < 0.1:
        return copy.deepcopy(draw.choice(VALUES))
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, change = draw.choice(keys), draw.randrange(8)
    if change == 0:
        del value[key]
    elif change == 1 and isinstance(value, dict):
        value[draw.choice(ESCAPES) + str(key)] = value.pop(key)
    elif change == 2 and isinstance(value, list):
        value.insert(key, copy.deepcopy(draw.choice(VALUES)))
    else:
        value[key] = _changed_value(value[key], draw)
    return value


def hostile_lines(data: bytes, draw: random.Random) -> bytes:
    """A file of lines with some of them changed, removed, doubled, exchanged or made hostile."""
    lines = data.split(b"\n")
    for _ in range(draw.choice((1, 1, 2, 4))):
        at, change = draw.randrange(len(lines)), draw.randrange(6)
        if change == 0:
            del lines[at]
        elif change == 1:
            lines.insert(draw.randrange(len(lines) + 1), lines[at])
        elif change == 2:
            lines[at] = draw.choice((*ESCAPES, "\0", "a,b,c", "[" * 200)).encode()
        elif change == 3:
            lines[at] = mutated(lines[at], draw)
        elif lines[at][:1] == b"{":
            lines[at] = hostile_json(lines[at], draw)
        else:
            cells = lines[at].split(b",")
            cells[draw.randrange(len(cells))] = str(draw.choice(VALUES)).encode("utf-8", "replace")
            lines[at] = b",".join(cells)
        lines = lines or [b""]
    return b"\n".join(lines)


def hostile_gzip(data: bytes, draw: random.Random) -> bytes:
    """A gzip whose text or bytes were changed, or that unpacks to much more than it packs."""
    kind = draw.randrange(40)
    if kind == 0:
        return gzip.compress(b'{"a": ' + b" " * (80 << 20) + b"1}", 9)
    if kind < 12:
        return mutated(data, draw)
    return gzip.compress(hostile_lines(gzip.decompress(data), draw), 1)


def hostile_archive(data: bytes, draw: random.Random) -> bytes:
    """A zip whose members were changed, renamed, doubled or packed, or whose sizes are not true."""
    if draw.random() < 0.3:
        return mutated(data, draw)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    packing, target = draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)), io.BytesIO()
    at, change = draw.randrange(len(members)), draw.randrange(6)
    name, content = members[at]
    if change == 0:
        members[at] = name, mutated(content, draw)
    elif change == 1:
        members[at] = draw.choice((*ESCAPES, "../x.npy", "/etc/x", "a" * 300, "data.pkl")), content
    elif change == 2:
        members.append((name, content))
    elif change == 3:
        members[at] = name, content + bytes(draw.choice((1, 4096, 1 << 21)))
        packing = zipfile.ZIP_DEFLATED
    elif change == 4:
        members += [(f"x{i}.npy", b"") for i in range(draw.choice((3, 2000)))]
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", packing) as archive:
        warnings.simplefilter("ignore")  # a name that comes twice
        for name, content in members:
            archive.writestr(name, content)
    packed = bytearray(target.getvalue())
    return bytes(_false_sizes(packed, draw) if change == 5 else packed)


def _false_sizes(packed: bytearray, draw: random.Random) -> bytearray:
    """A zip whose directory states another size of a member."""
    at = packed.find(b"PK\x01\x02")
    field = draw.choice((20, 24, 42))
    packed[at + field : at + field + 4] = struct.pack(
        "<I", draw.choice((0, 1, 1 << 20, 0xFFFFFFF0))
    )
    return packed
