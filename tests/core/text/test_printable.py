"""No character of a name controls a terminal or reverses the text of a page."""

import io
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.text import PrintableStream, printable, printable_line, unfiltered_stream

DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
NAMES = {
    "\x1b[31mred": r"\x1b[31mred",
    "\x1b]52;c;QUFB\x07": r"\x1b]52;c;QUFB\x07",
    "\x1b]8;;file:///x\x1b\\text": r"\x1b]8;;file:///x\x1b\text",
    "\x9b1m": r"\x9b1m",
    "first\rsecond": r"first\rsecond",
    "a\u202eb\u2066c": r"a\u202eb\u2066c",
    "\x00\x01\x7f": r"\x00\x01\x7f",
    "\ud800": r"\ud800",
    "\U000e0041": r"\U000e0041",
}


@pytest.mark.parametrize(("name", "shown"), NAMES.items())
def test_what_would_act_is_written_out(name, shown):
    assert printable(name) == printable_line(name) == shown


def test_every_control_and_every_direction_is_written_out():
    for code in range(sys.maxunicode + 1):
        sign = chr(code)
        acts = unicodedata.category(sign) in ("Cc", "Cs", "Zl", "Zp")
        turns = unicodedata.bidirectional(sign) in DIRECTIONS or sign in "\u061c\u200e\u200f"
        if (acts or turns) and sign not in "\n\t":
            assert printable(sign).isascii()
            assert printable(sign).isprintable()


@given(st.text())
def test_printable_text_stays_as_it_is(text):
    shown = printable(text)
    assert printable(shown) == shown
    shown.encode()


def test_words_of_every_language_stay():
    text = "日本 é ไทย हिन्दी می\u200cخواهم 👩\u200d💻 12\u00a0% a\nb\tc"
    assert printable(text) == text


def test_a_line_is_one_line():
    assert printable_line("a\nwrote b\tc") == r"a\nwrote b\tc"


def test_a_stream_writes_printable_text_and_is_else_the_one_below():
    below = io.StringIO()
    stream = PrintableStream(below)
    print("a\x1b[2Jb", "c", file=stream, flush=True)
    stream.writelines(["\u202e", "\n"])
    assert below.getvalue() == "a\\x1b[2Jb c\n\\u202e\n"
    assert unfiltered_stream(stream) is below
    assert unfiltered_stream(below) is below
    assert unfiltered_stream(None) is None
