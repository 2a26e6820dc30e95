"""Whether a soft choice changes the loss as its walls predict, on many tokens.

    python -m benchmarks.soften [MODEL] [--tokens N] [--length L] [--json FILE]

Sequences of the text that the model in the box was trained on, drawn without repetition. For each
layer and for all at once, at the three smallest widths: the measured slope over the one predicted
at width 0 (`at 0`), and the measured change over the one that gradients and curvatures of the same
tokens give (`same tokens`), each with its standard error. Every near token is computed again.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tieline.core.numerics import one_thread
from tieline.core.records import to_plain
from tieline.core.statistics import Estimate
from tieline.lab.on_model.soften import Softening, SoftenSizes, SoftLevel, soften_sample
from tieline.lab.on_model.subject import Subject
from tieline.models import find_routers
from tieline.models.model import Model
from tieline.run.corpus import TokenisedText
from tools.demo_model.corpus import training_documents
from tools.demo_model.recipe import END

BATCH = 4096
"""Tokens of a forward pass."""


def sample(tokenizer: Any, tokens: int, length: int) -> TokenisedText:
    """Sequences of the training text, drawn at random without repetition, in order."""
    text = END.join(training_documents())
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    generator = torch.Generator().manual_seed(1)
    starts = torch.randperm(len(ids) // length, generator=generator)[: tokens // length]
    rows = tuple(ids[at : at + length] for at in (starts.sort().values * length).tolist())
    return TokenisedText(rows, (), ("",) * (len(rows) * length), len(text))


def rows(name: str, levels: Sequence[SoftLevel], predicted: Estimate) -> list[tuple[str, ...]]:
    """One row per width."""
    assert predicted.value is not None
    table = []
    for level in levels:
        assert level.slope.value is not None
        assert level.missed is not None
        error = (level.missed.standard_error or 0.0) / abs(predicted.value)
        at_zero = Estimate(level.slope.value / predicted.value, error)
        cells = (level.slope, predicted, at_zero, level.ratio)
        table.append((name, f"{level.width:.4g}", *map(_shown, cells)))
    return table


def _shown(estimate: Estimate | None) -> str:
    if estimate is None or estimate.value is None:
        return "-"
    return f"{estimate.value:.3g} ± {estimate.standard_error or 0.0:.2g}"


def report(result: Softening) -> Table:
    """The table of all layers."""
    table = Table("layer", "width", "measured", "predicted", "at 0", "same tokens")
    for layer in result.layers:
        for row in rows(layer.name, layer.levels, layer.predicted):
            table.add_row(*row)
    for row in rows("all", result.together, result.predicted):
        table.add_row(*row)
    return table


def main() -> None:
    """Soften the model of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tokens", type=int, default=98_304)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    loaded = Model.open(options.model, "this benchmark takes", dtype="fp32")
    text = sample(loaded.tokenizer, options.tokens, options.length)
    sizes = SoftenSizes(options.tokens, options.length, levels=3, exact=options.tokens)
    began = time.process_time()
    with one_thread():
        names = tuple(find_routers(loaded.module))
        subject = Subject(loaded.module, loaded.tokenizer, loaded.name, names, text, {})
        result = soften_sample(subject, sizes, batch_size=BATCH // options.length)
    console = Console()
    console.print(report(result))
    console.print(f"{time.process_time() - began:.0f} s of CPU")
    if options.json is not None:
        options.json.write_text(json.dumps(to_plain(result), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
