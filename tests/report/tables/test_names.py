"""How names and cells of tables are written."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.report.zoo import HOSTILE
from tieline.report.tables import compact, flat, one_form, short_names, timing_rows, visible
from tieline.report.words.numbers import DASH, significant

texts = st.text(max_size=20) | st.sampled_from(HOSTILE)


@given(st.floats(allow_nan=True, allow_infinity=True))
@example(1.7975000000000001e308)
def test_compact_numbers_are_finite_and_near(number):
    short = compact({"a": [number, 7, "text", None]})["a"]
    assert short[1:] == [7, "text", None]
    if math.isfinite(number):
        assert short[0] == pytest.approx(number, rel=6e-4)
    else:
        assert short[0] is None


@pytest.mark.parametrize(
    ("cells", "wanted"),
    [
        (["0.013", "4.9e-4", DASH, "0"], ["1.3e-2", "4.9e-4", DASH, "0"]),
        (["+0.0024 ± 0.0009", "+1.9e-5 ± 8e-5"], ["+2.4e-3 ± 9e-4", "+1.9e-5 ± 8e-5"]),
        (["1,234.5", "1.2e9"], ["1.2345e3", "1.2e9"]),
        (
            ["0.0072 for 21,504 bytes", "1.1e-4 for 8 bytes"],
            ["7.2e-3 for 21,504 bytes", "1.1e-4 for 8 bytes"],
        ),
        (["0.013", "0.14"], ["0.013", "0.14"]),
        (["12", "1.5 %", "2.0 ×", "1e-5"], ["12", "1.5 %", "2.0 ×", "1e-5"]),
        (["int8 0.5", "v1.2.3", "1e-9"], ["int8 5e-1", "v1.2.3", "1e-9"]),
    ],
)
def test_a_column_has_one_form_of_numbers(cells, wanted):
    assert one_form(cells) == wanted


@given(st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=6))
def test_one_form_keeps_the_numbers(numbers):
    cells = [significant(number) for number in numbers]
    forms = one_form(cells)
    assert [float(x.replace(",", "")) for x in forms] == [float(x.replace(",", "")) for x in cells]
    assert len({"e" in x for x in forms if "." in x}) <= 1


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.mlp.gate", "model.layers.11.mlp.gate"], ["0", "11"]),
        (["encoder.0.gate", "decoder.0.gate"], ["encoder", "decoder"]),
        (["a.gate"], ["a.gate"]),
        (["a", "a.b"], ["a", "a.b"]),
        (["x.1", "x.1.y"], ["x.1", "x.1.y"]),
        ([], []),
    ],
)
def test_short_names_drop_what_all_share(names, short):
    assert short_names(names) == short


@given(st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=5, unique=True))
def test_short_names_stay_different(names):
    assert len(set(short_names(names))) == len(names)


@given(texts)
def test_visible_text_has_no_acting_characters(text):
    shown = visible(text)
    shown.encode()
    kept = [sign for sign in shown if sign not in "\n\t"]
    assert all(ord(sign) >= 0x20 and ord(sign) != 0x7F for sign in kept)
    assert not set(shown) & set("\u202e\u202d\u2066\u2028\u2029\u0085")


def test_visible_text_shows_what_was_hidden():
    assert visible("a\x00\u202eb\n\t\ud800日") == "a␀⟨202E⟩b↵\n⇥\t\ufffd日"


def test_nested_provenance_is_flat_and_what_is_empty_is_left_out():
    nested = {"a": {"b": 1, "c": {"d": 0}}, "e": None, "f": "", "g": [], "h": False}
    assert flat(nested) == [("a.b", 1), ("a.c.d", 0), ("h", False)]


def test_timings_are_seconds_and_rates():
    rows = timing_rows({"total": 1.25, "tokens_per_second": 3141.6})
    assert rows == [("time.total", "1.25 s"), ("tokens per second", "3,142")]
