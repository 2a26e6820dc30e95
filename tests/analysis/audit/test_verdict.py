"""Which formats are tolerated follows from KL and loss with their intervals."""

from dataclasses import replace

from tests.analysis.zoo import small_audit
from tieline.analysis.audit import judge_precisions, tolerated
from tieline.core.statistics import Estimate

GROUPS = 8
"""Sequences of the errors."""


def row(name, kl, loss=0.0, error=0.0):
    changes = {"kl": Estimate(kl, error), "loss": Estimate(loss, 0.0)}
    return replace(small_audit().effect(name), **changes)


def tolerance(row, sequences=GROUPS):
    return tolerated(row.kl, row.loss, sequences)


def test_formats_are_sorted_into_those_tolerated_and_those_not():
    judgement = judge_precisions([row("router bf16", 1e-5), row("router int4", 0.5, 0.25)], GROUPS)
    assert judgement.kind == "some"
    assert (judgement.tolerated, judgement.smallest) == (("router bf16",), "router bf16")
    assert (judgement.refused, judgement.worst) == (("router int4",), "router int4")
    assert judgement.whole_model is None
    assert judgement.limit == 0.001


def test_a_loss_that_rises_is_harm_even_at_a_small_kl():
    assert tolerance(row("router bf16", 1e-5)) == "yes"
    assert tolerance(row("router bf16", 1e-5, 0.01)) == "no"
    assert tolerance(row("router bf16", 0.01, -0.01)) == "no"
    assert judge_precisions([row("router bf16", 0.01)], GROUPS).kind == "none"
    assert judge_precisions([row("router bf16", 1e-5)], GROUPS).kind == "all"


def test_the_whole_model_stands_for_all_its_formats():
    judgement = judge_precisions([row("router bf16", 1e-5), row("model int4", 0.1)], GROUPS)
    assert judgement.whole_model == "model int4"
    assert judge_precisions([row("score noise 0.02", 0.1)], GROUPS).kind == "not run"


def test_a_cost_whose_interval_holds_the_limit_is_unclear():
    near = row("router bf16", 8e-4, error=2e-4)
    assert tolerance(near) == "unclear"
    assert tolerance(row("router bf16", 8e-4, error=1e-5)) == "yes"
    assert tolerance(row("router bf16", 2e-3, error=1e-4)) == "no"
    assert tolerance(row("router bf16", 1e-9, error=None), 1) == "unclear"  # a single sequence
    judgement = judge_precisions([near, row("router int4", 0.5)], GROUPS)
    assert (judgement.kind, judgement.unclear, judgement.tolerated) == (
        "none",
        ("router bf16",),
        (),
    )
