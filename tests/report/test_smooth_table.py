"""The table of `tieline smooth` says what its result holds."""

import io

from rich.console import Console

from tieline.report.smooth_table import smooth_facts, smooth_view


def estimate(value, error=0.1):
    return {"value": value, "standard_error": error, "status": "ok"}


def result():
    names = ("before", "before_floor", "after", "after_floor", "factor", "flips_before")
    row = {name: estimate(0.5 + place) for place, name in enumerate(names)}
    row |= {"name": "router bf16", "flips_after": estimate(0.04), "flips_before": estimate(0.02)}
    layer = {"name": "a.0.gate", "epsilon": 0.25, "units": "logits", "k": 2, "k_max": 4}
    layers = [layer, layer | {"name": "a.1.gate", "epsilon": 0.0}]
    return {
        "model": "some model",
        "smoothing": {"how": "budget 2.5", "layers": layers, "refused": {"a.2.gate": "hashes"}},
        "repair": {
            "rows": [row],
            "experts_before": estimate(2.0),
            "experts_after": estimate(2.5),
            "experts_by_layer": {"a.0.gate": 2.625},
            "loss": estimate(2.25),
            "loss_change": estimate(-0.001, 0.0005),
            "moved": estimate(0.003),
            "tokens": 16384,
            "sequences": 32,
        },
        "latency": [latency(1.7, "eager", "eager"), latency(1.2, "eager", "tieline")],
    }


def latency(ratio, original, implementation):
    ends = {"low": ratio - 0.1, "high": ratio + 0.1}
    return {"ratio": ratio, **ends, "original": original, "implementation": implementation}


def test_every_number_of_the_result_is_shown_in_eighty_columns():
    console = Console(file=io.StringIO(), width=80)
    console.print(smooth_view(result()))
    shown = console.file.getvalue()
    for words in ("some model", "budget 2.5", "0.250", "0, as it was", "2.62", "4.50 ± 0.10"):
        assert words in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_sentences_tell_cost_and_refusals():
    words = " ".join(smooth_facts(result()))
    assert "2.00 before, 2.50 after" in words
    assert "-0.00100 ± 0.00050 nats" in words
    assert "pass: 1.70 times the original (1.60 to 1.80, eager experts)" in words
    assert "; 1.20 times the original (1.10 to 1.30, tieline experts, eager before)." in words
    assert "router bf16 2.0 % before, 4.0 % after" in words
    assert "Not smoothed: a.2.gate: hashes." in words
