"""Fixed results whose sentences are compared with snapshots."""

from dataclasses import replace

from tests.analysis.test_findings import HIGH, LOW, busy_trace, jump_record, softmax_trace
from tests.report.test_remedies import TABLE
from tests.report.zoo import make_inspection, make_trace
from tieline.analysis.findings import judge, observe
from tieline.analysis.precision import judge as judge_precision
from tieline.analysis.precision_records import (
    NeverHit,
    PerturbationEffect,
    PrecisionAudit,
    SigmaForFlips,
)
from tieline.core.statistics import Estimate, Share
from tieline.measure.measure_records import Measurement, MeasureSettings
from tieline.measure.measures import measure
from tieline.measure.rounding import ProductFlips
from tieline.report.words.audit import notes, remedy_sentences
from tieline.report.words.inspection import calibration_sentence, noise_sentence

SETTINGS = MeasureSettings(sigmas=(1e-2, 1e-1), precisions=("bf16", "int8"))


def judged(measures, jumps=()):
    """An inspection of these measures and jumps."""
    result = make_inspection()
    facts = {"judgement": judge(measures, jumps), "observations": observe(measures, jumps)}
    return replace(result, measures=measures, jumps=jumps, calibration=(), **facts)


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
    product = Measurement(ProductFlips("bf16", 0.1, Estimate(0.03), Estimate(0.025)))
    layers = (replace(measures.layers[0], product=product), *measures.layers[1:])
    smoothed = replace(measures, layers=tuple(replace(x, used=2.4) for x in measures.layers))
    full = make_inspection(losses=True)
    short = {layer.name: str(i) for i, layer in enumerate(full.measures.layers)}
    unreached = replace(full.calibration[0], load=0, needed=None, high=None, low=1234.5)
    bounds = {"0 to 0.1 %": (0.0, 0.001), "0 to 0.2 %": (0.0, 0.002), "0 to 90 %": (0.0, 0.9)}
    bounds |= {"1 to 3 %": (0.01, 0.03), "2 to 50 %": (0.02, 0.5)}
    verdicts = {
        f"interval {name}": [
            judged(with_share(measures, sum(ends) / 2, *ends), jumps).verdict
            for jumps in (high, low)
        ]
        for name, ends in bounds.items()
    }
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
        **verdicts,
        "calibration and noise": [
            calibration_sentence(full, short),
            calibration_sentence(replace(full, calibration=(unreached,)), short),
            noise_sentence(full, short),
        ],
    }


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
    made = {"name": name, "kind": "rounding", "level": level, "part": part}
    return PerturbationEffect(**made, **fields, **shares, **costs, **changes)


def audited(*rows, sequences=8, **changes):
    """An audit of these rows."""
    facts = {
        "judgement": judge_precision(rows, sequences),
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
    near, whole = effect("router fp8_e4m3", 8e-4, error=2e-4), effect("model bf16", 0.1)
    never = NeverHit("b", tuple(range(12)), 16)
    noted = audited(
        good, never_hit=(never,), left_out=("100 of 200 tokens",), impossible="no", experts=2.5
    )
    return {
        "no rounding": [audited().verdict],
        "all tolerated": [audited(good).verdict],
        "some tolerated": [audited(good, bad, near, whole).verdict],
        "none tolerated": [audited(bad, near).verdict],
        "one sequence": [audited(effect("router bf16", 1e-9, error=None), sequences=1).verdict],
        "notes": notes(noted, {"b": "1"}),
        "remedies": remedy_sentences(TABLE),
    }
