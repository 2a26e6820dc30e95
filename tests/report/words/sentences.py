"""Fixed results whose sentences are compared with snapshots."""

from dataclasses import replace
from typing import get_args

import torch

from tests.analysis.attribution import test_attribution as runs
from tests.analysis.inspect.test_inspect_observations import (
    HIGH,
    LOW,
    busy_trace,
    jump_record,
    softmax_trace,
)
from tests.analysis.planted import renumbered, without_scores
from tests.report.audit.test_remedies import TABLE
from tests.report.test_smooth import result as smoothed_model
from tests.report.zoo import make_inspection, make_serving, make_trace
from tieline.analysis.audit import judge_precisions
from tieline.analysis.audit_records import (
    NeverHit,
    PerturbationEffect,
    PrecisionAudit,
    SigmaForFlips,
)
from tieline.analysis.diff import diff as diff_of
from tieline.analysis.diff_records import (
    Alignment,
    DequantisedSplit,
    LayerPair,
    Pattern,
    ReplaySplit,
    SplitPart,
)
from tieline.analysis.inspect_observations import judge_routing, routing_observations
from tieline.analysis.inspect_records import NoiseReport
from tieline.analysis.noise_shapes import NoiseShape
from tieline.analysis.noise_size import ExpectedFormat, judge_noise_size
from tieline.analysis.served_precision import Action, Recommendation
from tieline.core.statistics import Estimate, Share
from tieline.measure.measure_settings import Measurement, MeasureSettings
from tieline.measure.measures import measure
from tieline.measure.rounding_flips import ProductFlips
from tieline.report.words.audit import audit_notes, remedy_sentences
from tieline.report.words.diff import dequantised_sentence, replay_sentence
from tieline.report.words.inspect import calibration_sentence
from tieline.report.words.smooth import smoothing_details, smoothing_facts, smoothing_verdict

SETTINGS = MeasureSettings(sigmas=(1e-2, 1e-1), precisions=("bf16", "int8"))


def judged(measures, jumps=(), serving=None):
    """An inspection of these measures and jumps."""
    result = make_inspection()
    facts = {
        "judgement": judge_routing(measures, jumps, serving),
        "observations": routing_observations(measures, jumps),
    }
    facts |= {"noise": NoiseReport((), "not measured: this needs the model"), "serving": serving}
    return replace(result, measures=measures, jumps=jumps, calibration=(), **facts)


def servings():
    """One of each recommendation, sure and unsure."""
    harmless = make_serving()
    unsure = replace(harmless, kl=Estimate(6e-4, 4e-4))
    costly = replace(make_serving(kl=8e-3), precision="int8")
    coarse = replace(costly, replayed=Estimate(7.8e-3, 1e-4))
    states = [replace(costly, routers=state) for state in ("equal scores", "all chosen")]
    lone = replace(costly, layers=1, sequences=1, replayed=Estimate(None))
    return [harmless, unsure, costly, coarse, *states, lone]


def lines(result):
    """Verdict and findings."""
    return [result.verdict, *(f"{x.severity} {x.kind}: {x.text}" for x in result.findings)]


def with_share(measures, share, low, high):
    """The same measures with another share of tokens that flip in bf16."""
    changes = {"any_layer": Estimate(share), "any_share": Share(share, low, high, 0, 0)}
    rates = tuple(
        replace(x, **changes) if x.name == "bf16" else x for x in measures.model.precision
    )
    return replace(measures, model=replace(measures.model, precision=rates))


def inspection():
    """Verdicts of all states, and a sentence of every case."""
    measures = measure(make_trace(), SETTINGS)
    names = [layer.name for layer in measures.layers]
    high, low = (tuple(jump_record(name, row) for name in names) for row in (HIGH, LOW))
    losses = tuple(jump_record(name, HIGH, (1.0, None, 3.0)) for name in names)
    product = Measurement(ProductFlips("bf16", 0.1, Estimate(0.03), Estimate(0.025), Estimate(0.0)))
    layers = (replace(measures.layers[0], product=product), *measures.layers[1:])
    smoothed = replace(measures, layers=tuple(replace(x, used=2.4) for x in measures.layers))
    full = make_inspection(losses=True)
    unreached = replace(full.calibration[0], load=0, needed=None, high=None, low=1234.5)
    third = with_share(measures, 0.02, 0.01, 0.03)
    return {
        "everything": lines(full),
        "large jumps": lines(judged(measures, losses)),
        "small jumps": lines(judged(measures, low)),
        "few near-ties": lines(judged(measures, tuple(jump_record(n, HIGH[:3]) for n in names))),
        "product": lines(judged(replace(measures, layers=layers))),
        "ids only": lines(judged(measure(make_trace(ids_only=True), SETTINGS))),
        "unknown logits": lines(judged(measure(softmax_trace(), SETTINGS))),
        "one busy expert": lines(judged(measure(busy_trace(), SETTINGS))),
        "smoothed": lines(judged(smoothed, high))[:1],
        "interval 1 to 3 %": [judged(third, high).verdict],
        "served": [judged(measures, high, serving).verdict for serving in servings()],
        "calibration and noise": [
            calibration_sentence(full),
            calibration_sentence(replace(full, calibration=(unreached,))),
        ],
    }


def compared(other, a=None, **options):
    """A comparison of fixed scores with others."""
    return lines(diff_of(runs.run(runs.A) if a is None else a, other, **options))


def diff():
    """Verdicts of all conclusions, all patterns, and a sentence of every case."""
    a, noisy = runs.run(runs.A), runs.run(runs.noisy(runs.A))
    swapped, _ = renumbered(noisy, {1}, 3)
    odd = replace(noisy.layers[1], **shuffled(noisy.layers[1]))
    against = replace(noisy, layers=(noisy.layers[0], odd, noisy.layers[2]))
    quiet = runs.noisy(runs.A, 0.0005)
    order, rows = runs.A[1].argsort(dim=1, descending=True), torch.arange(0, runs.TOKENS, 50)
    i, j = order[rows, 0], order[rows, 4]
    quiet[1][rows, i], quiet[1][rows, j] = runs.A[1][rows, j] - 0.1, runs.A[1][rows, i] + 0.1
    planted = {
        f"planted {kind}": compared(runs.run(scores), runs.run(runs.A[: len(scores)]))
        for kind, scores in runs.planted_shapes().items()
    }
    patterns = (
        Pattern("exchanged scores", "x", 0.25, 0.03, flips=40),
        Pattern("row", "x", 4.5, 4.0, number=3),
        Pattern("document", "x", 3.0, 2.5, number=7),
        Pattern("positions", "x", -4.0, 3.0),
        Pattern("offset", "x", 0.5, 0.35, detail="bias"),
        Pattern("layer", "x", 9.0, 3.5, detail="beside"),
        *(
            Pattern(kind, "x", 3.0, 0.0, 7, detail="reference")
            for kind in (
                "row",
                "expert",
                "document",
                "positions",
                "token",
                "rare tokens",
                "batch row",
                "decode",
            )
        ),
        Pattern("first position", "x", 3.0, 0.0, detail="reference"),
        Pattern("last position", "x", 3.0, 0.0, detail="reference"),
        Pattern("lag", None, 1.0, 1.0),
        Pattern("weights", "x.weight", 0.9, 0.5, number=2, detail="B"),
    )
    bf16 = ExpectedFormat("bf16", "as asked")
    shapes = [
        NoiseShape("x", 0.005, 900, reference_ratio=1.1),
        NoiseShape("y", 0.1, 900, reference_ratio=12.3),
    ]
    sizes = [
        judge_noise_size([NoiseShape("x", s, 900)], bf16) for s in (0.0, 5e-8, 0.005, 0.3, 5.0)
    ]
    pairs = LayerPair("l.0", "l.1", 8, 2, 4, 0.9, 0.3), LayerPair("l.1", "l.2", 8, 2, 2, 0.9, 0.3)
    aligned = Alignment(
        9, 1, 1, None, pairs, ("l.9",), (), 2, 0, 0, 3, (), ("l.3", "l.4"), 5, True, ("A",)
    )
    part, share = SplitPart, Share(0.02, 0.01, 0.03, 20, 1000)
    return {
        "near-ties": compared(noisy),
        "near-ties, format expected": compared(noisy, expect="bf16"),
        "noise too large": compared(noisy, expect="fp32"),
        "equal": compared(a, expect="fp32"),
        "choice against scores": compared(against),
        "wide flips": compared(runs.run(quiet)),
        "renumbered": compared(swapped),
        "ids only": compared(without_scores(noisy)),
        **planted,
        "other patterns": [x.text for x in patterns],
        "sizes": [
            x.text
            for x in (*sizes, judge_noise_size(shapes, bf16), judge_noise_size(shapes[:1], bf16))
        ],
        "alignment": [*aligned.notes, *replace(aligned, token_shift=0, layer_shift=1).notes[:2]],
        "splits": [
            replay_sentence(ReplaySplit(part(0.02, 0.1), part(0.01, 0.1), part(0.002, 0.1), 9, 9)),
            replay_sentence(ReplaySplit(part(0.02, 0.1), part(0.03, 0.1), part(0.4, 0.1), 9, 9)),
            dequantised_sentence(DequantisedSplit("B", 4.5, (), (), share, share, 0.01, None)),
        ],
    }


def shuffled(layer):
    """Experts and scores of a layer with rank 6 in place of rank 3."""
    order = torch.tensor([0, 1, 5, 2, 3, 4, 6])
    return {"experts": layer.experts[:, order], "scores": layer.scores[:, order]}


def effect(name, kl, loss=0.0, error=0.0, **changes):
    """A row of an audit."""
    part, level = name.split()
    fields = {
        "local_flips": 100,
        "predicted": None,
        "predicted_low": None,
        "compounding": 3.14,
        "moved_p99": None,
        "by_flips": 0.4,
        "layers": (),
    }
    shares = dict.fromkeys(("local", "full", "any_layer", "moved", "damage"), Estimate(0.0213))
    costs = {"kl": Estimate(kl, error), "loss": Estimate(loss, 0.0), "kl_floor": Estimate(0.0)}
    identity = {"name": name, "kind": "rounding", "level": level, "part": part}
    return PerturbationEffect(**identity, **fields, **shares, **costs, **changes)


def audited(*rows, sequences=8, **changes):
    """An audit of these rows."""
    facts = {
        "judgement": judge_precisions(rows, sequences),
        "layers": ("a", "b"),
        "tokens": 4096,
        "sequences": sequences,
        "loss": Estimate(2.0),
        "one_percent": SigmaForFlips(0.01, 0.0123, {}),
        "never_hit": (),
        "left_out": (),
        "provenance": {},
        "timings": {},
    }
    return PrecisionAudit(effects=rows, **(facts | changes))


def audit():
    """Verdicts of all kinds, the notes, and the remedies."""
    good, bad = effect("router bf16", 1e-5, error=1e-6), effect("router int4", 0.5, 0.25)
    near, all_layers = effect("router fp8_e4m3", 8e-4, error=2e-4), effect("model bf16", 0.1)
    never = NeverHit("b", tuple(range(12)), 16)
    noted = audited(
        good,
        never_hit=(never,),
        left_out=("100 of 200 tokens",),
        impossible="no",
        experts=2.5,
        uncertified={"a": Estimate(0.001, 1e-4), "b": Estimate(0.003, 1e-4), "c": Estimate(None)},
    )
    return {
        "no rounding": [audited().verdict],
        "all tolerated": [audited(good).verdict],
        "some tolerated": [audited(good, bad, near, all_layers).verdict],
        "none tolerated": [audited(bad, near).verdict],
        "one sequence": [audited(effect("router bf16", 1e-9, error=None), sequences=1).verdict],
        "notes": audit_notes(noted, {"b": "1"}),
        "remedies": remedy_sentences(TABLE),
    }


def smooth():
    """Verdicts of every recommendation, and facts of a smoothed model."""
    repair = smoothed_model()
    _, row = repair.repair.rows
    far = replace(repair.repair, moved=row.before)
    useless = replace(repair.repair, rows=(replace(row, factor=Estimate(0.9, 0.1)),))
    near, no_flips = (
        replace(
            repair,
            near_original=row.name,
            repair=replace(repair.repair, rows=(replace(row, gain=gain),)),
        )
        for gain in (Estimate(0.284, 0.05), Estimate(None))
    )
    actions = get_args(Action)
    return {
        "verdicts": [
            *(
                smoothing_verdict(replace(repair, recommendation=Recommendation(x)))
                for x in actions
            ),
            smoothing_verdict(replace(repair, repair=useless)),
            smoothing_verdict(
                replace(repair, repair=far, recommendation=Recommendation("repair routing"))
            ),
            smoothing_verdict(replace(repair, repair=replace(repair.repair, rows=()))),
        ],
        "facts": smoothing_facts(repair),
        "near the original": smoothing_facts(near)[:1] + smoothing_facts(no_flips)[:1],
        "details": smoothing_details(repair),
    }
