"""The audit as a whole: rows that agree with each other, predictions that hold, budgets kept."""

import json
from collections import Counter, defaultdict

import pytest

from tests.analysis.zoo import (
    FAMILIES,
    Letters,
    demo,
    family_audit,
    random_text,
    small_audit,
    some_perturbations,
)
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.audit import audit
from tieline.core.errors import ParameterError
from tieline.models.demo import demo_text
from tieline.run import plan as run_module
from tieline.run.condition import Perturbation
from tieline.run.runner import Runner


def test_every_perturbation_has_a_row_in_order_and_json_of_it():
    result = small_audit()
    assert [row.name for row in result.effects] == [row.name for row in some_perturbations()]
    assert result.tokens == 576
    assert result.sequences == 6
    assert result.left_out == ()
    text = json.dumps(result.to_dict(), allow_nan=False)
    assert json.loads(text)["effects"][0]["name"] == "router bf16"
    assert result.effect("router int4").level == "int4"


def test_gaussian_rows_are_predicted_within_5_percent_at_3000_flips():
    rows = [row for row in small_audit().effects if row.kind == "score noise"]
    assert len(rows) == 2
    for row in rows:
        assert row.local_flips >= 3000
        assert row.local.value == pytest.approx(row.predicted, rel=0.05)
        assert sum(layer.local_flips for layer in row.layers) == row.local_flips


def test_stronger_perturbations_do_more():
    result = small_audit()
    fine, coarse = result.effect("router bf16"), result.effect("router int4")
    for field in ("local", "full", "moved", "damage", "kl"):
        assert getattr(fine, field).value < getattr(coarse, field).value
    assert (
        result.effect("score noise 0.02").full.value < result.effect("score noise 0.1").full.value
    )
    assert fine.predicted < coarse.predicted


def test_the_whole_model_has_the_local_flips_of_its_routers_and_more_full_ones():
    result = small_audit()
    router, model = result.effect("router int4"), result.effect("model int4")
    assert model.local == router.local
    assert model.full.value > router.full.value
    assert model.kl.value > router.kl.value
    assert model.kl_floor.value > router.kl_floor.value
    assert 0 < model.by_flips < router.by_flips < 1
    assert model.compounding == pytest.approx(model.full.value / model.local.value)
    assert model.keep is None


def test_the_layers_to_keep_recover_what_is_promised():
    for name in ("router bf16", "router int4"):
        row = small_audit().effect(name)
        keep = row.keep
        damages = {layer.name: layer.damage.value for layer in row.layers}
        share = sum(damages[name] for name in keep.layers) / sum(damages.values())
        assert keep.recovered == pytest.approx(share)
        assert keep.recovered >= 0.9
        assert 0 < keep.recovered_kl <= 1
        assert keep.bytes == keep.bytes_all * len(keep.layers) // len(row.layers)


def test_the_noise_of_one_percent_flips_lies_between_the_layers():
    noise = small_audit().one_percent
    assert min(noise.layers.values()) < noise.model < max(noise.layers.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_the_whole_table(family):
    rows = [
        Perturbation("rounding", "bf16"),
        Perturbation("rounding", "int4_group"),
        Perturbation("score noise", 0.03),
        Perturbation("state noise", 0.05),
        Perturbation("rounding", "fp8_e5m2", "model"),
        Perturbation("state noise", 0.05, "model"),
    ]
    result = family_audit(family, rows)
    assert len(result.effects) == len(rows)
    for row in result.effects:
        numbers = (row.local, row.full, row.any_layer, row.moved, row.damage, row.kl, row.loss)
        assert all(x.value is not None and x.standard_error is not None for x in numbers), row.name
        assert row.predicted_low <= row.predicted
    noise = result.effect("score noise 0.03")
    assert noise.local_flips >= 3000
    if family == "deepseek_v3":  # groups: an interval
        assert 0.95 * noise.predicted_low < noise.local.value < 1.05 * noise.predicted
    else:
        assert noise.local.value == pytest.approx(noise.predicted, rel=0.05)


def test_experts_that_the_text_never_hits_are_named():
    model = lively(tiny_model("olmoe"))
    for router in (model.model.layers[0].mlp.gate,):
        router.weight[5] = 0
        router.weight[6] = -router.weight[:5].mean(dim=0) * 1e-6
    result = audit(
        (model, Letters()),
        text=random_text(8),
        tokens=8,
        sequence_length=8,
        perturbations=some_perturbations()[:1],
        remedies=[],
    )
    hits = {never.layer: never.experts for never in result.never_hit}
    assert hits
    assert all(never.n_experts == 8 and len(never.experts) < 8 for never in result.never_hit)


class Clock:
    """Time that passes only when it is asked for."""

    def __init__(self, step):
        self.now, self.step = 0.0, step

    def perf_counter(self):
        self.now += self.step
        return self.now


def test_when_time_is_up_it_says_what_was_left_out(monkeypatch):
    monkeypatch.setattr(run_module, "time", Clock(10.0))
    model, rows = lively(tiny_model("olmoe")), some_perturbations()[:3]
    result = audit(
        (model, Letters()),
        text=random_text(200),
        tokens=200,
        sequence_length=20,
        batch_size=2,
        perturbations=rows,
        budget_minutes=2.0,
    )
    assert 40 <= result.tokens < 200
    assert f"{200 - result.tokens} of 200 tokens" in result.left_out
    assert result.provenance["tokens"] == result.tokens
    assert len(result.effects) == 3
    monkeypatch.setattr(run_module, "time", Clock(30.0))
    result = audit(
        (model, Letters()),
        text=random_text(40),
        tokens=40,
        sequence_length=20,
        batch_size=2,
        perturbations=rows,
        budget_minutes=1.0,
    )
    assert [row.name for row in result.effects] == ["router bf16"]
    assert "perturbations router int4, score noise 0.02" in result.left_out


def test_the_same_seed_gives_the_same_audit_and_the_model_is_left_as_it_was():
    model, rows = lively(tiny_model("olmoe")), some_perturbations()[2:4]
    before = model(input_ids=batch()).logits

    def run(seed):
        options = {"tokens": 60, "sequence_length": 20, "perturbations": rows, "seed": seed}
        return audit((model, Letters()), text=random_text(60), **options).effects

    assert run(1) == run(1) != run(2)
    assert (model(input_ids=batch()).logits == before).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"recover": 0.0}, "recover"),
        ({"budget_minutes": -1.0}, "budget_minutes"),
        ({"tokens": 0}, "tokens must be at least 1, got 0"),
    ],
)
def test_bad_arguments_are_refused_before_any_run(options, message):
    loaded = demo()
    with pytest.raises(ParameterError, match=message):
        audit((loaded.module, loaded.tokenizer), text=demo_text(), **options)


def test_the_default_plan_has_at_most_40_passes_of_the_text_and_28_texts_of_tokens(monkeypatch):
    plans, run = [], Runner.run

    def noting(runner, plan, *arguments, **options):
        plans.append(plan)
        return run(runner, plan, *arguments, **options)

    monkeypatch.setattr(Runner, "run", noting)
    model, text = lively(tiny_model("olmoe")), random_text(4 * 48)
    options = {"sequence_length": 16, "batch_size": 3}
    result = audit((model, Letters()), text=text, tokens=4 * 48, **options)
    phases = [phase for plan in plans for phase in plan.phases if phase.name != "calibration"]
    passes = [model_pass for phase in phases for model_pass in phase.passes]
    tokens = sum(
        phase.batches[model_pass.batch].numel() for phase in phases for model_pass in phase.passes
    )
    assert result.tokens == 4 * 48
    assert {phase.name for phase in phases} >= {"audit", "remedies"}
    assert max(Counter(model_pass.batch for model_pass in passes).values()) <= 40
    assert tokens <= 28 * result.tokens
    assert result.remedies.half_tokens == result.tokens / 2
    (phase,) = [phase for phase in phases if phase.name == "remedies"]
    batches = defaultdict(set)
    for model_pass in phase.passes:
        batches[model_pass.condition].add(model_pass.batch)
    for condition, numbers in batches.items():
        is_half = condition.draw > 0
        assert numbers == {n for n in phase.batches if n % 2 == 0 or not is_half}
