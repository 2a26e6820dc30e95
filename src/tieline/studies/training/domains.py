"""Leave one domain out: does the router matter for images of a kind that was never seen?

Paper 2, Table 3 (linear, cosine, perturbed cosine) and paper 1, Table 3 (cosine against smooth), in
the small form of `training.recipes_images`: every gate on every left-out domain of PACS with the
same seeds, batches and splits, so that gates are compared in pairs.

    accuracy     on the domain left out, of the model of the last step
    balanced     the same with every class counted alike: 1/classes for always saying the same
    average      over the four domains; mean and standard deviation over seeds
    gain         average less that of the cosine router at the same seed; mean and standard error

A run counts as above chance when its balanced accuracy exceeds 1/classes by three of its own
standard errors; a table with one that does not says so.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tieline.errors import require
from tieline.training.engine import run
from tieline.training.recipes_images import DOMAIN_GATES, DOMAINS, pacs_small

__all__ = ["DomainRow", "DomainScore", "DomainTable", "domain_table", "leave_one_out"]

REFERENCE = "cosine"
NAMES = ("accuracy", "balanced", "balanced_se", "commonest", "chance")
ABOVE = 3.0
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DomainScore:
    """One run: the gate, the domain left out, the seed, and the accuracies."""

    gate: str
    out: str
    seed: int
    accuracy: float
    balanced: float
    balanced_se: float
    validation: float
    commonest: float
    chance: float
    experts: float

    @property
    def above_chance(self) -> bool:
        """Whether the accuracy is more than always saying the same would reach."""
        return self.balanced - ABOVE * self.balanced_se > self.chance


@dataclass(frozen=True)
class DomainRow:
    """One gate.

    Attributes:
        gate: its name.
        domains: mean accuracy over seeds for each domain.
        deviations: standard deviation over seeds for each domain.
        balanced: mean balanced accuracy over seeds for each domain.
        average: mean over seeds of the average over domains.
        deviation: standard deviation of that average over seeds.
        gain: mean difference of the average to the cosine router's at the same seed.
        gain_se: its standard error.
        validation: mean accuracy on held-out images of the domains trained on.
        experts: mean number of experts of a patch.
    """

    gate: str
    domains: dict[str, float]
    deviations: dict[str, float]
    balanced: dict[str, float]
    average: float
    deviation: float
    gain: float
    gain_se: float
    validation: float
    experts: float


@dataclass(frozen=True)
class DomainTable:
    """All gates, with what tells how good an accuracy is.

    Attributes:
        rows: one for each gate.
        seeds: the seeds that all runs have.
        commonest: share of the commonest class of each domain.
        chance: one in as many as there are classes.
        at_chance: runs that do not exceed chance, as (gate, domain, seed).
    """

    rows: tuple[DomainRow, ...]
    seeds: tuple[int, ...]
    commonest: dict[str, float]
    chance: float
    at_chance: tuple[tuple[str, str, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """The record in plain values."""
        return asdict(self)


def leave_one_out(
    folder: Path,
    *,
    gates: Sequence[str] = DOMAIN_GATES,
    domains: Sequence[str] = DOMAINS,
    seeds: Sequence[int] = (0, 1, 2),
    steps: int | None = None,
    progress: Progress | None = None,
) -> list[DomainScore]:
    """Train every gate on every domain and seed, seed by seed; finished runs are read again.

    Args:
        folder: holds a folder for each run.
        gates: names of `recipes_images`.
        domains: those that are left out, one after the other.
        seeds: of weights, batches and splits.
        steps: of each run, where it is not the recipe's number; a folder holds runs of one number.
        progress: told a stage, how much of it is done, and of how much.
    """
    plans = [(gate, out, seed) for seed in seeds for out in domains for gate in gates]
    scores = []
    for done, (gate, out, seed) in enumerate(plans):
        if progress is not None:
            progress("runs", done, len(plans))
        config = pacs_small(gate, out).replace(seed=seed)
        if steps is not None:
            config = config.replace(optim__steps=steps)
        place = folder / f"{config.recipe}-{seed}"
        known = (place / "config.json").is_file()
        result = run(config, place, resume=known)
        scores.append(_score(gate, out, seed, result.scores))
    return scores


def _score(gate: str, out: str, seed: int, found: dict[str, Any]) -> DomainScore:
    test = found["out"]
    same = {name: test[name] for name in NAMES}
    validation, experts = found["validation"]["accuracy"], statistics.fmean(test["experts"])
    return DomainScore(gate, out, seed, validation=validation, experts=experts, **same)


def domain_table(scores: Sequence[DomainScore]) -> DomainTable:
    """The table of runs that are complete: every gate on every domain and seed."""
    gates, domains, seeds = (
        tuple(dict.fromkeys(getattr(score, name) for score in scores))
        for name in ("gate", "out", "seed")
    )
    known = {(score.gate, score.out, score.seed): score for score in scores}
    whole = len(known) == len(gates) * len(domains) * len(seeds)
    require(whole, f"{len(known)} runs of {len(gates)} × {len(domains)} × {len(seeds)}")
    averages = {
        gate: [_mean(known[gate, out, seed].accuracy for out in domains) for seed in seeds]
        for gate in gates
    }
    reference = averages.get(REFERENCE)
    rows = [
        _row(gate, [score for score in scores if score.gate == gate], averages[gate], reference)
        for gate in gates
    ]
    at_chance = [(s.gate, s.out, s.seed) for s in scores if not s.above_chance]
    commonest = {score.out: score.commonest for score in scores}
    return DomainTable(tuple(rows), seeds, commonest, scores[0].chance, tuple(at_chance))


def _row(
    gate: str,
    scores: Sequence[DomainScore],
    averages: Sequence[float],
    reference: Sequence[float] | None,
) -> DomainRow:
    by_domain: dict[str, list[DomainScore]] = {}
    for score in scores:
        by_domain.setdefault(score.out, []).append(score)
    gains = [a - b for a, b in zip(averages, reference or averages, strict=True)]
    return DomainRow(
        gate=gate,
        domains={out: _mean(s.accuracy for s in found) for out, found in by_domain.items()},
        deviations={out: _deviation([s.accuracy for s in f]) for out, f in by_domain.items()},
        balanced={out: _mean(s.balanced for s in found) for out, found in by_domain.items()},
        average=_mean(averages),
        deviation=_deviation(averages),
        gain=_mean(gains),
        gain_se=_deviation(gains) / len(gains) ** 0.5,
        validation=_mean(score.validation for score in scores),
        experts=_mean(score.experts for score in scores),
    )


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def _deviation(values: Sequence[float]) -> float:
    """Sample standard deviation; not a number for a single value."""
    return statistics.stdev(values) if len(values) > 1 else float("nan")
