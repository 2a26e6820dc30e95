"""The price of continuity in the layers of a trained model: predicted from other text."""

import math
from statistics import fmean

from tieline.analysis.smooth_width import NOISE, Calibration
from tieline.lab.claims.checks import at_least, at_most, near
from tieline.lab.claims.claim import Check, ClaimRun, Evidence
from tieline.lab.claims.registry import claim
from tieline.lab.limits.continuity import projected_cost
from tieline.lab.on_model.frontier_records import LawPoint, LayerLaw
from tieline.lab.on_model.layer_law import layer_laws
from tieline.models.demo import demo_text, load_demo_model, load_demo_tokenizer
from tieline.models.running import batches, only_running

LENGTH, TURNS = 512, 3
"""Tokens of a sequence; of so many sequences one tells f, J and σ, the others D and S."""

SCALES, INSIDE, ERROR = (4.0, 8.0), 0.1, 0.25
"""ε/σ, the most tokens inside the band, and the error of predictions that is held."""


def measured_laws(run: ClaimRun) -> tuple[LayerLaw, ...]:
    """The layers of the demo model: f, J and σ of every third sequence, D and S of the others."""
    model, tokenizer = load_demo_model(), load_demo_tokenizer()
    ids = tokenizer(demo_text(), return_tensors="pt")["input_ids"][0]
    count = min(run.size(48, 120), len(ids) // LENGTH)
    sequences = list(ids[: count * LENGTH].view(count, LENGTH))
    first = sequences[run.seed % TURNS :: TURNS]
    others = [sequence for number, sequence in enumerate(sequences) if (number - run.seed) % TURNS]
    with only_running(model):
        halves = [list(batches(some, 8)) for some in (first, others)]
        calibration = Calibration(model, halves[0], NOISE)
        return layer_laws(model, calibration, *halves, scales=SCALES, seed=run.seed)


def predicted_over_measured(law: LayerLaw, point: LawPoint) -> tuple[float, float]:
    """D and S of a layer by the law over what was measured."""
    cost = projected_cost(law.density, law.jump, law.sigma, point.epsilon, law.slope)
    moved, sensitivity = point.moved.value or math.nan, point.sensitivity.value or math.nan
    return cost.moved / moved, cost.sensitivity / sensitivity


@claim(
    "p5-layers",
    "moved and sensitivity of a trained layer, predicted",
    number="layers",
    statement="D and S of projected top-k in a layer of a trained model follow from density, jump "
    "and noise at ties of other text, within 25 % where at most a tenth of the tokens is inside "
    "the band, and D is 1 to 2 times the frontier at its S.",
    setting="the demo model, k = 2 of 16, nothing renormalised, noise of the choice alone; a tenth "
    "of the tokens inside the band at most",
    overturned_by="a mean prediction (in full, any) more than 25 % off, or D outside 1 to 2 "
    "frontiers",
    tested="The four layers of the demo model, each by itself, at ε = 4 and 8 times the noise of "
    "bf16 routers; every third sequence predicts, the others are measured. Fast: mean over layers.",
    seconds=4,
)
def layers(run: ClaimRun) -> Evidence:
    """D and S of real layers beside their predictions, and D beside the frontier."""
    laws = measured_laws(run)
    rows = [(law, point) for law in laws for point in law.points if point.inside <= INSIDE]
    ratios = [predicted_over_measured(*row) for row in rows]
    over = [point.over.value or math.nan for _, point in rows]
    checks = [
        near(f"{name} predicted over measured, mean", _geometric_mean(values), 1, ERROR)
        for name, values in zip("DS", zip(*ratios, strict=True), strict=True)
    ]
    checks += [
        at_least("D over the frontier, mean", fmean(over), 1),
        at_most("D over the frontier, mean", fmean(over), 2),
    ]
    if not run.fast:
        checks += [
            check
            for row, pair in zip(rows, ratios, strict=True)
            for check in _layer_checks(row, pair)
        ]
    least, most = min(map(min, ratios)), max(map(max, ratios))
    return Evidence(
        checks,
        paper="1; 1 to 2",
        measured=f"predicted over measured {least:.2f} to {most:.2f} in {len(rows)} cases; "
        f"over the frontier {min(over):.2f} to {max(over):.2f}",
    )


def _layer_checks(row: tuple[LayerLaw, LawPoint], pair: tuple[float, float]) -> list[Check]:
    """The checks of one layer at one width."""
    law, point = row
    where = f"layer {law.name.split('.')[2]}, ε = {point.scale:g} σ"
    return [
        near(f"{name}, {where}", value, 1, ERROR) for name, value in zip("DS", pair, strict=True)
    ]


def _geometric_mean(values: tuple[float, ...]) -> float:
    """The geometric mean of ratios."""
    return math.exp(fmean(map(math.log, values)))
