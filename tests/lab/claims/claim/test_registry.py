"""The list of claims: complete, well formed, and found by name."""

import re
from pathlib import Path

import pytest

from tieline.core.errors import TielineError
from tieline.lab.claims.claim import PAPERS, Verdict, all_claims, claim, docstring_texts, select

STATEMENTS = {
    0: "sec2-gauge def3.1 rem3.2 rem3.3 asm3.4 eq3.8 prop3.5 lem3.6 eq3.9 prop3.7 ex3.8 lem4.1 "
    "asm4.2 asm4.3 cor4.4 thm4.5 thm4.7 eq5.3 rem5.4 lem5.5 lem5.7 prop5.8 prop5.10 asm5.11 "
    "asm5.12 asm5.13 asm5.14 lem5.15 lem5.16 thm5.17-recovery thm5.17-saddles eq6.3 eq6.4 eq6.6 "
    "lem6.1 lem6.2 prop6.3 eq6.8 eq6.10 asm5.1 asm5.2 asm5.3 rem5.6 rem5.9 eq5.15 rem5.18 sec7",
    1: "def3.1 def3.2 propA.2 propA.3 propA.6 propA.7 def4.1 thm4.2 propA.9 propA.11 corA.12 "
    "propA.13 propA.14 propA.15 thm4.4 lemA.16 lemA.17 def4.6 propA.20 thm4.7 thmA.19 propA.21 "
    "thmA.22 corA.23 lemA.25 lemA.27 corA.28 lemA.29 thm5.1 thmA.30 propA.31 thm5.3 "
    "sec6-smoothstep sec6-gate sec6-loss fig1 fig3 fig4 fig5 fig6-7 table1 table2 table3 table4 "
    "table5 table6 table8 secB.2 rem4.5 rem5.4 secB.1 thmA.32-coarse",
    2: "eq2 eq4 eq8 lem3 eq5 L1r eq11 eq13 def1 def2 prop1 thm2 thm4 thm5 thm6 thm1 thm3 thm2-rate "
    "thm4-rate thm5-rate thm6-rate sec4 table1 table2 table3 table4 table5 fig1a fig1b fig2a fig2b "
    "lem1 lem2 eq6 eq18 thm2-minimax thm5-minimax",
    3: "def3.1 def3.2 ex3.3 def3.4 def3.5 def3.6 sec3.5 prop4.2 thm4.5 thm4.5-cells "
    "thm4.5-supports ex4.6 rem4.7 def4.8 ex4.9 prop4.10 rem4.11 cor4.12 thm4.14 rem4.15 cor4.16 "
    "thm4.17 lem4.18 thm4.19 table1 rem4.20 ex4.21 asm4.22 prop4.24 rem4.25 thm4.26 thm4.27 "
    "cor4.29 rem4.30 thm5.1 cor5.3 def5.5 prop5.6 eq3 def5.8 prop5.9 rem5.10 ex4.3 rem4.4 rem4.13 "
    "rem4.23 rem4.28 rem5.2 rem5.4 secA-minimal secF-chambers",
    4: "sec2 eq5 eq8 prop3 def1 def2 def3 def4 prop2 prop5 thm1 thm2 thm3 thm4 thm5 L1 eq11 L3 "
    "eq52 eq53 prop1 cor1 prop4 cor2 thm1-rate thm2-rate thm3-rate thm4-rate thm5-rate table1 "
    "fig1a fig1b fig2a fig2b sec3 secC.1.2 lem1 secB.1-bracket thm2-minimax",
}
"""Every statement of the papers, by the end of its claim's id."""

LISTED = Path(__file__).parents[5] / "shared" / "statements.md"
"""The list of statements beside a clone of the repository, if there is one."""
KINDS = {
    "Def": "def", "Rem": "rem", "Prop": "prop", "Lemma": "lem", "Thm": "thm", "Cor": "cor",
    "Ex": "ex", "Assumption": "asm", "Assumptions": "asm", "Figure": "fig", "Figures": "fig",
    "Table": "table", "Tables": "table", "sec": "sec",
}  # fmt: skip
SECTIONED = (0, 1, 3)
"""Papers whose statements are numbered by section."""
ELSEWHERE = {
    "p1-thmA.18": "p1-thm4.4",  # the appendix's number of the same theorem
    "p1-defA.4": "p1-def3.1",  # the appendix repeats the definition
    "p1-defA.5": "p1-def3.2",
    "p1-propA.28": "p1-corA.28",  # a corollary in the paper
    "p1-lemA.28": "p1-corA.28",
    "p1-thmA.32": "p1-thm5.3",
}
"""Statements whose claim has the name of another number."""


def listed_statements(text):
    """Ids of the numbered statements of a list like "Def 3.1, Rem 3.2, 3.3; Lemma A.13–A.15"."""
    paper = None
    for paragraph in text.split("\n\n"):
        head = re.match(r"\*\*Paper (\d)", paragraph)
        if head is None:
            continue
        paper, kind = int(head[1]), "eq"
        body = paragraph.split("—", 1)[-1]
        number = r"[A-G]?\.?\d+(?:\.\d+)?[ab]?"
        for token in re.finditer(
            rf"\b([A-Z][a-z]+|sec)\b|({number})(?:\s*[–-]\s*({number}))?", body
        ):
            if token[1]:
                kind = KINDS.get(token[1])
                continue
            if kind is None:
                continue
            first, last = token[2], token[3]
            if (
                paper in SECTIONED
                and kind not in ("fig", "table", "eq", "sec")
                and "." not in first
            ):
                continue  # a count or an index
            yield from (f"p{paper}-{kind}{n}" for n in numbers_between(first, last))


def numbers_between(first, last):
    """The numbers of a range such as A.13 to A.15, or the first alone."""
    if last is None or "." not in first or first.split(".")[0] != last.split(".")[0]:
        return [first] if last is None else [first, last]
    section, low = first.rsplit(".", 1)
    return [f"{section}.{n}" for n in range(int(low), int(last.rsplit(".", 1)[1]) + 1)]


def has_claim(name, claims):
    """Whether a claim has the id, an id with a suffix, or a number that names it."""
    name = ELSEWHERE.get(name, name)
    if any(re.fullmatch(rf"{re.escape(name)}(-.*)?", key) for key in claims):
        return True
    paper, number = name[:2], re.sub(r"^p\d-[a-z]+", "", name)
    spoken = rf"(?<![\w.]){re.escape(number)}(?![\w.]*\d)"
    texts = (record.number for key, record in claims.items() if key[:2] == paper)
    return any(re.search(spoken, text) for text in texts)


@pytest.mark.skipif(not LISTED.is_file(), reason="no list of statements beside this clone")
def test_every_listed_statement_has_a_claim():
    claims = all_claims()
    names = list(listed_statements(LISTED.read_text(encoding="utf-8")))
    assert len(names) > 100
    assert [name for name in names if not has_claim(name, claims)] == []


def test_a_statement_without_a_claim_is_told():
    claims = all_claims()
    text = "**Paper 0, x** — Def 3.1, Rem 3.2, 3.3; Lemma 9.9; (6.8)–(6.9)."
    names = list(listed_statements(text))
    assert names == ["p0-def3.1", "p0-rem3.2", "p0-rem3.3", "p0-lem9.9", "p0-lem6.8", "p0-lem6.9"]
    assert [name for name in names if not has_claim(name, claims)] == ["p0-lem9.9"]


@pytest.mark.parametrize("paper", STATEMENTS)
def test_every_statement_has_a_claim(paper):
    claim_ids = {f"p{paper}-{name}" for name in STATEMENTS[paper].split()}
    assert claim_ids <= set(all_claims())


def test_claims_are_well_formed():
    for name, record in all_claims().items():
        assert record.id == name
        assert name.startswith(f"p{record.paper}-")
        assert record.paper in PAPERS
        assert all((record.number, record.title, record.statement, record.tested))
        assert len(record.setting) > 10, name
        assert len(record.overturned_by) > 5, name
        assert (record.expected is Verdict.CONDITION) == bool(record.condition), name
        assert (record.expected is Verdict.UNTESTABLE) == bool(record.untestable), name
        assert (record.expected is Verdict.UNDECIDED) == bool(record.undecided), name
        assert record.test.__doc__, name
        assert all(sign.isalnum() or sign in "-." for sign in name)


def test_selection_by_word():
    everything = list(all_claims())
    assert [c.id for c in select([])] == [c.id for c in select(["all"])] == everything
    for selection in (["0"], ["p0"], ["boundary-mass"], ["paper0"]):
        assert {c.paper for c in select(selection)} == {0}
    assert len(select(["0"])) + len(select(["1"])) == len(select(["0", "1"]))
    assert [c.id for c in select(["p1-fig1", "p0-lem6.2", "p1-fig1"])] == ["p1-fig1", "p0-lem6.2"]


def test_an_unknown_word_is_refused_with_what_there_is():
    with pytest.raises(TielineError, match=r"'p9-nothing'.*boundary-mass"):
        select(["p9-nothing"])


def test_two_claims_of_one_name_are_refused():
    all_claims()
    with pytest.raises(TielineError, match=r"two claims are called 'p0-lem6\.2'"):
        claim("p0-lem6.2", "x", statement="x", setting="x", overturned_by="x", tested="x")(
            lambda run: None
        )


def test_texts_of_a_docstring_are_joined_by_field():
    docstring = """The statement, over
    two lines.

    Setting: two experts
    Overturned by: a count: one
        that differs
    """
    assert docstring_texts(docstring) == {
        "statement": "The statement, over two lines.",
        "setting": "two experts",
        "overturned_by": "a count: one that differs",
    }
