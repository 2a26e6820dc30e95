"""Text made safe for a page, and templates filled in one pass.

escape        text as HTML
visible       text in which control characters are seen and cannot act
embed_json    JSON that cannot end the script element which holds it
fill          a template with its {{names}} replaced; what is put in is not scanned again
script_hash   source expression that lets one inline script run under a content policy
"""

import base64
import hashlib
import html
import json
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

__all__ = ["embed_json", "escape", "fill", "script_hash", "template", "visible"]

TEMPLATES = Path(__file__).parent / "templates"
_UNSAFE = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
_DIRECTIONS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
_FIELD = re.compile(r"\{\{(\w+)\}\}")


def escape(value: object) -> str:
    """The value's text with the characters that HTML reads as markup written as references."""
    return html.escape(str(value), quote=True)


def visible(text: str) -> str:
    """The text with a sign for every control character; line ends get a sign before them.

    Marks that turn the direction of writing would rearrange the text around them, so they are
    shown by number; halves of surrogate pairs cannot be written to a file at all.
    """
    return "".join(map(_shown, text))


def embed_json(value: object) -> str:
    r"""JSON in which <, >, & and the two line separators are written as \uXXXX."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


def template(name: str) -> str:
    """The text of a template."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def fill(text: str, parts: Mapping[str, str]) -> str:
    """The template with every {{name}} replaced by the part of that name."""
    return _FIELD.sub(lambda match: parts[match[1]], text)


def script_hash(source: str) -> str:
    """'sha256-...' of an inline script."""
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _shown(sign: str) -> str:
    if sign == "\n":
        return "↵\n"
    if sign == "\t":
        return "⇥\t"
    if ord(sign) < 0x20:
        return chr(0x2400 + ord(sign))
    if sign in _DIRECTIONS or unicodedata.category(sign) in ("Cc", "Zl", "Zp"):
        return f"⟨{ord(sign):04X}⟩"
    return "\ufffd" if unicodedata.category(sign) == "Cs" else sign
