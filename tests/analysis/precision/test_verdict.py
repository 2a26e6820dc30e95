"""Plain words that follow from the numbers."""

from dataclasses import replace

from tests.analysis.zoo import small_audit
from tieline.analysis.precision import harmless, verdict
from tieline.core.statistics import Estimate


def row(name, kl, loss=0.0):
    return replace(small_audit().effect(name), kl=Estimate(kl, 0.0), loss=Estimate(loss, 0.0))


def test_formats_are_sorted_into_those_borne_and_those_not():
    words = verdict([row("router bf16", 1e-5), row("router int4", 0.5, 0.25)])
    assert "tolerate bf16 (under 0.001 nats" in words
    assert "do not tolerate int4" in words
    assert "+0.25 nats of loss" in words
    assert "whole model" not in words
    assert words.endswith("What to do: store the routers in bf16, or keep them in float32.")


def test_a_loss_that_rises_is_harm_even_at_a_small_kl():
    assert harmless(row("router bf16", 1e-5))
    assert not harmless(row("router bf16", 1e-5, 0.01))
    assert not harmless(row("router bf16", 0.01, -0.01))
    words = verdict([row("router bf16", 0.01)])
    assert "No format is harmless" in words
    assert words.endswith("What to do: keep the routers in float32.")
    assert verdict([row("router bf16", 1e-5)]).endswith("in any of these formats.")


def test_the_whole_model_is_told_with_its_compounding():
    words = verdict([row("router bf16", 1e-5), row("model int4", 0.1)])
    assert "With the whole model in int4" in words
    assert "times what each router does by itself" in words
    assert "No rounding" in verdict([row("score noise 0.02", 0.1)])
