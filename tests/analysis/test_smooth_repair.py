"""The table of what smoothing repairs, against runs by hand."""

import copy

import pytest
import torch

from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.smooth_repair import (
    REPAIR_PERTURBATIONS,
    ModelForm,
    measure_repair,
    repair_phase,
    repair_table,
    smoothing_latency,
)
from tieline.core.errors import ShapeError, TielineError
from tieline.core.predictions import kl_divergence, next_token_losses
from tieline.core.records import to_plain
from tieline.models import find_routers, smooth_
from tieline.models.emulate import emulate
from tieline.models.model import Model
from tieline.models.smoothed_model import recorded_smoothing
from tieline.run.condition import Perturbation
from tieline.run.ranks import Ranks
from tieline.run.runner import Runner

IDS = batch(4, 24)
COARSE = Perturbation("rounding", "fp8_e5m2")


@pytest.fixture(scope="module")
def pair():
    model = lively(tiny_model("olmoe"))
    for name, weight in model.named_parameters():
        if "experts" in name:
            weight.mul_(20)
    smoothed = copy.deepcopy(model)
    smooth_(smoothed, epsilon=0.3)
    return model, smoothed


@pytest.fixture(scope="module")
def table(pair):
    return repair_table(*pair, list(IDS), perturbations=[COARSE], batch_size=3)


def logits(model, rounded=False):
    with torch.inference_mode():
        if not rounded:
            return model(input_ids=IDS).logits
        with emulate(model, "fp8_e5m2", "router"):
            return model(input_ids=IDS).logits


def test_divergences_and_losses_are_those_of_runs_by_hand(pair, table):
    (before, after), row = [(logits(m), logits(m, True)) for m in pair], table.rows[0]
    assert row.before.value == pytest.approx(kl_divergence(*before).mean().item(), rel=1e-3)
    assert row.after.value == pytest.approx(kl_divergence(*after).mean().item(), rel=1e-3)
    moved = kl_divergence(before[0], after[0]).mean().item()
    assert table.moved.value == pytest.approx(moved, rel=1e-3)
    change = (next_token_losses(after[0], IDS) - next_token_losses(before[0], IDS)).mean().item()
    assert table.loss_change.value == pytest.approx(change, rel=1e-3)
    to_original = kl_divergence(before[0], after[1]).mean().item()
    assert row.after_to_original.value == pytest.approx(to_original, rel=1e-3)
    assert row.factor.value == pytest.approx(row.before.value / row.after.value)
    gained = (row.before.value - to_original) / (row.before.value - row.before_floor.value)
    assert row.gain.value == pytest.approx(gained, rel=1e-3)
    assert table.tokens == IDS.numel()
    assert table.sequences == 4


def test_flips_are_cheaper_after_and_the_floor_is_below(table):
    row = table.row("router fp8_e5m2")
    assert row.factor.value > 2
    assert row.before_floor.value < row.before.value
    assert 0 < row.flips_before.value <= 1


def test_experts_are_counted_by_their_weights(pair, table):
    model, _ = pair
    assert table.experts_before.value == 2
    assert 2 < table.experts_after.value < 4
    assert list(table.experts_by_layer) == list(find_routers(model))
    mean = sum(table.experts_by_layer.values()) / len(table.experts_by_layer)
    assert table.experts_after.value == pytest.approx(mean)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["jetmoe", "llama4", "deepseek_v3", "gpt_oss"])
def test_other_layouts_are_read_too(family):
    model = lively(tiny_model(family))
    smoothed = copy.deepcopy(model)
    smooth_(smoothed, epsilon=0.3)
    table = repair_table(model, smoothed, list(IDS[:2]), perturbations=[COARSE])
    assert 2 < table.experts_after.value <= 4
    same = repair_table(model, model, list(IDS[:2]), perturbations=[COARSE])
    assert same.moved.value == same.loss_change.value == 0
    assert same.rows[0].before == same.rows[0].after


def test_the_published_precisions_are_bf16_and_int8(pair):
    assert [perturbation.name for perturbation in REPAIR_PERTURBATIONS] == [
        "router bf16",
        "model bf16",
        "model int8",
    ]
    progress_calls = []
    table = repair_table(
        *pair, list(IDS), progress=lambda *arguments: progress_calls.append(arguments)
    )
    assert [row.name for row in table.rows] == ["router bf16", "model bf16", "model int8"]
    assert progress_calls[-1][1] == progress_calls[-1][2] == len(progress_calls)
    assert to_plain(table)["rows"][0]["name"] == "router bf16"


def test_time_is_told_as_a_ratio(pair):
    latency = smoothing_latency(*pair, IDS, rounds=3, warmup=0)
    assert 0 < latency.low <= latency.ratio <= latency.high
    assert (latency.rounds, latency.tokens) == (3, IDS.numel())
    assert latency.original == latency.implementation == "grouped_mm"


def test_bad_arguments_are_refused(pair):
    with pytest.raises(ShapeError, match="two tokens"):
        repair_table(*pair, [torch.tensor([1])])
    with pytest.raises(TielineError, match="batch_size"):
        repair_table(*pair, list(IDS), batch_size=0)
    with pytest.raises(TielineError, match="two rounds"):
        smoothing_latency(*pair, IDS, rounds=1)


def test_the_plan_counts_passes_and_tokens(pair):
    batches = dict(enumerate([IDS] * 4))
    phase = repair_phase(batches, [ModelForm(model=1)], [COARSE, REPAIR_PERTURBATIONS[0]])
    forced = [run for run in phase.passes if run.condition.choice == "forced"]
    assert [run.batch for run in forced if run.model == 0] == 2 * [0, 1, 2, 3]
    assert [run.batch for run in forced if run.model == 1] == 2 * [0, 2]
    # clean and two perturbations of both, forced of the original, forced of every other batch
    assert len(phase.passes) == 4 * (2 * 3 + 2) + 2 * 2
    assert sum(phase.batches[run.batch].numel() for run in phase.passes) == 36 * IDS.numel()


def test_the_floor_of_the_form_is_that_of_every_other_batch(pair):
    every = repair_table(*pair, list(IDS), perturbations=[COARSE], batch_size=2).rows[0]
    first = repair_table(*pair, list(IDS[:2]), perturbations=[COARSE], batch_size=2).rows[0]
    assert every.after_floor.value == pytest.approx(first.after_floor.value, rel=1e-9)
    assert every.before_floor.value != pytest.approx(first.before_floor.value, rel=1e-3)


def test_experts_skip_unused_slots_in_free_and_forced_passes(pair):
    model, smoothed = pair
    record, experts = recorded_smoothing(smoothed), model.model.layers[0].mlp.experts
    calls = []
    hook = experts.register_forward_pre_hook(lambda module, args: calls.append(args[1:]))
    runner = Runner(Model(model), ranks=Ranks.share_batches(None, [IDS, IDS]))
    measure_repair(runner, [ModelForm(record)], [COARSE])
    hook.remove()
    wide = [
        (ids, weights) for ids, weights in calls if ids.shape[1] > model.config.num_experts_per_tok
    ]
    assert len(wide) == 2 + 3  # clean and free passes of both batches, a forced one of every other
    for ids, weights in wide:
        assert torch.equal(ids == experts.num_experts, weights == 0)
        assert bool((weights == 0).any())
