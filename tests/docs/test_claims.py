"""The list of all claims in the docs is that of the ledger."""

from tieline.lab.claims import all_claims
from tools.claims import PAGE, listing


def test_the_list_of_claims_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == listing(), "run: python -m tools.claims"


def test_every_claim_is_listed_with_setting_and_what_would_change_its_verdict():
    rows = [line for line in listing().splitlines() if line.startswith("| `p")]
    assert len(rows) == len(all_claims())
    assert all(len([cell for cell in row.split(" | ") if cell.strip("| ")]) >= 5 for row in rows)
