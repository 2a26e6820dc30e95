"""Whether flips happen as predicted, on the trained model that ships with the package.

    python benchmarks/predictions.py [--tokens N] [--json FILE]

Per layer, clean layer inputs, the same tokens:

noise       Gaussian noise on the router's logits at six σ from 1e-3 to 3e-1 of their standard
            deviation, repeated until 3,000 flips: the per-token prediction (Def. 6.2) within 5 %
population  the rate that half of the sequences predict (Def. 6.3) against that measured on the
            other half, within 3 standard errors for σ up to 0.03 of the s.d.
rounding    logits rounded to bf16: ties and flips (Def. 7.2, 7.3) within 15 %
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from harness import machine
from tieline.core.numerics import one_thread
from tieline.core.ranking import topk_mask
from tieline.measure.boundary import gap_density
from tieline.measure.measures import MeasureSettings, measure_layer
from tieline.measure.noise_flips import flip_probability, logit_view, noisy_gap, population_flips
from tieline.models import capture
from tieline.models.demo import demo_text, load_demo_model, load_demo_tokenizer
from tieline.trace import LayerTrace

FRACTIONS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
FIRST_ORDER = 0.03
ENOUGH = 3000
LENGTH = 512


@dataclass(frozen=True)
class Row:
    """A prediction beside what was measured, and the distance between them."""

    layer: str
    what: str
    predicted: float
    measured: float
    off: float
    allowed: float
    unit: str

    @property
    def met(self) -> bool:
        """Whether the prediction is as near as promised."""
        return abs(self.off) <= self.allowed


def captured(tokens: int) -> list[LayerTrace]:
    """Routing of so many tokens of the demo text by the demo model, with all scores."""
    model, tokenizer = load_demo_model(), load_demo_tokenizer()
    ids = torch.tensor(tokenizer(demo_text(), verbose=False)["input_ids"][:tokens])
    rows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    with torch.inference_mode(), capture(model, ranks="all") as recorder:
        for batch in rows.split(8):
            model(input_ids=batch)
    return list(recorder.trace().layers)


def measured(scores: Tensor, k: int, sigma: float) -> tuple[float, float]:
    """Share of flips under noise, repeated until there are enough, and its standard error."""
    generator = torch.Generator().manual_seed(0)
    clean, flips, runs = topk_mask(scores, k), torch.zeros(len(scores), dtype=torch.int64), 0
    while int(flips.sum()) < ENOUGH:
        noise = torch.randn(scores.shape, generator=generator, dtype=scores.dtype)
        flips += (topk_mask(scores + sigma * noise, k) != clean).any(dim=1)
        runs += 1
    share = flips.double() / runs
    return share.mean().item(), share.std().item() / math.sqrt(len(share))


def noise_rows(layer: LayerTrace) -> list[Row]:
    """Per-token predictions at every σ."""
    view, k, rows = logit_view(layer), layer.facts.k, []
    for fraction in FRACTIONS:
        sigma = fraction * view.scores.std().item()
        predicted = flip_probability(view.scores, k, sigma).mean().item()
        rate, _ = measured(view.scores, k, sigma)
        off = predicted / rate - 1
        rows.append(Row(layer.name, f"noise {fraction:g}", predicted, rate, off, 0.05, "relative"))
    return rows


def population_rows(layer: LayerTrace) -> list[Row]:
    """What half of the sequences say about the others, at small σ."""
    view, k, rows = logit_view(layer), layer.facts.k, []
    half = torch.arange(len(view.scores)) // LENGTH % 2 == 0
    density = gap_density(noisy_gap(view.scores[half], k, view.slope[half]))
    for fraction in [f for f in FRACTIONS if f <= FIRST_ORDER]:
        sigma = fraction * view.scores.std().item()
        predicted = population_flips(density, sigma)
        rate, error = measured(view.scores[~half], k, sigma)
        assert predicted.value is not None
        assert predicted.standard_error is not None
        off = (predicted.value - rate) / math.hypot(predicted.standard_error, error)
        what = f"population {fraction:g}"
        rows.append(Row(layer.name, what, predicted.value, rate, off, 3.0, "standard errors"))
    return rows


def rounding_rows(layer: LayerTrace) -> list[Row]:
    """Ties and flips by rounding to bf16."""
    shares = measure_layer(layer, MeasureSettings(sigmas=(), precisions=("bf16",))).precision.value
    assert shares is not None
    pairs = {
        "bf16 ties": (shares[0].tie, shares[0].tie_emulated),
        "bf16 flips": (shares[0].flip, shares[0].flip_emulated),
    }
    rows = []
    for what, (predicted, pair) in pairs.items():
        assert predicted.value is not None
        assert pair.value
        off = predicted.value / pair.value - 1
        rows.append(Row(layer.name, what, predicted.value, pair.value, off, 0.15, "relative"))
    return rows


def show(rows: list[Row]) -> None:
    table = Table(title="predicted against measured")
    for column in ("layer", "what", "predicted", "measured", "off by", "allowed", ""):
        table.add_column(column)
    for row in rows:
        scale, unit = (100, "%") if row.unit == "relative" else (1, "s.e.")
        verdict = "met" if row.met else "MISSED"
        off, allowed = f"{scale * row.off:+.2f} {unit}", f"{scale * row.allowed:g} {unit}"
        numbers = f"{row.predicted:.6f}", f"{row.measured:.6f}"
        table.add_row(row.layer, row.what, *numbers, off, allowed, verdict)
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="at most, of the demo text")
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    layers = captured(options.tokens)
    with one_thread():
        sections = (noise_rows, population_rows, rounding_rows)
        rows = [row for layer in layers for part in sections for row in part(layer)]
    show(rows)
    print(f"{sum(row.met for row in rows)} of {len(rows)} met, {len(layers[0].experts)} tokens")
    if options.json is not None:
        result = {"machine": machine(), "rows": [asdict(row) | {"met": row.met} for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
