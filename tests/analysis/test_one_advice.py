"""One model gets one number and one advice from inspect, audit, smooth and diff."""

import copy
from functools import cache

import pytest
import torch

import tieline
from tests.analysis.zoo import Letters, random_text
from tests.models.tiny import lively, tiny_model
from tests.tiers import tiers
from tieline import report
from tieline.core.errors import UnsupportedModelError
from tieline.models import find_routers
from tieline.models.model import Model
from tieline.models.smoothed_model import smooth_

FAMILIES = ("mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v3", "granitemoe")
RUN = {"text": random_text(160), "sequence_length": 40, "batch_size": 2}
CHOOSING = (*FAMILIES, "demo", "smoothed", "saturated", "sharp", "confident", "brittle")
ONE_EXPERT = {"num_experts": 1, "num_local_experts": 1, "num_experts_per_tok": 1}
NAMES = (*CHOOSING, "equal scores", "one equal layer", "all chosen", "one expert")
SLOW = ("qwen3_moe", "granitemoe")
"""Score as Mixtral and OLMoE do; "sharp" is a Qwen3-MoE."""


def usual(names):
    return tiers(names, always=[name for name in names if name not in SLOW])


def changed(family, factor, layers=(0, 1), **options):
    model = lively(tiny_model(family, **options))
    for number, router in enumerate(find_routers(model).values()):
        if number in layers:
            router.weight.mul_(factor)
    return model


def confident(family, factor):
    """A model whose predictions are sharp, so that a precision costs it more than is harmless."""
    model = lively(tiny_model(family))
    model.get_output_embeddings().weight.data.mul_(factor)
    return model


@cache
def source(name):
    """A small model and its tokenizer."""
    if name == "demo":
        loaded = Model.open("demo", dtype="fp32")
        return loaded.module, loaded.tokenizer
    if name == "smoothed":
        model = lively(tiny_model("olmoe"))
        smooth_(model, epsilon=0.02)
        return model, Letters()
    special = {
        "equal scores": lambda: changed("olmoe", 0.0),
        "one equal layer": lambda: changed("mixtral", 0.0, layers=(1,)),
        "all chosen": lambda: changed("olmoe", 1.0, num_experts_per_tok=8),
        "one expert": lambda: changed("mixtral", 1.0, **ONE_EXPERT),
        "saturated": lambda: changed("mixtral", 400.0),
        "sharp": lambda: changed("qwen3_moe", 8.0),
        "confident": lambda: confident("olmoe", 400.0),
        "brittle": lambda: confident("gpt_oss", 100.0),
    }
    return special.get(name, lambda: lively(tiny_model(name)))(), Letters()


@cache
def inspected(name):
    return tieline.inspect(source(name), jumps=False, **RUN)


@cache
def audited(name):
    return tieline.audit(source(name), flips=50, remedies=[], **RUN)


@cache
def compared(name):
    return tieline.diff(source(name), source(name), dtype_b="bf16-emulated", **RUN)


def repaired(name):
    size = {"tokens": 120, "calibration": 80, "batch_size": 2}
    return tieline.smooth(source(name), text=random_text(280), rounds=2, **size)


def recommendations(name):
    """Recommendations of inspect, audit and diff for the same tokens."""
    judged = [inspected(name).judgement, audited(name).judgement]
    advised = [*(judgement.recommendation for judgement in judged), compared(name).recommendation]
    return advised if name != "smoothed" else advised[:2]  # diff compares its top-k experts


@pytest.mark.parametrize("name", usual(NAMES))
def test_no_command_contradicts_another(name):
    advised = recommendations(name)
    assert None not in advised
    assert len({advice.action for advice in advised if advice.is_sure}) <= 1
    assert advised[0] == advised[1]


@pytest.mark.parametrize(
    ("name", "action"), [("confident", "finer precision"), ("brittle", "repair routing")]
)
def test_harm_is_put_down_to_its_cause_or_to_none(name, action):
    judged = [inspected(name).judgement, audited(name).judgement]
    assert [judgement.recommendation.action for judgement in judged] == [action] * 2
    assert compared(name).recommendation.action == "unknown cause"
    assert "tieline audit --serve bf16" in compared(name).verdict
    split = tieline.diff(source(name), source(name), dtype_b="bf16-emulated", replay=True, **RUN)
    assert split.recommendation.action == action


@pytest.mark.parametrize("name", usual(NAMES))
def test_the_same_tokens_give_the_same_numbers(name):
    results = [inspected(name), audited(name), compared(name)]
    changed_shares = {result.serving.changed.value for result in results if result.serving}
    assert len(changed_shares) == 1
    assert (compared(name).serving is None) == (name == "smoothed")
    key = "changed@model bf16"
    assert inspected(name).metrics[key] == audited(name).metrics[key]
    assert inspected(name).serving.kl == audited(name).serving.kl


@pytest.mark.parametrize("name", usual([name for name in CHOOSING if name != "smoothed"]))
def test_smoothing_advises_as_the_others_do(name):
    advised = [*recommendations(name), repaired(name).recommendation]
    assert len({advice.action for advice in advised if advice.is_sure}) <= 1


@pytest.mark.parametrize(
    ("name", "layers"),
    [("equal scores", "layer 0, layer 1"), ("one equal layer", "layer 1")],
)
def test_routers_with_equal_scores_are_named_and_not_smoothed(name, layers):
    sentence = f"All scores are equal in {layers}: an untrained or broken router."
    for result in (inspected(name), audited(name), compared(name)):
        assert sentence in result.verdict
    with pytest.raises(UnsupportedModelError, match=r"all scores are equal in layer .* broken"):
        repaired(name)
    with pytest.raises(UnsupportedModelError, match="all scores are equal"):
        tieline.smooth(source(name), text=random_text(280), tokens=120, calibration=80, epsilon=0.1)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("equal scores", "All scores of a layer are equal: an untrained or broken router."),
        ("all chosen", "All experts are chosen: no tie is possible."),
    ],
)
def test_routers_that_do_not_choose_are_named_where_no_precision_is_compared(name, sentence):
    model, tokenizer = source(name)
    half = copy.deepcopy(model).to(torch.bfloat16)
    result = tieline.diff((half, tokenizer), (half, tokenizer), **RUN)
    assert result.serving is None
    assert sentence in result.verdict
    assert "What to do: nothing." not in result.verdict


@pytest.mark.parametrize("name", ["all chosen", "one expert"])
def test_where_all_experts_are_chosen_no_tie_is_possible(name):
    sentence = "All experts are chosen: no tie is possible."
    for result in (inspected(name), audited(name), compared(name)):
        assert sentence in result.verdict
        assert result.to_html()
    with pytest.raises(UnsupportedModelError, match="all experts are chosen: no tie is possible"):
        repaired(name)


@pytest.mark.parametrize("name", ["equal scores", "all chosen", "one expert", "saturated"])
def test_the_routes_of_such_routers_are_sound(name):
    trace = inspected(name).trace
    assert tieline.check(trace, model=source(name)).sound


def test_a_saturated_softmax_ties_exactly():
    """Experts of probability zero tie, and which of them is chosen is an accident."""
    result = inspected("saturated")
    assert result.metrics["ties"] > 0.5
    assert any(x.kind == "ties" and x.severity == "warning" for x in result.findings)


@pytest.mark.parametrize("run", [inspected, audited, compared, repaired])
def test_a_saturated_softmax_is_called_fragile_whatever_the_advice(run):
    saturated, usual = run("saturated"), run("olmoe")
    assert saturated.serving.exact_ties > 0.5
    sentence = "The choice itself is fragile: scores tie exactly for up to"
    assert sentence in report.summary(saturated)
    assert "fragile" not in report.summary(usual)
