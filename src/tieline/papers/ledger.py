"""The ledger: the outcomes of the tested claims, and the catalogue of claims without results."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tieline._version import __version__
from tieline.core.records import Result
from tieline.papers.claim import Claim, Outcome, Run, Verdict
from tieline.papers.registry import PAPERS

__all__ = ["Catalogue", "Ledger", "PaperTitle", "Provenance"]


@dataclass(frozen=True)
class Provenance:
    """The version, mode ("fast" or "full") and seed of a run."""

    tieline: str
    mode: str
    seed: int


@dataclass(frozen=True)
class PaperTitle:
    """Number, short name and title of a paper."""

    paper: int
    name: str
    title: str


@dataclass(frozen=True, repr=False)
class Ledger(Result):
    """Outcomes of claims.

    Attributes:
        provenance: how the claims were tested.
        papers: the papers of the claims.
        verdicts: number of claims by verdict, in the order of `Verdict`.
        changed: ids of the claims whose verdict changed or whose own check failed.
        broken: ids of the claims whose test raised an exception.
        claims: the outcomes, in the order of the papers.
    """

    format: ClassVar[str] = "tieline-ledger"
    words: ClassVar[bool] = True

    provenance: Provenance
    papers: tuple[PaperTitle, ...]
    verdicts: dict[str, int]
    changed: tuple[str, ...]
    broken: tuple[str, ...]
    claims: tuple[Outcome, ...]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], run: Run) -> "Ledger":
        """Collect outcomes with their papers and a count of the verdicts."""
        counts = Counter(outcome.verdict for outcome in outcomes)
        return cls(
            Provenance(__version__, run.mode, run.seed),
            _titles([outcome.claim for outcome in outcomes]),
            {verdict.value: counts[verdict] for verdict in Verdict},
            tuple(outcome.claim.id for outcome in outcomes if outcome.changed),
            tuple(outcome.claim.id for outcome in outcomes if outcome.error),
            tuple(outcomes),
        )


@dataclass(frozen=True, repr=False)
class Catalogue(Result):
    """Claims without results.

    Attributes:
        papers: the papers of the claims.
        claims: the claims, in the order of the papers.
    """

    format: ClassVar[str] = "tieline-claims"

    papers: tuple[PaperTitle, ...]
    claims: tuple[Claim, ...]

    @classmethod
    def of(cls, claims: Sequence[Claim]) -> "Catalogue":
        """Collect claims with their papers."""
        return cls(_titles(claims), tuple(claims))


def _titles(claims: Sequence[Claim]) -> tuple[PaperTitle, ...]:
    numbers = sorted({claim.paper for claim in claims})
    return tuple(PaperTitle(n, PAPERS[n].name, PAPERS[n].title) for n in numbers)
