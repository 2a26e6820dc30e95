"""In which direction gates differ in language modelling, from small runs of the ledger's own.

    change     100 (PPL_gate / PPL_reference - 1) at the same seed: mean and 99.9 % interval by
               Student's t, on the test split or on its attacked form

The tables of papers 1 and 2 are of models a hundred times larger, trained a thousand times longer;
what is judged here is the direction of a difference, at the size of `demo-small`: 320 steps of
512 bytes of the text in the box. Runs of one seed begin with the same weights and see the same
data. The fast mode trains nothing, and its checks are open.

Intervals are wide because comparisons are many and runs of a few seeds deceive: 95 % intervals of
the perturbed router lay below zero for two sets of six pairs, and 24 fresh pairs did not repeat it.
"""

import math
import tempfile
from functools import lru_cache
from pathlib import Path
from statistics import fmean

from tieline.core.statistics import mean_interval
from tieline.lab.claims.claim import Check, Part, Real, Run, estimated, unmeasured
from tieline.lab.claims.trained import need_training

__all__ = [
    "GATE_SECONDS",
    "LEVEL",
    "NOT_TRAINED",
    "PAIRS",
    "TOGETHER",
    "changes",
    "direction",
    "lower_perplexity",
    "paired_seeds",
]

PAIRS = 6
"""Seeds of which every gate is trained with each."""
TOGETHER = "directions"
"""Name of the group of claims that share the trained models."""
LEVEL = 0.999
"""Confidence at which a direction is decided."""
ATTACK = 0.025
"""Share of the words that the attack replaces (paper 1, appendix C.1)."""
WINDOWS = 512
"""Windows of 32 bytes that are scored: the whole of a split."""
NOT_TRAINED = "the fast mode trains nothing"
GATE_SECONDS = 45
"""About how long the runs of one gate take, all seeds, on one core."""


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


def paired_seeds(run: Run, pairs: int) -> range:
    """Training seeds of a run: those of different runs do not overlap."""
    return range(pairs * run.seed, pairs * (run.seed + 1))


def direction(name: str, found: list[float], part: Part, **limits: Real) -> Check:
    """Check on which side of a limit the mean of paired differences lies; see `estimated`."""
    told = f"{name}, {100 * LEVEL:g} % interval"
    return estimated(told, fmean(found), mean_interval(found, LEVEL), **limits, part=part)


def changes(
    run: Run, gate: str, reference: str, *, attacked: bool = False, pairs: int = PAIRS
) -> list[float]:
    """Change of the perplexity against the reference at each seed, in percent."""
    found = []
    for seed in paired_seeds(run, pairs):
        one, other = (_perplexities(name, seed)[attacked] for name in (gate, reference))
        found.append(100 * math.expm1(math.log(one / other)))
    return found


def lower_perplexity(
    run: Run,
    gate: str,
    reference: str,
    printed: Real,
    *,
    attacked: bool = False,
    pairs: int = PAIRS,
    part: Part = "paper",
) -> Check:
    """Check that a gate has a lower perplexity than another.

    Args:
        run: mode and seed.
        gate: a variant of `training.config.VARIANTS`.
        reference: another one.
        printed: the paper's change in percent.
        attacked: judge the attacked split.
        pairs: seeds of which both are trained with each.
        part: the part of the verdict.
    """
    split = "attacked text" if attacked else "test"
    name = f"{gate} against {reference}, {split}: change of the perplexity in percent"
    if run.fast:
        return unmeasured(name, printed, NOT_TRAINED, part)
    found = changes(run, gate, reference, attacked=attacked, pairs=pairs)
    return direction(name, found, part, most=0)
