"""Text from a model cannot become markup, and only the page's own scripts run."""

import base64
import hashlib
import html
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.report.browser import find_browser
from tests.report.zoo import HOSTILE
from tieline.core.errors import ParameterError
from tieline.core.text import printable
from tieline.report import html_page
from tieline.report.charts import Axis, Chart
from tieline.report.html_page import (
    PagePanel,
    arranged_panels,
    compact_json,
    embed_json,
    missing_charts_line,
    notebook_html,
    render_page,
    script_hash,
    template_environment,
)
from tieline.report.tables import Grid

texts = st.text(max_size=20) | st.sampled_from(HOSTILE)
HEAD = {"kind": "report", "title": "t", "facts": "f", "verdict": "v"}


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
def test_text_in_a_template_is_read_back_as_text_alone(text):
    reader = Reader()
    template = template_environment().from_string('<p title="{{ text }}">{{ text }}</p>')
    reader.feed(template.render(text=text))
    reader.close()
    assert reader.text == printable(text)
    assert reader.tags == [("p", [("title", printable(text))])]


@given(texts, texts)
def test_no_part_of_a_notebook_view_can_make_markup(text, cell):
    page = notebook_html(text, text, text, Grid((cell,), ((cell,),), (cell,)), {})
    reader = Reader()
    reader.feed(page)
    plain = {
        "div",
        "style",
        "p",
        "strong",
        "span",
        "code",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    }
    assert {tag for tag, _ in reader.tags} <= plain
    assert all(
        name in ("class", "style", "title", "scope", "tabindex")
        for _, attrs in reader.tags
        for name, _ in attrs
    )


@example(["</script>", "&lt;", "\u2028"])
@given(st.recursive(texts | st.integers() | st.none(), lambda x: st.lists(x, max_size=3)))
def test_embedded_json_is_the_value_and_holds_no_markup(value):
    text = embed_json({"value": value})
    assert json.loads(text) == {"value": value}
    assert not set(text) & set("<>&\u2028\u2029")


def test_every_template_escapes_and_marks_nothing_safe_but_the_frame_s_own_parts():
    for name in template_environment().list_templates(extensions=["html"]):
        source = template_environment().loader.get_source(template_environment(), name)[0]
        safe = re.findall(r"\{\{[^}]*\|\s*safe[^}]*\}\}", source)
        allowed = {"policy", "style", "data", "scripts.watch", "scripts.plotly", "scripts.page"}
        names = {re.search(r"\{\{\s*([\w.]+)", expression)[1] for expression in safe}
        assert names <= (allowed if name == "frame.html" else set()), name
        assert "autoescape" not in source
    assert template_environment().autoescape is True


def test_a_part_that_is_not_given_is_an_error():
    with pytest.raises(Exception, match="'sections' is undefined"):
        template_environment().from_string("{{ sections }}").render()


def test_the_hash_is_the_one_a_browser_computes():
    digest = base64.b64encode(hashlib.sha256("é;".encode()).digest()).decode()
    assert script_hash("é;") == f"'sha256-{digest}'"
    assert html.escape(script_hash("x"), quote=False) == script_hash("x")


def page(panels):
    return render_page(
        "smooth.html",
        panels,
        **HEAD,
        repairs=Grid((), ()),
        sentences=[],
        layers=Grid((), ()),
        provenance=[],
    )


EMPTY = Chart(Axis("x"), Axis("y"))
DRAWN = PagePanel("a", "A", "How.").with_chart(EMPTY)


def test_the_hashes_of_the_policy_are_those_of_the_scripts_on_the_page():
    markup = page([DRAWN])
    policy = re.search(r'Security-Policy" content="([^"]*)"', markup)[1]
    scripts = re.findall(r"<script>(.*?)</script>", markup, flags=re.DOTALL)
    assert policy == (
        f"default-src 'none'; script-src {' '.join(map(script_hash, scripts))}; style-src "
        "'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def test_a_page_holds_no_address_of_another_site():
    markup = page([DRAWN])
    addresses = re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}", markup)
    assert set(addresses) <= {"http://www.w3.org"}  # names of XML languages


def test_a_label_of_a_chart_holds_no_link_and_no_direction():
    label = '<A href="https://example.org">\u202elayer</a>'
    markup = page([PagePanel("a", "A", "How.").with_chart(Chart(Axis(label), Axis("y")))])
    data = re.search(r'id="report-data">(.*?)</script>', markup, flags=re.DOTALL)[1]
    shown = json.loads(data)["figures"]["a"]["layout"]["xaxis"]["title"]["text"]
    assert "<a" not in shown.lower()
    assert r"\u202elayer" in shown


def test_no_text_of_a_page_turns_the_words_around_it():
    hostile = {
        name: f"{name}\u202e\u2066\x1b[31m\x9b" for name in ("kind", "title", "facts", "verdict")
    }
    markup = render_page(
        "smooth.html",
        **hostile,
        repairs=Grid(("a\u202e",), (("b\u2067",),)),
        sentences=["c\u200f"],
        layers=Grid((), ()),
        provenance=[("d\u061c", ["e\u202e"])],
    )
    assert not re.search("[\x1b\x9b\u202e\u2066\u2067\u200f\u061c]", markup)
    assert r"title\u202e\u2066" in markup


def test_a_page_without_charts_carries_no_script():
    markup = page([])
    assert "<script" not in markup
    assert "script-src" not in markup
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'" in markup
    assert len(markup) < 30_000


def test_a_page_that_would_be_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(html_page, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(ParameterError, match="at most 1000"):
        page([])


def test_advice_stands_apart_and_commands_are_code():
    markup = page([])
    assert '<p class="verdict">v</p>' in markup
    assert "advice" not in markup[markup.index("<body>") :]
    fields = {**HEAD, "verdict": "2 % flip. What to do: run `tieline <x>`, now."}
    markup = render_page(
        "smooth.html",
        [],
        **fields,
        repairs=Grid((), ()),
        sentences=[],
        layers=Grid((), ()),
        provenance=[],
    )
    assert '<p class="verdict">2\u00a0% flip.</p>' in markup
    assert "<strong>What to do:</strong> run <code>tieline &lt;x&gt;</code>, now.</p>" in markup


@pytest.mark.skipif(
    find_browser() is None or shutil.which("pdftotext") is None, reason="needs Chromium, pdftotext"
)
def test_paper_shows_what_is_folded_away_and_every_column(tmp_path):
    """A page without scripts, whose style alone must open the section and fit the table."""
    columns = tuple(f"col{number}" for number in range(20))
    rows = (tuple(f"{number}.25%" for number in range(20)),) * 3
    macros = template_environment().get_template("parts.html").module
    table = str(macros.table(Grid(columns, rows, columns)))  # type: ignore[attr-defined]
    style = template_environment().loader.get_source(template_environment(), "page.css")[0]
    folded = "<details><summary>more</summary><p>FOLDEDAWAY</p></details>"
    page = f"<style>{style}</style><main><section class=panel>{table}{folded}</section></main>"
    (tmp_path / "page.html").write_text(page)
    flags = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'p'}")
    where = (f"--print-to-pdf={tmp_path / 'page.pdf'}", (tmp_path / "page.html").as_uri())
    subprocess.run([find_browser(), *flags, *where], check=True, capture_output=True, timeout=120)
    read = ["pdftotext", str(tmp_path / "page.pdf"), "-"]
    text = subprocess.run(read, check=True, capture_output=True, text=True).stdout
    assert "FOLDEDAWAY" in text
    assert all(cell in text for cell in (*columns, *rows[0]))


def panel(key, wide=False, drawn=True):
    page_panel = PagePanel(key, key.upper(), "How.", wide=wide)
    return (
        page_panel.with_chart(EMPTY)
        if drawn
        else page_panel.without_chart(["ok", "no scores", "no scores"])
    )


@pytest.mark.parametrize(
    ("kinds", "wide"),
    [
        ("nn", [False, False]),
        ("nnn", [False, False, True]),
        ("nwn", [True, True, True]),
        ("nnwnn", [False, False, True, False, False]),
        ("w", [True]),
        ("", []),
    ],
)
def test_no_chart_stands_alone_beside_an_empty_place(kinds, wide):
    panels = [panel(str(i), kind == "w") for i, kind in enumerate(kinds)]
    assert [arranged.wide for arranged in arranged_panels(panels)] == wide


def test_panels_without_a_chart_have_no_place():
    assert [
        arranged.key for arranged in arranged_panels([panel("a"), panel("b", drawn=False)])
    ] == ["a"]


def test_what_is_missing_is_one_line_with_each_reason_once():
    panels = [panel("a", drawn=False), panel("b"), panel("c", drawn=False)]
    other = PagePanel("d", "D", "How.").without_chart([])
    assert missing_charts_line(panels) == "“A”, “C” (no scores)"
    assert missing_charts_line([*panels, other]) == "“A”, “C” (no scores); “D” (no data)"
    assert missing_charts_line([panel("b")]) == ""


@given(st.floats(allow_nan=True, allow_infinity=True))
@example(1.7975000000000001e308)
def test_compact_numbers_are_finite_and_near(number):
    short = compact_json({"a": [number, 7, "text", None]})["a"]
    assert short[1:] == [7, "text", None]
    if math.isfinite(number):
        assert short[0] == pytest.approx(number, rel=6e-4)
    else:
        assert short[0] is None
