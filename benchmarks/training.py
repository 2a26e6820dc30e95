"""What a gate costs in training, and the tables of finished runs.

    python benchmarks/training.py step [--form enwik8-small] [--rounds 12] [--json FILE]
    python benchmarks/training.py table RUNS [--form wikitext-small]
    python benchmarks/training.py precision RUNS [--form enwik8-extended] [--windows 256]

A step is what the Trainer does: forward with all auxiliary losses, backward, clipping, AdamW. Gates
take turns within one process, five steps each, and ratios of medians of processor time are told
with 95 % intervals; the targets are those of the smooth gates against hard top-2. Each gate first
trains until its ε has found the budget, for a fresh band is narrow and would flatter it; the mean
number of experts after timing is told beside the ratios.

`table` has both splits, and changes against hard top-2 in pairs of one seed. `precision` runs the
trained models in bf16 and int8 (emulated), each against itself in float32 on fresh windows of the
validation split, and tells the KL of `smoe` over that of a gate at the same seed: geometric mean
over seeds with a 95 % t interval of the logarithms.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import mkdtemp
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student
from torch import nn

from harness import Ratio, interleave, ratio, report
from tieline.analysis.smooth_repair import RepairRow, repair_table
from tieline.lab.claims.gate_comparisons import GateRow, gate_table, read_scores
from tieline.lab.training.config import GATE_NAMES
from tieline.lab.training.recipes import recipe_config
from tieline.lab.training.text_data import Windows, load_streams
from tieline.lab.training.trainer import RoutingTrainer, training_arguments
from tieline.lab.training.training_run import task_of
from tieline.models.model import Model
from tieline.routing.losses import collect_routing

STEPS, SETTLE, TARGET = 5, 80, 1.25
HELD = ("smooth50", "smooth1", "annealed")
REFERENCE, FRESH = "smoe", 31_337
"""The gate that others are paired with, and the seed of windows that no score has used."""

HEADINGS = ("gate", "seeds", "PPL", "change %", "95 %", "K", "AAA, per word", "by seed")
PRECISION_HEADINGS = (
    *("gate", "precision", "seeds", "KL", "floor"),
    *("KL of smoe", "floor", "smoe over it"),
)


def steps_of(form: str, gate: str) -> tuple[Callable[[], None], nn.Module]:
    """A function that trains some steps, and its model, with ε settled."""
    config = recipe_config(f"{form}-{gate}").replace(optim__steps=100_000)
    config = config.replace(optim__epsilon_rate=0.05)
    task = task_of(config)
    torch.manual_seed(0)
    data, model = task.data(config.replace(optim__steps=2_000)), task.model(config)
    trainer = RoutingTrainer(config, model, training_arguments(config, Path(mkdtemp())), data.train)
    optimizer, batch = trainer.create_optimizer(), config.optim.batch
    windows: Any = data.train
    starts = iter(range(0, len(windows), batch))

    def some(count: int = STEPS) -> None:
        model.train()
        for _ in range(count):
            first = next(starts)
            rows = [data.train[i] for i in range(first, first + batch)]
            inputs = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            trainer.compute_loss(model, inputs).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.optim.clip)
            optimizer.step()
            optimizer.zero_grad()

    some(SETTLE)
    return some, model


def time_steps(form: str, gates: list[str], rounds: int) -> tuple[list[Ratio], dict[str, Any]]:
    """Ratios of every gate to the first, and experts per token and seconds of each."""
    steps_by_gate = {gate: steps_of(form, gate) for gate in gates}
    samples = interleave({gate: some for gate, (some, _) in steps_by_gate.items()}, rounds)
    experts = {gate: _mean_active(*both) for gate, both in steps_by_gate.items()}
    first = samples[gates[0]]
    ratios = [
        ratio(f"{gate} / {gates[0]}", samples[gate], first, TARGET if gate in HELD else None)
        for gate in gates[1:]
    ]
    return ratios, {"experts": experts, "seconds": {g: s.cpu for g, s in samples.items()}}


def _mean_active(some: Callable[..., None], model: nn.Module) -> float:
    """Experts per token in one more step, over all layers."""
    with collect_routing(model) as records:
        some(1)
    return torch.stack([r.routing.active.double().mean() for r in records]).mean().item()


def show_table(folder: Path, form: str) -> None:
    """The gates of finished runs, side by side, on both splits."""
    scores = read_scores(folder, form)
    for split in ("validation", "test"):
        kept = scores if split == "test" else [replace(s, perplexity=2**s.bpc) for s in scores]
        shown = Table(title=f"{form}, {scores[0].tokens:,} tokens, {split}")
        for heading in (
            "gate",
            "seeds",
            "PPL",
            "change %",
            "95 %",
            "K",
            "AAA, per word",
            "by seed",
        ):
            shown.add_column(heading)
        for row in gate_table(kept).rows:
            perplexities = [f"{s.perplexity:.3f}" for s in kept if s.gate == row.gate]
            shown.add_row(*cells(row), ", ".join(perplexities))
        Console(width=180).print(shown)


def cells(row: GateRow) -> list[str]:
    """The texts of a row."""
    change = "" if row.change is None else f"{row.change:+.2f}"
    between = "" if row.low is None or row.high is None else f"{row.low:+.2f} to {row.high:+.2f}"
    attack = "" if row.attack is None else f"{row.attack:+.1f} %"
    perplexity = f"{row.perplexity:.3f} ± {row.deviation:.3f}"
    seeds = ", ".join(map(str, row.seeds))
    return [row.gate, seeds, perplexity, change, between, f"{row.experts:.3f}", attack]


def show_precision(folder: Path, form: str, windows: int) -> None:
    """What low precision does to trained models, over what it does to hard top-2."""
    found: dict[tuple[str, str], dict[int, RepairRow]] = defaultdict(dict)
    for score in read_scores(folder, form):
        other = folder / f"{form}-{score.gate}-{score.seed}"
        base = folder / f"{form}-{REFERENCE}-{score.seed}"
        if score.gate != REFERENCE and (base / "result.json").is_file():
            for row in under_precision(base, other, form, windows):
                found[score.gate, row.name][score.seed] = row
    shown = Table(title=f"{form}, {windows} windows, KL to itself in float32")
    for heading in (
        "gate",
        "precision",
        "seeds",
        "KL",
        "floor",
        "KL smoe",
        "floor",
        "smoe over it",
    ):
        shown.add_column(heading)
    for (gate, name), rows in found.items():
        shown.add_row(gate, name, ", ".join(map(str, rows)), *precision_cells([*rows.values()]))
    Console(width=180).print(shown)


def under_precision(base: Path, other: Path, form: str, windows: int) -> Sequence[RepairRow]:
    """Two runs of one seed under low precision, each against itself in float32."""
    config = recipe_config(f"{form}-{REFERENCE}")
    shape: Any = config.model
    stream = load_streams(config.data).validation
    drawn = Windows(stream, context=shape.context, length=windows, seed=FRESH)
    sequences = [drawn[start]["input_ids"] for start in range(windows)]
    hard, gate = (Model.open(str(twin / "stock"), dtype="fp32").module for twin in (base, other))
    return repair_table(hard, gate, sequences, batch_size=32).rows


def precision_cells(rows: Sequence[RepairRow]) -> list[str]:
    """Means over seeds, and the ratio in pairs with its interval."""
    columns = ("after", "after_floor", "before", "before_floor")
    means = [fmean(getattr(row, column).value or math.nan for row in rows) for column in columns]
    logs = [math.log(row.factor.value or math.nan) for row in rows]
    middle, by_seed = fmean(logs), ", ".join(f"{math.exp(log):.2f}" for log in logs)
    between = ""
    if len(logs) > 1:
        half = student.ppf(0.975, len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
        between = f" ({math.exp(middle - half):.2f} to {math.exp(middle + half):.2f})"
    return [*(f"{mean:.2e}" for mean in means), f"{math.exp(middle):.2f}{between}: {by_seed}"]


def main() -> None:
    """Read the words and do it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    step = commands.add_parser("step")
    step.add_argument("--form", default="enwik8-small")
    step.add_argument("--gates", nargs="+", default=list(GATE_NAMES))
    step.add_argument("--rounds", type=int, default=12)
    step.add_argument("--json")
    table = commands.add_parser("table")
    table.add_argument("runs", type=Path)
    table.add_argument("--form", default="wikitext-small")
    precision = commands.add_parser("precision")
    precision.add_argument("runs", type=Path)
    precision.add_argument("--form", default="enwik8-extended")
    precision.add_argument("--windows", type=int, default=256)
    arguments = parser.parse_args()
    if arguments.command == "table":
        show_table(arguments.runs, arguments.form)
        return
    if arguments.command == "precision":
        torch.set_num_threads(1)
        show_precision(arguments.runs, arguments.form, arguments.windows)
        return
    torch.set_num_threads(1)
    ratios, extra = time_steps(arguments.form, arguments.gates, arguments.rounds)
    report(f"training step, {arguments.form}", ratios, arguments.json, **extra)
    Console().print({gate: round(k, 3) for gate, k in extra["experts"].items()})


if __name__ == "__main__":
    main()
