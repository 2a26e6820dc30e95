"""The time of a job: the work of its plan, a measured pass, and one line about it."""

import itertools

import pytest

from tests.models.tiny import batch, tiny_model
from tieline.models.model import Model
from tieline.run import plan as plan_module
from tieline.run.condition import CLEAN, Condition, Perturbation
from tieline.run.plan import (
    IN_ALL,
    Pass,
    Phase,
    Plan,
    announce_total,
    pass_cost,
    plan_work,
    seconds_per_token,
)

ROUTER = Condition(Perturbation("rounding", "bf16"))
MODEL = Condition(Perturbation("rounding", "bf16", "model"))


def test_a_pass_costs_more_the_more_is_done_to_it():
    costs = [pass_cost(CLEAN, is_compared=False), pass_cost(CLEAN), pass_cost(ROUTER)]
    costs.append(pass_cost(MODEL))
    assert costs[0] == 1.0
    assert costs == sorted(costs)


def test_the_work_of_a_plan_counts_the_tokens_of_every_pass():
    batches = {0: batch(2, 8), 1: batch(1, 5)}
    clean = [Pass(number) for number in batches]
    rounded = [Pass(0, MODEL, clean[0])]
    plan = Plan((Phase("audit", batches, (*clean, *rounded)),))
    assert plan_work(plan) == pytest.approx(16 + 5 + 16 * pass_cost(MODEL))


def progress_calls(monkeypatch, work, seconds):
    """Progress calls of a job whose passes take `seconds` each."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(plan_module.time, "perf_counter", lambda: next(clock))
    calls = []
    model = Model(tiny_model("olmoe"))
    announce_total(model, [batch(2, 8)], work, lambda *call: calls.append(call), beside=1.0)
    return calls


def test_a_long_job_is_announced_by_a_measured_pass(monkeypatch):
    assert progress_calls(monkeypatch, work=16 * 30.0, seconds=0.5) == [(IN_ALL, 0, 16)]


def test_a_short_job_is_not_announced(monkeypatch):
    assert progress_calls(monkeypatch, work=16 * 10.0, seconds=0.5) == []


def test_nothing_is_run_without_a_progress():
    calls, model = [], tiny_model("olmoe")
    model.register_forward_hook(lambda *_: calls.append(1))
    announce_total(Model(model), [batch(2, 8)], 1e9, None)
    assert calls == []


def test_few_tokens_are_measured_in_the_second_of_two_passes(monkeypatch):
    shapes, model = [], tiny_model("olmoe")
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    monkeypatch.setattr(plan_module, "PROBE_TOKENS", 16)
    assert seconds_per_token(Model(model), batch(9, 8)) > 0
    assert shapes == [(2, 8), (2, 8)]
