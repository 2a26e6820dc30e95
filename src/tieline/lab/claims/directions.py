"""In which direction gates differ, from small runs of the ledger's own, on text and on images.

    change     100 (PPL_gate / PPL_reference - 1) at the same seed: mean and 99.9 % interval by
               Student's t, on the test split or on its attacked form
    gain       average over the four domains of PACS, each left out once, of the accuracy on it,
               less that of another gate at the same seed, in points: mean and 99.9 % interval by
               Student's t over seeds

The tables of papers 1 and 2 are of models a hundred times larger, trained a thousand times longer;
what is judged here is the direction of a difference. Text is judged at the size of `demo-small`:
320 steps of 512 bytes of the text in the box. Images are judged at the size of `pacs-small` with
fewer steps, from random weights. Runs of one seed begin with the same weights and see the same
data.

The fast mode trains nothing, and its checks are open. A check on images is open, too, where PACS is
not at hand and where models have not learnt: if the balanced accuracy of a gate at a seed, averaged
over the domains, is within three of its standard errors of chance.

Intervals are wide because comparisons are many and runs of a few seeds deceive: 95 % intervals of
the perturbed router lay below zero for two sets of six pairs, and 24 fresh pairs did not repeat it.
"""

import math
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from tieline.core.statistics import mean_interval
from tieline.lab.claims.checks import estimated, unmeasured
from tieline.lab.claims.claim import Check, ClaimRun, Real
from tieline.lab.claims.trained import need_training

if TYPE_CHECKING:
    from tieline.lab.claims.comparisons import DomainScore

__all__ = [
    "GATE_SECONDS",
    "IMAGE_GROUP",
    "IMAGE_PAIRS",
    "LEVEL",
    "NOT_TRAINED",
    "NO_DATA",
    "STEPS",
    "TEXT_GROUP",
    "TEXT_PAIRS",
    "gains",
    "higher_accuracy",
    "lower_perplexity",
    "perplexity_changes",
]

TEXT_PAIRS, IMAGE_PAIRS = 6, 4
"""Seeds of which every gate is trained with each."""
TEXT_GROUP, IMAGE_GROUP = "directions", "image directions"
"""Names of the groups of claims that share the trained models."""
LEVEL = 0.999
"""Confidence at which a direction is decided."""
ATTACK = 0.025
"""Share of the words that the attack replaces (paper 1, appendix C.1)."""
WINDOWS = 512
"""Windows of 32 bytes that are scored: all of a split."""
STEPS = 80
"""Optimiser steps of a run on images, 32 images each."""
CHANCE_ERRORS = 3.0
"""Standard errors by which models have to exceed chance for a difference to count."""
GATE_SECONDS = 45
"""About how long the runs of one gate on text take, all seeds, on one core."""
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
    """Check that a gate has a lower perplexity than another.

    Args:
        run: mode and seed.
        gate: a variant of `training.config.VARIANTS`.
        reference: another one.
        printed: the paper's change in percent.
        attacked: judge the attacked split.
        pairs: seeds of which both are trained with each.
    """
    split = "attacked text" if attacked else "test"
    name = f"{gate} against {reference}, {split}: change of the perplexity in percent"
    if run.fast:
        return unmeasured(name, printed, NOT_TRAINED)
    changes = perplexity_changes(run, gate, reference, attacked=attacked, pairs=pairs)
    return _direction(name, changes, most=0)


def perplexity_changes(
    run: ClaimRun, gate: str, reference: str, *, attacked: bool = False, pairs: int = TEXT_PAIRS
) -> list[float]:
    """Change of the perplexity against the reference at each seed, in percent."""
    changes = []
    for seed in _paired_seeds(run, pairs):
        ours, theirs = (_perplexities(name, seed)[attacked] for name in (gate, reference))
        changes.append(100 * math.expm1(math.log(ours / theirs)))
    return changes


def higher_accuracy(run: ClaimRun, gate: str, reference: str, printed: Real) -> Check:
    """Check that a gate is more accurate than another on domains that were left out.

    Args:
        run: mode and seed.
        gate: a key of `training.recipes.DOMAIN_VARIANTS`.
        reference: another one.
        printed: the paper's gain in points.
    """
    name = f"{gate} against {reference}, domains left out: gain of the accuracy in points"
    reason = _why_open(run)
    if reason:
        return unmeasured(name, printed, reason)
    check = _direction(name, gains(run, gate, reference), least=0)
    seeds = _paired_seeds(run, IMAGE_PAIRS)
    blind = sum(_at_chance(variant, seed) for variant in (gate, reference) for seed in seeds)
    if not blind:
        return check
    return replace(check, passed=False, open=f"{blind} of {2 * IMAGE_PAIRS} averages are at chance")


def gains(run: ClaimRun, gate: str, reference: str) -> list[float]:
    """Difference of the average accuracies of two gates at each seed, in points."""
    seeds = _paired_seeds(run, IMAGE_PAIRS)
    return [_average(gate, seed) - _average(reference, seed) for seed in seeds]


def _paired_seeds(run: ClaimRun, pairs: int) -> range:
    """Training seeds of a run: those of different runs do not overlap."""
    return range(pairs * run.seed, pairs * (run.seed + 1))


def _direction(name: str, differences: list[float], **limits: Real) -> Check:
    """Check on which side of a limit the mean of paired differences lies; see `estimated`."""
    interval = mean_interval(differences, LEVEL)
    return estimated(f"{name}, {100 * LEVEL:g} % interval", fmean(differences), interval, **limits)


@lru_cache(maxsize=64)
def _perplexities(gate: str, seed: int) -> tuple[float, float]:
    """Perplexity per byte of the test split, and perplexity per word of its attacked form."""
    need_training()
    from tieline.lab.training.engine import run
    from tieline.lab.training.recipes import recipe_config

    config = recipe_config(f"demo-small-{gate}", seed)
    config = config.replace(data__options={"rate": ATTACK}, evaluate_items=WINDOWS)
    with tempfile.TemporaryDirectory() as folder:
        scores = run(config, Path(folder) / "run").scores
    return scores["test"]["perplexity"], scores["test_attacked"]["word_perplexity"]


@lru_cache(maxsize=64)
def _scores(gate: str, seed: int) -> "tuple[DomainScore, ...]":
    """Train a gate with every domain left out."""
    need_training()
    from tieline.lab.claims.comparisons import leave_one_out

    with tempfile.TemporaryDirectory() as folder:
        return tuple(leave_one_out(Path(folder), gates=(gate,), seeds=(seed,), steps=STEPS))


def _average(gate: str, seed: int) -> float:
    """Accuracy on the domain left out, in percent, averaged over the domains."""
    return 100 * fmean(score.accuracy for score in _scores(gate, seed))


def _at_chance(gate: str, seed: int) -> bool:
    """Whether the balanced accuracy, averaged over the domains, does not exceed chance."""
    scores = _scores(gate, seed)
    error = math.hypot(*(score.balanced_se for score in scores)) / len(scores)
    excess = fmean(score.balanced - score.chance for score in scores)
    return excess <= CHANCE_ERRORS * error


def _why_open(run: ClaimRun) -> str:
    """Return why no images are trained on; empty if they can be."""
    from tieline.lab.training.fetch import find_data
    from tieline.lab.training.image_data import PACS

    if run.fast:
        return NOT_TRAINED
    return "" if find_data(PACS.name).is_file() else NO_DATA
