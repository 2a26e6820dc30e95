"""What a gate costs in training, and the tables of finished runs.

    python benchmarks/training.py step [--form enwik8-small] [--rounds 12] [--json FILE]
    python benchmarks/training.py table RUNS [--form wikitext-small]

A step is what the Trainer does: forward with all auxiliary losses, backward, clipping, AdamW. Gates
take turns within one process, five steps each, and ratios of medians of processor time are told
with 95 % intervals; the targets are those of the smooth gates against hard top-2. Each gate first
trains until its ε has found the budget, for a fresh band is narrow and would flatter it; the mean
number of experts after timing is told beside the ratios.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from harness import Ratio, interleave, ratio, report
from tieline.papers.comparisons import GateRow, gate_table, read_scores
from tieline.routing.losses import collect_routing
from tieline.training.config import GATE_NAMES
from tieline.training.recipes import recipe_config
from tieline.training.tasks import task_of
from tieline.training.trainer import RoutingTrainer, training_arguments

STEPS, SETTLE, TARGET = 5, 80, 1.25
HELD = ("smooth50", "smooth1", "annealed")


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
    place = iter(range(0, len(windows), batch))

    def some(count: int = STEPS) -> None:
        model.train()
        for _ in range(count):
            first = next(place)
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
    made = {gate: steps_of(form, gate) for gate in gates}
    samples = interleave({gate: some for gate, (some, _) in made.items()}, rounds)
    experts = {gate: _mean_active(*both) for gate, both in made.items()}
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
    """The gates of finished runs, side by side."""
    table = gate_table(read_scores(folder, form))
    shown = Table(title=f"{form}, {table.scores[0].tokens:,} tokens")
    for heading in ("gate", "seeds", "test PPL", "change %", "95 %", "K", "AAA, per word"):
        shown.add_column(heading)
    for row in table.rows:
        shown.add_row(*cells(row))
    Console().print(shown)


def cells(row: GateRow) -> list[str]:
    """The texts of a row."""
    change = "" if row.change is None else f"{row.change:+.2f}"
    between = "" if row.low is None or row.high is None else f"{row.low:+.2f} to {row.high:+.2f}"
    attack = "" if row.attack is None else f"{row.attack:+.1f} %"
    perplexity = f"{row.perplexity:.2f} ± {row.deviation:.2f}"
    seeds = str(len(row.seeds))
    return [row.gate, seeds, perplexity, change, between, f"{row.experts:.3f}", attack]


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
    words = parser.parse_args()
    if words.command == "table":
        show_table(words.runs, words.form)
        return
    torch.set_num_threads(1)
    ratios, extra = time_steps(words.form, words.gates, words.rounds)
    report(f"training step, {words.form}", ratios, words.json, **extra)
    Console().print({gate: round(k, 3) for gate, k in extra["experts"].items()})


if __name__ == "__main__":
    main()
