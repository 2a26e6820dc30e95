"""The claims of all papers: a dictionary that you can read.

A paper is a package whose `MODULES` name the files with its claims; a claim is a function under
`@claim(...)`, which adds a record to `CLAIMS`. `docs/ledger.md` shows how to add one.

Which code a result belongs to.

A stored result counts as long as nothing changed that could change it: the sources of the package
but for the rooms that only show results, of the ledger's own files, of the claim's paper, and the
versions of the libraries that compute.

The whole ledger as one plain record: what the terminal, the page and the JSON show.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tieline._version import __version__
from tieline.core.errors import ParameterError, require
from tieline.papers.claim import Claim, Evidence, Outcome, Real, Run, Verdict

__all__ = [
    "CLAIMS",
    "PAPERS",
    "Paper",
    "all_claims",
    "catalogue",
    "claim",
    "fingerprint",
    "ledger_record",
    "select",
]


@dataclass(frozen=True)
class Paper:
    """A paper of the ledger: its short name, title, and the package with its claims."""

    name: str
    title: str
    package: str


PAPERS: dict[int, Paper] = {
    0: Paper("boundary-mass", "Boundary mass and the soft-to-hard limit", "paper0"),
    1: Paper("discontinuities", "Discontinuities of sparse mixtures of experts", "paper1"),
    2: Paper("perturbed-cosine", "Perturbed cosine routers and their estimation", "paper2"),
    3: Paper("tropical", "Tropical geometry of mixtures of experts", "paper3"),
    4: Paper("sigmoid-attention", "Sigmoid against softmax attention as mixtures", "paper4"),
}

CLAIMS: dict[str, Claim] = {}
"""Filled by importing the packages of the papers, which `all_claims` does."""

Test = Callable[[Run], Evidence]


def claim(
    id: str,  # noqa: A002 - the field's name in the record
    number: str,
    title: str,
    *,
    statement: str,
    tested: str,
    expected: Verdict = Verdict.HOLDS,
    condition: str = "",
    untestable: str = "",
    seconds: Real = 0.2,
) -> Callable[[Test], Test]:
    """Register the function below as the test of a claim; fields as in `Claim`."""
    paper = int(id[1 : id.index("-")])

    def add(test: Test) -> Test:
        known = CLAIMS.get(id)
        same = known is None or known.test.__module__ == test.__module__
        require(same, f"two claims are called {id!r}")
        CLAIMS[id] = Claim(
            id,
            paper,
            number,
            title,
            statement,
            tested,
            expected,
            test,
            condition,
            untestable,
            seconds,
        )
        return test

    return add


def all_claims() -> dict[str, Claim]:
    """Every claim by its id, in the order of the papers."""
    for paper in PAPERS.values():
        package = import_module(f"tieline.papers.{paper.package}")
        for module in package.MODULES:
            import_module(f"{package.__name__}.{module}")
    return CLAIMS


def select(words: Sequence[str]) -> list[Claim]:
    """The claims that the words name: "all", papers by number or name, or ids."""
    claims, chosen = all_claims(), {}
    for word in words or ["all"]:
        found = [claim for claim in claims.values() if _named(word, claim)]
        if not found:
            papers = ", ".join(f"{number} ({paper.name})" for number, paper in PAPERS.items())
            raise ParameterError(
                f"no paper or claim is called {word!r}: papers are {papers}; --list shows claims"
            )
        chosen |= {claim.id: claim for claim in found}
    return list(chosen.values())


def _named(word: str, claim: Claim) -> bool:
    paper = PAPERS[claim.paper]
    names = {"all", claim.id, str(claim.paper), f"p{claim.paper}", paper.name, paper.package}
    return word in names


SHOWING = {"cli", "report"}
LIBRARIES = ("torch", "numpy", "scipy")


@lru_cache
def fingerprint(paper: int) -> str:
    """Sixteen hexadecimal digits of a SHA-256 over sources and versions."""
    root = Path(__file__).parents[1]
    package = PAPERS[paper].package
    digest = hashlib.sha256()
    for name in LIBRARIES:
        digest.update(f"{name} {version(name)}\n".encode())
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _counts(parts, package):
            digest.update("/".join(parts).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _counts(parts: tuple[str, ...], package: str) -> bool:
    if parts[0] in SHOWING:
        return False
    papers = {paper.package for paper in PAPERS.values()} - {package}
    return not (parts[0] == "papers" and papers.intersection(parts))


def ledger_record(outcomes: Sequence[Outcome], run: Run) -> dict[str, Any]:
    """Outcomes with their papers and a count of the verdicts, as JSON values."""
    verdicts = Counter(str(outcome.verdict) for outcome in outcomes if outcome.verdict is not None)
    return {
        "provenance": _provenance(run),
        "papers": _papers(sorted({outcome.claim["paper"] for outcome in outcomes})),
        "verdicts": {verdict.value: verdicts[verdict.value] for verdict in Verdict},
        "changed": [outcome.claim["id"] for outcome in outcomes if outcome.changed],
        "broken": [outcome.claim["id"] for outcome in outcomes if outcome.error],
        "claims": [outcome.to_dict() for outcome in outcomes],
    }


def catalogue(claims: Sequence[Claim]) -> dict[str, Any]:
    """The claims without results."""
    papers = _papers(sorted({claim.paper for claim in claims}))
    return {"papers": papers, "claims": [claim.describe() for claim in claims]}


def _papers(numbers: Sequence[int]) -> list[dict[str, Any]]:
    named = ((number, PAPERS[number]) for number in numbers)
    return [{"paper": number, "name": p.name, "title": p.title} for number, p in named]


def _provenance(run: Run) -> dict[str, Any]:
    return {"tieline": __version__, "mode": "fast" if run.fast else "full", "seed": run.seed}
