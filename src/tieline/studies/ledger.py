"""The whole ledger as one plain record: what the terminal, the page and the JSON show."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from tieline._version import __version__
from tieline.studies.claim import Claim, Outcome, Run, Verdict
from tieline.studies.registry import PAPERS

__all__ = ["catalogue", "ledger_record"]


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
