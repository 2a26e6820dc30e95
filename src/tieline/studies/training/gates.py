"""Nine gates on the same data with paired seeds: does smooth routing cost or gain perplexity?

Paper 1, Tables 1, 4, 6 and 8, and paper 2, Table 2, in the small forms of `training.recipes`. Runs
of one seed begin with the same weights and see the same windows, so gates are compared in pairs:

    perplexity   exp(loss) on the test split; mean and standard deviation over seeds
    change       100 (PPL_gate / PPL_smoe - 1) at the same seed; mean and 95 % t interval
    K            mean experts per token on the validation split
    attack       word perplexity with 2.5 % of words replaced by AAA over that without, less 1
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from tieline.errors import TielineError, require
from tieline.training.catalogue import recipe_config
from tieline.training.checkpoint import read_json
from tieline.training.engine import run
from tieline.training.gates import GATE_NAMES

__all__ = ["GateRow", "GateScore", "GateTable", "gate_table", "read_scores", "train_gates"]

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
