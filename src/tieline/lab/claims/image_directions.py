"""In which direction gates differ on images of an unseen kind, from small runs of the ledger's own.

    gain       average over the four domains of PACS, each left out once, of the accuracy on it,
               less that of another gate at the same seed, in points: mean and 99.9 % interval by
               Student's t over seeds

Table 3 of paper 1 is of a pretrained transformer, a hundred times larger, on five sets. What is
judged here is the direction of a difference, at the size of `pacs-small` with fewer steps, from
random weights. Runs of one seed see the same images in the same order. A check is open in the fast
mode, which trains nothing, where PACS is not at hand, and where models have not learnt: if the
balanced accuracy of a gate at a seed, averaged over the domains, is within three of its standard
errors of chance, then a difference says nothing about gates.
"""

import math
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from tieline.lab.claims.claim import Check, Part, Real, Run, unmeasured
from tieline.lab.claims.directions import NOT_TRAINED, direction, paired_seeds
from tieline.lab.claims.trained import need_training

if TYPE_CHECKING:
    from tieline.lab.claims.comparisons import DomainScore

__all__ = ["PAIRS", "STEPS", "TOGETHER", "gains", "higher_accuracy"]

PAIRS = 4
"""Seeds of which every gate is trained with each."""
STEPS = 80
"""Optimiser steps of a run, 32 images each."""
TOGETHER = "image directions"
"""Name of the group of claims that share the trained models."""
CHANCE_ERRORS = 3.0
"""Standard errors by which models have to exceed chance for a difference to count."""
NO_DATA = "PACS is not here: put pacs/pacs32.npz into the folder of $TIELINE_DATA (docs/vision.md)"


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


def gains(run: Run, gate: str, reference: str) -> list[float]:
    """Difference of the average accuracies of two gates at each seed, in points."""
    return [_average(gate, seed) - _average(reference, seed) for seed in paired_seeds(run, PAIRS)]


def higher_accuracy(
    run: Run, gate: str, reference: str, printed: Real, *, part: Part = "paper"
) -> Check:
    """Check that a gate is more accurate than another on domains that were left out.

    Args:
        run: mode and seed.
        gate: a key of `training.recipes.DOMAIN_VARIANTS`.
        reference: another one.
        printed: the paper's gain in points.
        part: the part of the verdict.
    """
    name = f"{gate} against {reference}, domains left out: gain of the accuracy in points"
    closed = _why_open(run)
    if closed:
        return unmeasured(name, printed, closed, part)
    check = direction(name, gains(run, gate, reference), part, least=0)
    seeds = paired_seeds(run, PAIRS)
    blind = sum(_at_chance(one, seed) for one in (gate, reference) for seed in seeds)
    if not blind:
        return check
    return replace(check, passed=False, open=f"{blind} of {2 * PAIRS} averages are at chance")


def _why_open(run: Run) -> str:
    """Return why nothing is trained; empty if it can be."""
    from tieline.lab.training.fetch import find_data
    from tieline.lab.training.image_data import PACS

    if run.fast:
        return NOT_TRAINED
    return "" if find_data(PACS.name).is_file() else NO_DATA
