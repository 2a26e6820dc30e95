"""Write the lists of claims in the docs from the claims themselves.

docs/claims.md       every claim of the ledger
docs/paper-N.md      after the mark: the claims of one paper with their verdicts

    python -m tools.claims            # write them
    python -m tools.claims --check    # exit with 1 if one is out of date
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

from tieline.lab.claims import PAPERS, Claim, all_claims

__all__ = ["MARK", "PAGE", "listing", "pages"]

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "claims.md"
MARK = "<!-- written by python -m tools.claims -->"
HEAD = """# All claims

Every claim of the [ledger](ledger.md): the paper's sentence in our words, the setting in which it
is tested, the verdict, and what would change it. `tieline reproduce ID` tests one; the page of
`--html` shows its numbers. This list is written by `python -m tools.claims`.
"""
COLUMNS = ("claim", "the paper, in our words", "setting", "verdict", "what would change it")


def listing() -> str:
    """Return the text of the page."""
    claims = all_claims().values()
    sections = [HEAD]
    for number, paper in PAPERS.items():
        rows = [_row(claim) for claim in claims if claim.paper == number]
        rule = "|---" * len(COLUMNS) + "|"
        head = f"\n## {paper.title}\n\n{_line(COLUMNS)}\n{rule}\n"
        sections.append(head + "\n".join(rows) + "\n")
    return "".join(sections)


def _row(claim: Claim) -> str:
    name = f"`{claim.id}` {claim.title}"
    return _line((name, claim.statement, claim.setting, _verdict(claim), claim.overturned_by))


def _verdict(claim: Claim) -> str:
    return f"{claim.expected}: {claim.condition}" if claim.condition else str(claim.expected)


def _line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(_escaped(cell) for cell in cells) + " |"


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is; code in backquotes stays."""
    pieces = text.split("`")
    for index in range(0, len(pieces), 2):
        for sign in "\\*_<>[]$":
            pieces[index] = pieces[index].replace(sign, f"\\{sign}")
    return "`".join(pieces).replace("|", "\\|")


def pages() -> dict[Path, str]:
    """Return the text of every page that lists claims, by path."""
    paths = {number: DOCS / f"paper-{number}.md" for number in PAPERS}
    written = {path: _of_paper(path, number) for number, path in paths.items() if path.is_file()}
    return {PAGE: listing(), **written}


def _of_paper(path: Path, number: int) -> str:
    """A page whose last section lists the claims of its paper."""
    head, _, _ = path.read_text(encoding="utf-8").partition(MARK)
    claims = [claim for claim in all_claims().values() if claim.paper == number]
    counts = Counter(str(claim.expected) for claim in claims)
    summary = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    lines = [_line(("claim", "the paper, in our words", "verdict")), "|---|---|---|"]
    lines += [_line((f"`{c.id}` {c.title}", c.statement, _verdict(c))) for c in claims]
    table = "\n".join(lines)
    return f"{head}{MARK}\n\n{len(claims)} claims: {summary}.\n\n{table}\n"


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description="Write the lists of claims in the docs.")
    parser.add_argument("--check", action="store_true", help="only compare")
    if parser.parse_args().check:
        return int(any(page.read_text(encoding="utf-8") != text for page, text in pages().items()))
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
