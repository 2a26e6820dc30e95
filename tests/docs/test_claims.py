"""The list of all claims in the docs is that of the ledger."""

from tieline.lab.claims import all_claims
from tools.claims import listing, pages


def test_the_lists_of_claims_are_up_to_date():
    stale = [str(page) for page, text in pages().items() if page.read_text("utf-8") != text]
    assert not stale, f"run: python -m tools.claims  # {stale}"


def test_every_paper_has_a_page_with_its_claims():
    assert {path.name for path in pages()} >= {f"paper-{number}.md" for number in range(5)}


def test_every_claim_is_listed_with_setting_and_what_would_change_its_verdict():
    rows = [line for line in listing().splitlines() if line.startswith("| `p")]
    assert len(rows) == len(all_claims())
    assert all(len([cell for cell in row.split(" | ") if cell.strip("| ")]) >= 5 for row in rows)
