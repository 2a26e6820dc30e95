"""Remedies compared: what each one leaves must agree with what the audit already reports."""

import json
from functools import cache

import pytest
import torch

from tests.analysis.zoo import Letters, random_text
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis import remedies
from tieline.analysis.audit import audit
from tieline.analysis.audit_records import PrecisionAudit
from tieline.analysis.remedies import perturbations_to_repair
from tieline.core.errors import ParameterError, UnsupportedModelError
from tieline.models import find_routers, smooth_
from tieline.models.experts import KERNEL
from tieline.models.smoothed_router import router_smoothing
from tieline.run.condition import Perturbation
from tieline.run.forward import forward

ROUTER, MODEL = Perturbation("rounding", "int4"), Perturbation("rounding", "int4", "model")
NOISE = Perturbation("score noise", 0.2)
RUN = (ROUTER, MODEL, NOISE)


@cache
def strong():
    """A model whose experts matter to its output."""
    model = lively(tiny_model("olmoe"))
    for name, weight in model.named_parameters():
        if "experts" in name:
            weight.data.mul_(20)
    return model


def run(model, **options):
    sizes = {"text": random_text(120), "tokens": 120, "sequence_length": 20, "batch_size": 3}
    return audit((model, Letters()), perturbations=RUN, recover=0.5, **sizes, **options)


@pytest.fixture(scope="module")
def result():
    before = forward(strong(), batch()).logits
    audited = run(strong(), remedies=["all"])
    assert torch.equal(forward(strong(), batch()).logits, before)
    return audited


def effects(result, remedy):
    (remedy_row,) = [row for row in result.remedies.remedies if row.name == remedy]
    return {row.perturbation: row for row in remedy_row.effects}


def test_doing_nothing_leaves_the_kl_of_the_audit(result):
    nothing_effects = effects(result, "nothing")
    assert list(nothing_effects) == [perturbation.name for perturbation in RUN]
    for row in result.effects:
        assert nothing_effects[row.name].to_original == row.kl
        assert nothing_effects[row.name].two_runs.value > 0


def test_float32_routers_leave_nothing_of_rounded_routers_and_the_rest_of_a_rounded_model(result):
    float32_effects = effects(result, "float32 routers")
    assert list(float32_effects) == [ROUTER.name, MODEL.name]
    assert (
        float32_effects[ROUTER.name].to_original.value
        == float32_effects[ROUTER.name].two_runs.value
        == 0
    )
    assert float32_effects[MODEL.name].to_original.value > 0
    assert float32_effects[ROUTER.name].bytes == result.effect(ROUTER.name).keep.bytes_all
    listed, keep = effects(result, "float32 routers, listed"), result.effect(ROUTER.name).keep
    assert 0 < len(keep.layers) < len(result.layers)
    assert listed[ROUTER.name].to_original.value == pytest.approx(keep.kl.value, rel=1e-9)
    assert listed[ROUTER.name].bytes == keep.bytes
    assert MODEL.name not in listed


def test_replay_follows_the_run_whose_routes_it_has(result):
    ids, both = effects(result, "replay of experts"), effects(result, "replay, weights too")
    nothing = effects(result, "nothing")
    for name in (ROUTER.name, NOISE.name):  # only the choice is perturbed
        assert both[name].to_original.value == pytest.approx(0, abs=1e-12)
        assert both[name].two_runs.value == pytest.approx(0, abs=1e-12)
        assert 0 < ids[name].to_original.value < nothing[name].to_original.value
    assert both[MODEL.name].to_original.value < nothing[MODEL.name].to_original.value


def test_smoothing_moves_the_model_by_more_the_wider_it_is(result):
    forms = [remedy for remedy in result.remedies.remedies if remedy.kind == "smooth"]
    assert [remedy.name for remedy in forms] == [f"smoothed, ε = {c} σ" for c in (4, 16, 64)]
    moved = [remedy.moved.value for remedy in forms]
    assert 0 < moved[0] < moved[1] < moved[2]
    k = 2
    assert k < forms[0].experts < forms[1].experts < forms[2].experts
    (ramp,) = [remedy for remedy in result.remedies.remedies if remedy.kind == "ramp"]
    assert ramp.experts == forms[1].experts
    assert {*ramp.epsilons} == {*forms[0].epsilons} == {*result.layers}
    wide = forms[2].effect(NOISE.name)
    assert wide.two_runs.value < effects(result, "nothing")[NOISE.name].two_runs.value
    assert wide.to_original.value > moved[2] / 2


def test_others_do_not_move_it_and_name_their_price(result):
    for remedy in result.remedies.remedies:
        if remedy.kind in ("nothing", "float32", "replay"):
            assert remedy.moved.value == 0
        assert remedy.time is None if remedy.kind == "float32" else remedy.time > 0
    sizes = [
        remedy.bytes_per_token for remedy in result.remedies.remedies if remedy.kind == "replay"
    ]
    layers = len(result.layers)
    assert sizes == [2 * layers, 2 * layers * 5]  # ids of one byte, weights of four


@pytest.mark.parametrize("refuses", [False, True])
def test_time_is_of_the_original_as_it_runs_and_of_smoothed_forms_by_the_kernel(
    monkeypatch, refuses
):
    model, timed = strong(), []

    def noted(module, ids, **options):
        name = module.config._experts_implementation
        if refuses and name == KERNEL:
            raise UnsupportedModelError("another layout")
        routers = find_routers(module).values()
        timed.append((name, any(router_smoothing(router) for router in routers)))
        return forward(module, ids, **options)

    before = model.config._experts_implementation
    monkeypatch.setattr(remedies, "forward", noted)
    table = run(model, remedies=[ROUTER.name]).remedies
    assert model.config._experts_implementation == before != KERNEL
    assert {name for name, smoothed in timed if smoothed} == {before if refuses else KERNEL}
    plain = [name for name, smoothed in timed if not smoothed]
    assert plain.count(KERNEL) == (0 if refuses else 1)  # the trial of the kernel
    assert all(
        remedy.time is not None for remedy in table.remedies if remedy.kind in ("smooth", "ramp")
    )


def test_the_table_is_part_of_the_json(result):
    again = PrecisionAudit.from_dict(json.loads(result.to_json()))
    assert again.remedies == result.remedies


def test_the_usual_perturbations_or_those_named():
    usual = [Perturbation("rounding", "bf16", "model"), ROUTER, NOISE]
    assert perturbations_to_repair(usual, None) == usual[:1]
    assert perturbations_to_repair(RUN, None) == [ROUTER, MODEL]
    assert perturbations_to_repair(RUN, ["all"]) == list(RUN)
    assert perturbations_to_repair(RUN, []) == []
    assert perturbations_to_repair(RUN, [NOISE.name]) == [NOISE]
    with pytest.raises(ParameterError, match="router bf16 is none of router int4"):
        perturbations_to_repair(RUN, ["router bf16"])


def test_what_a_model_does_not_allow_is_named():
    model = lively(tiny_model("olmoe"))
    smooth_(model, epsilon=0.1)
    table = run(model, remedies=[ROUTER.name]).remedies
    assert any("smoothed already" in reason for reason in table.impossible)
    assert {remedy.kind for remedy in table.remedies} <= {"nothing", "float32", "replay"}


def test_without_time_or_wish_there_are_no_remedies():
    assert run(strong(), remedies=[]).remedies is None
    late = run(strong(), remedies=[ROUTER.name], budget_minutes=1e-6)
    assert late.remedies is None
    assert "remedies" in late.left_out
