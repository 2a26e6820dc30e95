"""Gates compared by training with paired seeds: on text, and on image domains left out.

Runs of one seed begin with the same weights and see the same data, so gates are compared in pairs.

Text (`read_scores`, `gate_table`): does smooth routing cost or gain perplexity? Paper 1, Tables 1,
4, 6 and 8, and paper 2, Table 2, in the small forms of `training.recipes`:

    perplexity   exp(loss) on the test split; mean and standard deviation over seeds
    change       100 (PPL_gate / PPL_smoe - 1) at the same seed; mean and 95 % t interval
    K            mean experts per token on the validation split
    attack       word perplexity with 2.5 % of words replaced by AAA over that without, less 1

Images (`leave_one_out`, `domain_table`): does the router matter for images of an unseen kind? Paper
2, Table 3 (linear, cosine, perturbed cosine) and paper 1, Table 3 (cosine against smooth), on PACS:

    accuracy     on the domain left out, of the model of the last step
    balanced     the same with equal weights of the classes: 1/classes for a constant answer
    average      over the four domains; mean and standard deviation over seeds
    gain         average less that of the cosine router at the same seed; mean and standard error

A run is above chance if its balanced accuracy exceeds 1/classes by three of its own standard
errors; `DomainTable.at_chance` lists the others.

Directions (`lower_perplexity`, `higher_accuracy`): the ledger judges the direction of a difference
by its own small runs, since the papers' models are a hundred times larger and trained a thousand
times longer. Text is judged at the size of `demo-small`: 320 steps of 512 bytes of the text in the
box; images at the size of `pacs-small` with fewer steps, from random weights. Changes and gains are
means over seeds with a 99.9 % interval by Student's t. Intervals are wide because there are many
comparisons and few seeds: 95 % intervals of the perturbed router lay below zero for two sets of six
pairs, which 24 further pairs did not confirm.

In the fast mode nothing is trained and the checks are open. A check on images is also open if PACS
is missing, or if models have not learnt: if the balanced accuracy of a gate at a seed, averaged
over the domains, is within three of its standard errors of chance.
"""

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from tieline.core.errors import TielineError, require
from tieline.core.statistics import mean_interval
from tieline.lab.claims.claim import ClaimRun
from tieline.lab.claims.evidence import Check, Real, estimated, unmeasured
from tieline.lab.training.checkpoint import read_json
from tieline.lab.training.config import GATE_NAMES
from tieline.lab.training.recipes import DOMAIN_GATES, DOMAINS, pacs_small, recipe_config

GATE_REFERENCE = "smoe"
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class GateScore:
    """One run: its gate and seed, its scores, and its use of experts.

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
    """All gates, in the order of `config.GATE_NAMES`, with their runs."""

    rows: tuple[GateRow, ...]
    scores: tuple[GateScore, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)


def read_scores(folder: Path, form: str) -> tuple[GateScore, ...]:
    """Return the finished runs of a form in a folder, by gate and seed."""
    scores = [_gate_score(read_json(path)) for path in folder.glob(f"{form}-*/result.json")]
    require(bool(scores), f"{folder} holds no finished run of {form!r}", TielineError)
    return tuple(sorted(scores, key=lambda score: (GATE_NAMES.index(score.gate), score.seed)))


def _gate_score(result: Mapping[str, Any]) -> GateScore:
    """Read the record of one run on text from its result file."""
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
    """Summarise runs by gate: means, deviations and paired changes."""
    records = tuple(scores)
    gates = dict.fromkeys(score.gate for score in records)
    reference = {s.seed: s.perplexity for s in records if s.gate == GATE_REFERENCE}
    return GateTable(tuple(_gate_row(gate, records, reference) for gate in gates), records)


def _gate_row(gate: str, scores: Sequence[GateScore], reference: Mapping[int, float]) -> GateRow:
    """Summarise a gate over its seeds, with paired changes against the reference."""
    runs = [score for score in scores if score.gate == gate]
    perplexities = [score.perplexity for score in runs]
    pairs = [s for s in runs if s.seed in reference and gate != GATE_REFERENCE]
    changes = [100 * (score.perplexity / reference[score.seed] - 1) for score in pairs]
    low, high = mean_interval(changes) if len(changes) > 1 else (None, None)
    attacks = [
        100 * (s.attacked / s.word_perplexity - 1) for s in runs if s.attacked and s.word_perplexity
    ]
    return GateRow(
        gate=gate,
        seeds=tuple(score.seed for score in runs),
        perplexity=fmean(perplexities),
        deviation=stdev(perplexities) if len(runs) > 1 else 0.0,
        change=fmean(changes) if changes else None,
        low=low,
        high=high,
        experts=fmean(score.experts for score in runs),
        attack=fmean(attacks) if attacks else None,
    )


DOMAIN_REFERENCE = "cosine"
ACCURACIES = ("accuracy", "balanced", "balanced_se", "commonest", "chance")
ERRORS_ABOVE_CHANCE = 3.0
"""Standard errors by which accuracies must exceed chance for a difference to count."""


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
        """Whether the accuracy exceeds that of a constant answer."""
        return self.balanced - ERRORS_ABOVE_CHANCE * self.balanced_se > self.chance


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
    """All gates, with the accuracies of a constant answer and of guessing.

    Attributes:
        rows: one for each gate.
        seeds: the seeds that all runs have.
        commonest: share of the commonest class of each domain.
        chance: 1 / number of classes.
        at_chance: runs that do not exceed chance, as (gate, domain, seed).
    """

    rows: tuple[DomainRow, ...]
    seeds: tuple[int, ...]
    commonest: dict[str, float]
    chance: float
    at_chance: tuple[tuple[str, str, int], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
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
    """Train every gate on every domain and seed, seed by seed; finished runs are not repeated.

    Args:
        folder: holds a folder for each run.
        gates: keys of `recipes.DOMAIN_VARIANTS`.
        domains: domains to leave out, one after the other.
        seeds: of weights, batches and splits.
        steps: of each run, if not those of the recipe; a folder holds runs of one length.
        progress: called with a stage, the number of runs done and their total.
    """
    from tieline.lab.training.training_run import run_training

    plans = [(gate, out, seed) for seed in seeds for out in domains for gate in gates]
    scores = []
    for done, (gate, out, seed) in enumerate(plans):
        if progress is not None:
            progress("runs", done, len(plans))
        config = pacs_small(gate, out).replace(seed=seed)
        if steps is not None:
            config = config.replace(optim__steps=steps)
        run_folder = folder / f"{config.recipe}-{seed}"
        started = (run_folder / "config.json").is_file()
        result = run_training(config, run_folder, resume=started)
        test = result.scores["out"]
        accuracies = {name: test[name] for name in ACCURACIES}
        validation, experts = result.scores["validation"]["accuracy"], fmean(test["experts"])
        scores.append(
            DomainScore(gate, out, seed, validation=validation, experts=experts, **accuracies)
        )
    return scores


def domain_table(scores: Sequence[DomainScore]) -> DomainTable:
    """Return the table of runs of every gate on every domain and seed."""
    gates, domains, seeds = (
        tuple(dict.fromkeys(getattr(score, name) for score in scores))
        for name in ("gate", "out", "seed")
    )
    by_run = {(score.gate, score.out, score.seed): score for score in scores}
    complete = len(by_run) == len(gates) * len(domains) * len(seeds)
    require(complete, f"{len(by_run)} runs of {len(gates)} × {len(domains)} × {len(seeds)}")
    averages = {
        gate: [fmean(by_run[gate, out, seed].accuracy for out in domains) for seed in seeds]
        for gate in gates
    }
    reference = averages.get(DOMAIN_REFERENCE)
    rows = [
        _domain_row(
            gate, [score for score in scores if score.gate == gate], averages[gate], reference
        )
        for gate in gates
    ]
    at_chance = [(s.gate, s.out, s.seed) for s in scores if not s.above_chance]
    commonest = {score.out: score.commonest for score in scores}
    return DomainTable(tuple(rows), seeds, commonest, scores[0].chance, tuple(at_chance))


def _domain_row(
    gate: str,
    scores: Sequence[DomainScore],
    averages: Sequence[float],
    reference: Sequence[float] | None,
) -> DomainRow:
    """Summarise a gate over domains and seeds, with its gain over the reference."""
    by_domain: dict[str, list[DomainScore]] = {}
    for score in scores:
        by_domain.setdefault(score.out, []).append(score)
    gains = [a - b for a, b in zip(averages, reference or averages, strict=True)]
    return DomainRow(
        gate=gate,
        domains={out: fmean(s.accuracy for s in runs) for out, runs in by_domain.items()},
        deviations={out: _seed_deviation([s.accuracy for s in f]) for out, f in by_domain.items()},
        balanced={out: fmean(s.balanced for s in runs) for out, runs in by_domain.items()},
        average=fmean(averages),
        deviation=_seed_deviation(averages),
        gain=fmean(gains),
        gain_se=_seed_deviation(gains) / len(gains) ** 0.5,
        validation=fmean(score.validation for score in scores),
        experts=fmean(score.experts for score in scores),
    )


def _seed_deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation, NaN for a single value."""
    return stdev(values) if len(values) > 1 else float("nan")


TEXT_PAIRS, IMAGE_PAIRS = 6, 4
"""Number of seeds with which every gate is trained."""
TEXT_GROUP, IMAGE_GROUP = "directions", "image directions"
"""Names of the groups of claims that share the trained models."""
LEVEL = 0.999
"""Confidence at which a direction is decided."""
ATTACK = 0.025
"""Share of the words that the attack replaces (paper 1, appendix C.1)."""
WINDOWS = 512
"""Windows of 32 bytes that are scored, enough for a whole split."""
STEPS = 80
"""Optimiser steps of a run on images, 32 images each."""
GATE_SECONDS = 45
"""Approximate seconds of the runs of one gate on text, all seeds, on one core."""
NOT_TRAINED = "the fast mode trains nothing"
NO_DATA = "PACS is not here: put pacs/pacs32.npz into the folder of $TIELINE_DATA (docs/vision.md)"


def lower_perplexity(
    run: ClaimRun,
    gate: str,
    reference: str,
    printed: Real,
    *,
    attacked: bool = False,
    pairs: int = TEXT_PAIRS,
) -> Check:
    """Check that a gate of `training.config.VARIANTS` has a lower perplexity than another.

    `printed` is the paper's change in percent; `attacked` compares on the attacked split. Both
    gates are trained with each of `pairs` seeds.
    """
    split = "attacked text" if attacked else "test"
    name = f"{gate} against {reference}, {split}: change of the perplexity in percent"
    if run.fast:
        return unmeasured(name, printed, NOT_TRAINED)
    changes = perplexity_changes(run, gate, reference, attacked=attacked, pairs=pairs)
    return _direction_check(name, changes, most=0)


def perplexity_changes(
    run: ClaimRun, gate: str, reference: str, *, attacked: bool = False, pairs: int = TEXT_PAIRS
) -> list[float]:
    """Change of the perplexity against the reference at each seed, in percent."""
    changes = []
    for seed in _paired_seeds(run, pairs):
        ours, theirs = (_gate_perplexities(name, seed)[attacked] for name in (gate, reference))
        changes.append(100 * math.expm1(math.log(ours / theirs)))
    return changes


def higher_accuracy(run: ClaimRun, gate: str, reference: str, printed: Real) -> Check:
    """Check that a gate is more accurate than another on domains that were left out.

    Gates are keys of `training.recipes.DOMAIN_VARIANTS`; `printed` is the paper's gain in points.
    """
    name = f"{gate} against {reference}, domains left out: gain of the accuracy in points"
    reason = _reason_not_trained(run)
    if reason:
        return unmeasured(name, printed, reason)
    check = _direction_check(name, accuracy_gains(run, gate, reference), least=0)
    seeds = _paired_seeds(run, IMAGE_PAIRS)
    blind = sum(_at_chance(variant, seed) for variant in (gate, reference) for seed in seeds)
    if not blind:
        return check
    return replace(check, passed=False, open=f"{blind} of {2 * IMAGE_PAIRS} averages are at chance")


def accuracy_gains(run: ClaimRun, gate: str, reference: str) -> list[float]:
    """Difference of the average accuracies of two gates at each seed, in points."""
    seeds = _paired_seeds(run, IMAGE_PAIRS)
    return [_average_accuracy(gate, seed) - _average_accuracy(reference, seed) for seed in seeds]


def _paired_seeds(run: ClaimRun, pairs: int) -> range:
    """Training seeds of a run: those of different runs do not overlap."""
    return range(pairs * run.seed, pairs * (run.seed + 1))


def _direction_check(name: str, differences: list[float], **limits: Real) -> Check:
    """Check that the mean of paired differences is beyond a limit; see `estimated`."""
    interval = mean_interval(differences, LEVEL)
    return estimated(f"{name}, {100 * LEVEL:g} % interval", fmean(differences), interval, **limits)


def require_training_packages() -> None:
    """Raise if a package that training needs is missing."""
    for package in ("transformers", "accelerate"):
        require(find_spec(package) is not None, f"needs {package}: pip install 'tieline[train]'")


@lru_cache(maxsize=64)
def _gate_perplexities(gate: str, seed: int) -> tuple[float, float]:
    """Perplexity per byte of the test split, and perplexity per word of its attacked form."""
    require_training_packages()
    from tieline.lab.training.training_run import run_training

    config = recipe_config(f"demo-small-{gate}", seed)
    config = config.replace(data__options={"rate": ATTACK}, evaluate_items=WINDOWS)
    with tempfile.TemporaryDirectory() as folder:
        scores = run_training(config, Path(folder) / "run").scores
    return scores["test"]["perplexity"], scores["test_attacked"]["word_perplexity"]


@lru_cache(maxsize=64)
def _domain_scores(gate: str, seed: int) -> tuple[DomainScore, ...]:
    """Train a gate with each domain left out in turn."""
    require_training_packages()
    with tempfile.TemporaryDirectory() as folder:
        return tuple(leave_one_out(Path(folder), gates=(gate,), seeds=(seed,), steps=STEPS))


def _average_accuracy(gate: str, seed: int) -> float:
    """Accuracy on the domain left out, in percent, averaged over the domains."""
    return 100 * fmean(score.accuracy for score in _domain_scores(gate, seed))


def _at_chance(gate: str, seed: int) -> bool:
    """Whether the balanced accuracy, averaged over the domains, does not exceed chance."""
    scores = _domain_scores(gate, seed)
    error = math.hypot(*(score.balanced_se for score in scores)) / len(scores)
    excess = fmean(score.balanced - score.chance for score in scores)
    return excess <= ERRORS_ABOVE_CHANCE * error


def _reason_not_trained(run: ClaimRun) -> str:
    """Reason why no models are trained on images; empty if they can be."""
    from tieline.lab.training.data_files import find_data
    from tieline.lab.training.image_data import PACS

    if run.fast:
        return NOT_TRAINED
    return "" if find_data(PACS.name).is_file() else NO_DATA
