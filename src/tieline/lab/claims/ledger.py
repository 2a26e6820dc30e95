"""The ledger: outcomes of tested claims, the catalogue of all claims, and `reproduce`."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Unpack

from tieline._version import __version__
from tieline.core.files import cache_folder
from tieline.core.records import Result
from tieline.core.setting_fields import takes_settings
from tieline.lab.claims.claim import Claim, ClaimOutcome, ClaimRun, Verdict
from tieline.lab.claims.registry import PAPERS, select
from tieline.lab.claims.runner import ResultStore, run_claims
from tieline.lab.settings import ReproduceOptions, ReproduceSettings

__all__ = ["Catalogue", "Ledger", "LedgerProvenance", "PaperTitle", "reproduce"]


@dataclass(frozen=True)
class LedgerProvenance:
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
    nonfinite_as_text: ClassVar[bool] = True

    provenance: LedgerProvenance
    papers: tuple[PaperTitle, ...]
    verdicts: dict[str, int]
    changed: tuple[str, ...]
    broken: tuple[str, ...]
    claims: tuple[ClaimOutcome, ...]

    @classmethod
    def of(cls, outcomes: Sequence[ClaimOutcome], run: ClaimRun) -> "Ledger":
        """Collect outcomes with their papers and a count of the verdicts."""
        counts = Counter(outcome.verdict for outcome in outcomes)
        return cls(
            LedgerProvenance(__version__, run.mode, run.seed),
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
        in_full: whether a terminal shows every claim rather than their number by paper.
    """

    format: ClassVar[str] = "tieline-claims"

    papers: tuple[PaperTitle, ...]
    claims: tuple[Claim, ...]
    in_full: bool = field(default=True, metadata={"json": False})

    @classmethod
    def of(cls, claims: Sequence[Claim], in_full: bool = True) -> "Catalogue":
        """Collect claims with their papers."""
        return cls(_titles(claims), tuple(claims), in_full)


@takes_settings(ReproduceSettings)
def reproduce(
    names: Sequence[str] = ("all",),
    *,
    settings: ReproduceSettings | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options: Unpack[ReproduceOptions],
) -> Ledger:
    """Test claims of the papers, except those whose results are stored.

    Args:
        names: "all", papers by number or name, or ids of claims.
        settings: the options; keyword arguments change single ones. Results are kept in the
            user's cache by default.
        progress: called with the number of claims that are done, and of all.
    """
    settings = ReproduceSettings.of(settings, options)
    chosen, run = select(names), ClaimRun(settings.fast, settings.seed)
    store = ResultStore(settings.results or cache_folder("claims"))
    store.check()
    on_progress = progress or (lambda done, total: None)
    on_progress(0, len(chosen))
    outcomes = run_claims(
        chosen,
        run,
        store,
        executor=settings.executor,
        address=settings.address,
        jobs=settings.jobs,
        progress=lambda _, done, total: on_progress(done, total),
    )
    return Ledger.of(outcomes, run)


def _titles(claims: Sequence[Claim]) -> tuple[PaperTitle, ...]:
    numbers = sorted({claim.paper for claim in claims})
    return tuple(PaperTitle(n, PAPERS[n].name, PAPERS[n].title) for n in numbers)
