"""How often the words about a small sample contradict those about the whole text.

    python benchmarks/verdicts.py [--resamples N] [--json FILE]

The demo model runs over the whole demo text once, in sequences of 512 tokens. Each resample draws
sequences with replacement: 1, 4 and 32 of them for 512, 2,048 and 16,384 tokens.

tolerance    whether a format is harmless to the routers alone, by the KL to the clean run
             (`tieline audit --all`)
served       the same for the whole model in a format (`inspect`, `audit`, `smooth`)

before       the word of the point estimate alone, another than that of the whole text
after        the words that the interval allows, without that of the whole text
decided      resamples whose interval allows one word

A rate above 5 % misses the target.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from harness import machine
from tieline.analysis.inspect import inspect
from tieline.analysis.served_precision import HARMLESS, tolerated
from tieline.core.predictions import kl_divergence, next_token_losses
from tieline.core.statistics import SequenceSums
from tieline.models.demo import load_demo_model
from tieline.run.condition import Condition, Part, Perturbation, applied
from tieline.run.corpus import stacked_batches
from tieline.run.forward import forward, only_running
from tieline.trace import RoutingTrace

LENGTH, SIZES, TARGET = 512, (512, 2048, 16384), 0.05
FORMATS = ("bf16", "fp16", "int8", "fp8_e4m3")


@dataclass(frozen=True)
class Row:
    """Shares of resamples of one size that contradict the whole text, and that decide."""

    kind: str
    cause: str
    whole: float
    word: str
    tokens: int
    before: float
    after: float
    decided: float

    @property
    def met(self) -> bool:
        """Whether few enough contradict."""
        return self.after <= TARGET


def draws(sequences: int, count: int, resamples: int) -> Tensor:
    """Sequences of every resample, drawn with replacement."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(sequences, (resamples, count), generator=generator)


def compare(
    kind: str,
    cause: str,
    full: float,
    word: str,
    sequences: int,
    resamples: int,
    judge: Callable[[Tensor], tuple[str, Sequence[str]]],
) -> list[Row]:
    """Rows of all sizes; `judge` gives the word before and the possible words after."""
    rows = []
    for tokens in SIZES:
        judgements = [judge(draw) for draw in draws(sequences, tokens // LENGTH, resamples)]
        before = sum(old != word for old, _ in judgements) / resamples
        after = sum(word not in new for _, new in judgements) / resamples
        decided = sum(len(new) == 1 for _, new in judgements) / resamples
        rows.append(Row(kind, cause, full, word, tokens, before, after, decided))
    return rows


def costs(trace: RoutingTrace, part: Part) -> dict[str, tuple[Tensor, Tensor]]:
    """KL and change of the loss of every sequence under each format of a part of the model."""
    model, documents = load_demo_model(), trace.n_tokens // LENGTH
    sequences = list(trace.tokens[: documents * LENGTH].long().view(documents, LENGTH))
    sums = {name: (SequenceSums(), SequenceSums()) for name in FORMATS}
    with only_running(model):
        for ids in stacked_batches(sequences, 8):
            clean = forward(model, ids).logits
            for name, (kl, loss) in sums.items():
                with applied(model, Condition(Perturbation("rounding", name, part))):
                    other = forward(model, ids).logits
                kl.add(kl_divergence(clean, other))
                loss.add(next_token_losses(other, ids) - next_token_losses(clean, ids))
    return {n: (torch.cat(kl.sums), torch.cat(loss.sums)) for n, (kl, loss) in sums.items()}


def tolerance_rows(trace: RoutingTrace, part: Part, resamples: int) -> list[Row]:
    """Words about the routers alone or about the whole model."""
    kind, rows = "tolerance" if part == "router" else "served", []
    for cause, (kl, loss) in costs(trace, part).items():
        value = kl.sum().item() / (len(kl) * LENGTH)
        word = "yes" if value < HARMLESS else "no"

        def judge(draw: Tensor, kl: Tensor = kl, loss: Tensor = loss) -> tuple[str, Sequence[str]]:
            sizes = torch.full((len(draw),), float(LENGTH))
            means = SequenceSums([kl[draw]], [sizes]).mean()
            rises = SequenceSums([loss[draw]], [sizes - 1]).mean()
            point = "yes" if (means.value or 0.0) < HARMLESS else "no"
            tolerance = tolerated(means, rises, len(draw))
            return point, ("yes", "no") if tolerance == "unclear" else (tolerance,)

        rows += compare(kind, cause, value, word, len(kl), resamples, judge)
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table(title="words that contradict those about the whole text")
    for column in ("words", "cause", "whole", "word", "tokens", "before", "after", "decided", ""):
        table.add_column(column)
    for row in rows:
        rates = (f"{100 * rate:.1f} %" for rate in (row.before, row.after, row.decided))
        full = f"{row.whole:.5f} nats"
        met = "met" if row.met else "MISSED"
        table.add_row(row.kind, row.cause, full, row.word, f"{row.tokens:,}", *rates, met)
    Console(width=120).print(table)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--json")
    options = parser.parse_args()
    trace = inspect("demo", tokens=10**7, sequence_length=LENGTH, jumps=False, serve="none").trace
    assert trace is not None
    parts: tuple[Part, ...] = ("router", "model")
    rows = [row for part in parts for row in tolerance_rows(trace, part, options.resamples)]
    show(rows)
    if options.json:
        plain_rows = [asdict(row) | {"met": row.met} for row in rows]
        report = {"machine": machine(), "resamples": options.resamples, "rows": plain_rows}
        Path(options.json).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
