"""Write docs/claims.md, the list of all claims of the ledger, from the claims themselves.

python -m tools.claims            # write it
python -m tools.claims --check    # exit with 1 if it is out of date
"""

import argparse
import sys
from pathlib import Path

from tieline.lab.claims import PAPERS, Claim, all_claims

__all__ = ["PAGE", "listing"]

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
HEAD = """# All claims

Every claim of the [ledger](ledger.md): the paper's sentence in our words, the setting in which it
is tested, the verdict, and what would change it. `tieline reproduce ID` tests one; the page of
`--html` shows its numbers. This list is written by `python -m tools.claims`.
"""
COLUMNS = ("claim", "the paper, in our words", "setting", "verdict", "what would change it")


def listing() -> str:
    """Return the text of the page."""
    claims = all_claims().values()
    parts = [HEAD]
    for number, paper in PAPERS.items():
        rows = [_row(claim) for claim in claims if claim.paper == number]
        rule = "|---" * len(COLUMNS) + "|"
        parts.append(f"\n## {paper.title}\n\n{_line(COLUMNS)}\n{rule}\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _row(claim: Claim) -> str:
    verdict = f"{claim.expected}: {claim.condition}" if claim.condition else str(claim.expected)
    name = f"`{claim.id}` {claim.title}"
    return _line((name, claim.statement, claim.setting, verdict, claim.overturned_by))


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is; code in backquotes stays."""
    parts = text.split("`")
    for place in range(0, len(parts), 2):
        for sign in "\\*_<>[]$":
            parts[place] = parts[place].replace(sign, f"\\{sign}")
    return "`".join(parts).replace("|", "\\|")


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description="Write docs/claims.md.")
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        return int(PAGE.read_text(encoding="utf-8") != listing())
    PAGE.write_text(listing(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
