"""Text from a model cannot leave its place in the page."""

import base64
import hashlib
import html
import json
from html.parser import HTMLParser

from hypothesis import example, given
from hypothesis import strategies as st

from tests.report.zoo import HOSTILE
from tieline.report.markup import embed_json, escape, fill, script_hash, visible

texts = st.text(max_size=20) | st.sampled_from(HOSTILE)


class Reader(HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.tags, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, attrs))

    def handle_data(self, data):
        self.text += data


@given(texts)
@example("</script><script>alert(1)</script>")
def test_escaped_text_is_read_back_as_text_alone(text):
    reader = Reader()
    reader.feed(f'<p title="{escape(text)}">{escape(text)}</p>')
    reader.close()
    assert reader.text == text
    assert reader.tags == [("p", [("title", text)])]


@given(st.recursive(texts | st.integers() | st.none(), lambda x: st.lists(x, max_size=3)))
def test_embedded_json_is_the_value_and_holds_no_markup(value):
    text = embed_json({"value": value})
    assert json.loads(text) == {"value": value}
    assert not set(text) & set("<>&\u2028\u2029")


@given(texts)
def test_visible_text_has_no_acting_characters(text):
    shown = visible(text)
    shown.encode()
    kept = [sign for sign in shown if sign not in "\n\t"]
    assert all(ord(sign) >= 0x20 and ord(sign) != 0x7F for sign in kept)
    assert not set(shown) & set("\u202e\u202d\u2066\u2028\u2029\u0085")


def test_visible_text_shows_what_was_hidden():
    assert visible("a\x00\u202eb\n\t\ud800日") == "a␀⟨202E⟩b↵\n⇥\t\ufffd日"


def test_what_is_filled_in_is_not_filled_again():
    assert fill("{{a}}-{{b}}", {"a": "{{b}}", "b": "{{a}}"}) == "{{b}}-{{a}}"


def test_the_hash_is_the_one_a_browser_computes():
    digest = base64.b64encode(hashlib.sha256("é;".encode()).digest()).decode()
    assert script_hash("é;") == f"'sha256-{digest}'"
    assert html.escape(script_hash("x"), quote=False) == script_hash("x")
