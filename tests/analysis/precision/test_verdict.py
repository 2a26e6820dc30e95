"""Plain words that follow from the numbers."""

from dataclasses import replace

from tests.analysis.zoo import small_audit
from tieline.analysis.precision import tolerated, verdict
from tieline.core.statistics import Estimate

GROUPS = 8
"""Sequences of the errors."""


def row(name, kl, loss=0.0, error=0.0):
    found = {"kl": Estimate(kl, error), "loss": Estimate(loss, 0.0)}
    return replace(small_audit().effect(name), **found)


def told(row, sequences=GROUPS):
    return tolerated(row.kl, row.loss, sequences)


def test_formats_are_sorted_into_those_borne_and_those_not():
    words = verdict([row("router bf16", 1e-5), row("router int4", 0.5, 0.25)], GROUPS)
    assert "tolerate bf16 (under 0.001 nats" in words
    assert "do not tolerate int4" in words
    assert "+0.25 nats of loss" in words
    assert "whole model" not in words
    assert words.endswith("What to do: store the routers in bf16, or keep them in float32.")


def test_a_loss_that_rises_is_harm_even_at_a_small_kl():
    assert told(row("router bf16", 1e-5)) == "yes"
    assert told(row("router bf16", 1e-5, 0.01)) == "no"
    assert told(row("router bf16", 0.01, -0.01)) == "no"
    words = verdict([row("router bf16", 0.01)], GROUPS)
    assert "No format is shown to cost the routers less than 0.001 nats" in words
    assert words.endswith("What to do: keep the routers in float32.")
    assert verdict([row("router bf16", 1e-5)], GROUPS).endswith("in any of these formats.")


def test_the_whole_model_is_told_with_its_compounding():
    words = verdict([row("router bf16", 1e-5), row("model int4", 0.1)], GROUPS)
    assert "With the whole model in int4" in words
    assert "times what each router does by itself" in words
    assert "No rounding" in verdict([row("score noise 0.02", 0.1)], GROUPS)


def test_a_cost_whose_interval_holds_the_limit_is_not_told():
    near = row("router bf16", 8e-4, error=2e-4)
    assert told(near) == "unclear"
    assert told(row("router bf16", 8e-4, error=1e-5)) == "yes"
    assert told(row("router bf16", 2e-3, error=1e-4)) == "no"
    assert told(row("router bf16", 1e-9, error=None), 1) == "unclear"  # one sequence tells nothing
    words = verdict([near, row("router int4", 0.5)], GROUPS)
    assert "Too few tokens to tell about bf16: bf16 costs a KL of 0.00080 nats (95 %" in words
    assert words.endswith(
        "keep the routers in float32. Run more tokens (--tokens, --text) to tell about bf16."
    )
