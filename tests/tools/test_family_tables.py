"""The page of supported families is the one that the records write."""

from pathlib import Path

from tests.models.tiny import SUPPORTED
from tieline.models import TRANSFORMERS_FAMILIES, GroupRule, RouterFamily
from tools.family_tables import smoothing_list, support_table

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
SMOOTH_PAGE = PAGE.with_name("smooth.md")


def test_the_committed_page_is_written_from_the_records():
    assert PAGE.read_text(encoding="utf-8").endswith(support_table())


def test_every_record_has_a_row_and_refusals_have_reasons():
    rows = [line for line in support_table().splitlines() if line.startswith("| ")]
    for family in TRANSFORMERS_FAMILIES:
        row = next(r for r in rows if r.startswith(f"| {family.name} |") and family.routers[0] in r)
        assert family.refused is None or family.refused in row
    assert f"{len(SUPPORTED)} families" in support_table()


def test_a_row_tells_the_facts_of_its_record():
    family = RouterFamily(
        "own", ("R", "S"), "sigmoid", bias="b", groups=GroupRule(), combine="sigmoid",
        renormalise="flag", scale="s", note="a note",
    )  # fmt: skip
    assert (
        "| own | `R`, `S` | sigmoid + bias | two best experts | sigmoid, renormalised if `flag`, "
        "× `s` | no | a note |" in support_table((family,))
    )


def test_the_page_of_smoothing_lists_every_family():
    assert smoothing_list() in SMOOTH_PAGE.read_text(encoding="utf-8")
    for family in TRANSFORMERS_FAMILIES:
        assert family.name in smoothing_list()
