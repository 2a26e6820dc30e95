"""Nine gates on the same data with paired seeds: does smooth routing cost or gain perplexity?

Paper 1, Tables 1, 4, 6 and 8, and paper 2, Table 2, in the small forms of `training.recipes`. Runs
of one seed begin with the same weights and see the same windows, so gates are compared in pairs:

    perplexity   exp(loss) on the test split; mean and standard deviation over seeds
    change       100 (PPL_gate / PPL_smoe - 1) at the same seed; mean and 95 % t interval
    K            mean experts per token on the validation split
    attack       word perplexity with 2.5 % of words replaced by AAA over that without, less 1

Leave one domain out: does the router matter for images of a kind that was never seen?

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

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from tieline.core.errors import TielineError, require
from tieline.training.checkpoint import read_json
from tieline.training.config import GATE_NAMES
from tieline.training.engine import run
from tieline.training.recipes import DOMAIN_GATES, DOMAINS, pacs_small, recipe_config

__all__ = [
    "DomainRow",
    "DomainScore",
    "DomainTable",
    "GateRow",
    "GateScore",
    "GateTable",
    "domain_table",
    "gate_table",
    "leave_one_out",
    "read_scores",
    "train_gates",
]

REFERENCE = "smoe"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class GateScore:
    """One run: its gate and seed, what it scored, and what its gates did.

    Attributes:
        gate: name of the variant.
        seed: seed of the run.
        perplexity: on the test split, per token.
        bpc: bits per token on the validation split.
        word_perplexity: on the test split, per word; None where words are not counted.
        attacked: the same with words replaced.
        experts: experts per token on the validation split.
        budget: k* of the gate at the end; None without one.
        tokens: tokens trained on.
    """

    gate: str
    seed: int
    perplexity: float
    bpc: float
    word_perplexity: float | None
    attacked: float | None
    experts: float
    budget: float | None
    tokens: int


@dataclass(frozen=True)
class GateRow:
    """A gate over its seeds.

    Attributes:
        gate: name of the variant.
        seeds: seeds that were run.
        perplexity: mean over seeds.
        deviation: standard deviation over seeds; 0 for one seed.
        change: mean change against the reference at the same seed, in percent; None without pairs.
        low: lower end of its 95 % interval; None with fewer than two pairs.
        high: upper end.
        experts: mean experts per token.
        attack: mean rise of the word perplexity under attack, in percent; None if not measured.
    """

    gate: str
    seeds: tuple[int, ...]
    perplexity: float
    deviation: float
    change: float | None
    low: float | None
    high: float | None
    experts: float
    attack: float | None


@dataclass(frozen=True)
class GateTable:
    """All gates, in the order of `training.gates`, with the runs behind them."""

    rows: tuple[GateRow, ...]
    scores: tuple[GateScore, ...]

    def to_dict(self) -> dict[str, Any]:
        """The record in plain values."""
        return asdict(self)


def train_gates(
    form: str,
    folder: Path,
    gates: Sequence[str] = GATE_NAMES,
    seeds: Sequence[int] = (0, 1, 2),
    progress: Progress | None = None,
) -> GateTable:
    """Train every gate with every seed and compare; runs that are done are not repeated.

    Args:
        form: data and size, such as "wikitext-small".
        folder: of the runs; one that was killed goes on.
        gates: names of variants.
        seeds: of the runs.
        progress: told how many runs are done.
    """
    jobs = [(gate, seed) for seed in seeds for gate in gates]
    for done, (gate, seed) in enumerate(jobs):
        if progress is not None:
            progress(f"{gate} {seed}", done, len(jobs))
        config, out = recipe_config(f"{form}-{gate}", seed), folder / f"{form}-{gate}-{seed}"
        run(config, out, resume=(out / "config.json").is_file())
    return gate_table(read_scores(folder, form))


def read_scores(folder: Path, form: str) -> tuple[GateScore, ...]:
    """The finished runs of a form in a folder, by gate and seed."""
    found = [_score(read_json(path)) for path in folder.glob(f"{form}-*/result.json")]
    require(bool(found), f"{folder} holds no finished run of {form!r}", TielineError)
    return tuple(sorted(found, key=lambda score: (GATE_NAMES.index(score.gate), score.seed)))


def _score(result: Mapping[str, Any]) -> GateScore:
    config, scores = result["config"], result["scores"]
    test, smoothing = scores["test"], scores.get("smoothing") or {}
    optim = config["optim"]
    return GateScore(
        gate=config["gate"]["name"],
        seed=config["seed"],
        perplexity=test["perplexity"],
        bpc=scores["validation"]["bpc"],
        word_perplexity=test.get("word_perplexity"),
        attacked=scores.get("test_attacked", {}).get("word_perplexity"),
        experts=scores["validation"]["experts_per_token"],
        budget=smoothing.get("budget"),
        tokens=optim["steps"] * optim["batch"] * config["model"]["context"],
    )


def gate_table(scores: Iterable[GateScore]) -> GateTable:
    """Means, deviations and paired changes of runs."""
    kept = tuple(scores)
    gates = dict.fromkeys(score.gate for score in kept)
    reference = {s.seed: s.perplexity for s in kept if s.gate == REFERENCE}
    return GateTable(tuple(_row(gate, kept, reference) for gate in gates), kept)


def _row(gate: str, scores: Sequence[GateScore], reference: Mapping[int, float]) -> GateRow:
    runs = [score for score in scores if score.gate == gate]
    perplexities = [score.perplexity for score in runs]
    pairs = [s for s in runs if s.seed in reference and gate != REFERENCE]
    changes = [100 * (score.perplexity / reference[score.seed] - 1) for score in pairs]
    low, high = _interval(changes)
    attacks = [
        100 * (s.attacked / s.word_perplexity - 1) for s in runs if s.attacked and s.word_perplexity
    ]
    return GateRow(
        gate=gate,
        seeds=tuple(score.seed for score in runs),
        perplexity=statistics.fmean(perplexities),
        deviation=statistics.stdev(perplexities) if len(runs) > 1 else 0.0,
        change=statistics.fmean(changes) if changes else None,
        low=low,
        high=high,
        experts=statistics.fmean(score.experts for score in runs),
        attack=statistics.fmean(attacks) if attacks else None,
    )


def _interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """95 % interval of a mean by Student's t; none for fewer than two values."""
    if len(values) < 2:
        return None, None
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - float(half), mean + float(half)


DOMAINS_REFERENCE = "cosine"
NAMES = ("accuracy", "balanced", "balanced_se", "commonest", "chance")
ABOVE = 3.0


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
        scores.append(_domains_score(gate, out, seed, result.scores))
    return scores


def _domains_score(gate: str, out: str, seed: int, found: dict[str, Any]) -> DomainScore:
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
    reference = averages.get(DOMAINS_REFERENCE)
    rows = [
        _domains_row(
            gate, [score for score in scores if score.gate == gate], averages[gate], reference
        )
        for gate in gates
    ]
    at_chance = [(s.gate, s.out, s.seed) for s in scores if not s.above_chance]
    commonest = {score.out: score.commonest for score in scores}
    return DomainTable(tuple(rows), seeds, commonest, scores[0].chance, tuple(at_chance))


def _domains_row(
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
