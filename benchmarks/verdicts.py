"""How often the words about a small sample contradict those about the whole text.

    python benchmarks/verdicts.py [--resamples N] [--json FILE]

The demo model runs over the whole demo text once, in sequences of 512 tokens. Each resample draws
sequences with replacement: 1, 4 and 32 of them for 512, 2,048 and 16,384 tokens.

routing      "robust", "mostly stable" or "fragile", by the tokens that flip in some layer under a
             number format or noise of σ (`tieline inspect`)
tolerance    whether the routers tolerate a format, by the KL to the clean run (`tieline audit`)

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
from tieline.analysis.audit import HARMLESS, tolerated
from tieline.analysis.findings import STATES, possible_states
from tieline.analysis.inspect import inspect
from tieline.core.statistics import (
    SequenceSums,
    clustered_share,
    kl_divergence,
    next_token_losses,
)
from tieline.measure.flips import logit_view, noise_densities, noise_flips
from tieline.measure.rounding import precision_flips
from tieline.models.demo import load_demo_model
from tieline.models.running import batches, forward, only_running
from tieline.run.condition import Condition, Perturbation, applied
from tieline.trace import RoutingTrace

LENGTH, SIZES, TARGET = 512, (512, 2048, 16384), 0.05
FORMATS = ("bf16", "fp16", "int8", "fp8_e4m3")
SIGMAS = (0.001, 0.003, 0.01)


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


def flips_somewhere(trace: RoutingTrace) -> dict[str, Tensor]:
    """Chance of every token to flip in at least one layer, by format and σ."""
    kept: dict[str, list[Tensor]] = {}
    for layer in trace.layers:
        view = logit_view(layer)
        density = noise_densities(layer, view)
        for name in FORMATS:
            kept.setdefault(name, []).append(1 - precision_flips(layer, view, name)[1].double())
        for sigma in SIGMAS:
            chance = noise_flips(layer, view, sigma, density)[1]
            kept.setdefault(f"noise {sigma:g}", []).append(1 - chance.double())
    return {name: 1 - torch.stack(parts).prod(dim=0) for name, parts in kept.items()}


def draws(sequences: int, count: int, resamples: int) -> Tensor:
    """Sequences of every resample, drawn with replacement."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(sequences, (resamples, count), generator=generator)


def word_of(share: float) -> str:
    """The word of a point estimate."""
    return next(word for edge, word in STATES if share < edge)


def compare(
    kind: str,
    cause: str,
    whole: float,
    word: str,
    sequences: int,
    resamples: int,
    judge: Callable[[Tensor], tuple[str, Sequence[str]]],
) -> list[Row]:
    """Rows of all sizes; `judge` gives the word before and the possible words after."""
    rows = []
    for tokens in SIZES:
        found = [judge(draw) for draw in draws(sequences, tokens // LENGTH, resamples)]
        before = sum(old != word for old, _ in found) / resamples
        after = sum(word not in new for _, new in found) / resamples
        decided = sum(len(new) == 1 for _, new in found) / resamples
        rows.append(Row(kind, cause, whole, word, tokens, before, after, decided))
    return rows


def routing_rows(trace: RoutingTrace, resamples: int) -> list[Row]:
    """Words of `tieline inspect`."""
    whole = trace.n_tokens // LENGTH
    rows = []
    for cause, chances in flips_somewhere(trace).items():
        parts = chances[: whole * LENGTH].view(whole, LENGTH)
        share = parts.mean().item()

        def judge(draw: Tensor, parts: Tensor = parts) -> tuple[str, Sequence[str]]:
            drawn = parts[draw]
            documents = torch.arange(len(draw)).repeat_interleave(LENGTH)
            found = clustered_share(drawn.flatten(), documents)
            return word_of(found.value or 0.0), possible_states(found)

        rows += compare("routing", cause, share, word_of(share), whole, resamples, judge)
    return rows


def costs(trace: RoutingTrace) -> dict[str, tuple[Tensor, Tensor]]:
    """KL and change of the loss of every sequence under each format of the routers."""
    model, whole = load_demo_model(), trace.n_tokens // LENGTH
    sequences = list(trace.tokens[: whole * LENGTH].long().view(whole, LENGTH))
    sums = {name: (SequenceSums(), SequenceSums()) for name in FORMATS}
    with only_running(model):
        for ids in batches(sequences, 8):
            clean = forward(model, ids).logits
            for name, (kl, loss) in sums.items():
                with applied(model, Condition(Perturbation("rounding", name))):
                    other = forward(model, ids).logits
                kl.add(kl_divergence(clean, other))
                loss.add(next_token_losses(other, ids) - next_token_losses(clean, ids))
    return {n: (torch.cat(kl.sums), torch.cat(loss.sums)) for n, (kl, loss) in sums.items()}


def tolerance_rows(trace: RoutingTrace, resamples: int) -> list[Row]:
    """Words of `tieline audit`."""
    rows = []
    for cause, (kl, loss) in costs(trace).items():
        value = kl.sum().item() / (len(kl) * LENGTH)
        risen = loss.sum().item() / (len(loss) * (LENGTH - 1))
        word = "yes" if max(value, risen) < HARMLESS else "no"

        def judge(draw: Tensor, kl: Tensor = kl, loss: Tensor = loss) -> tuple[str, Sequence[str]]:
            sizes = torch.full((len(draw),), float(LENGTH))
            means = SequenceSums([kl[draw]], [sizes]).mean()
            rises = SequenceSums([loss[draw]], [sizes - 1]).mean()
            point = "yes" if max(means.value or 0.0, rises.value or 0.0) < HARMLESS else "no"
            found = tolerated(means, rises, len(draw))
            return point, ("yes", "no") if found == "unclear" else (found,)

        rows += compare("tolerance", cause, value, word, len(kl), resamples, judge)
    return rows


def show(rows: Sequence[Row]) -> None:
    """Print the rows as a table."""
    table = Table(title="words that contradict those about the whole text")
    for column in ("words", "cause", "whole", "word", "tokens", "before", "after", "decided", ""):
        table.add_column(column)
    for row in rows:
        rates = (f"{100 * rate:.1f} %" for rate in (row.before, row.after, row.decided))
        whole = f"{100 * row.whole:.2f} %" if row.kind == "routing" else f"{row.whole:.5f} nats"
        met = "met" if row.met else "MISSED"
        table.add_row(row.kind, row.cause, whole, row.word, f"{row.tokens:,}", *rates, met)
    Console(width=120).print(table)


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resamples", type=int, default=200)
    parser.add_argument("--json")
    options = parser.parse_args()
    trace = inspect("demo", tokens=10**7, sequence_length=LENGTH, jumps=False).trace
    assert trace is not None
    rows = [*routing_rows(trace, options.resamples), *tolerance_rows(trace, options.resamples)]
    show(rows)
    if options.json:
        found = [asdict(row) | {"met": row.met} for row in rows]
        told = {"machine": machine(), "resamples": options.resamples, "rows": found}
        Path(options.json).write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
