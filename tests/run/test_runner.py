"""A plan is run in the right order, and observers see what the model does."""

import gc
import weakref

import pytest
import torch

from tests.models.model_stream.test_passes import saved
from tests.models.tiny import batch, lively, tiny_model
from tieline.core.errors import ParameterError
from tieline.core.predictions import kl_divergence
from tieline.core.statistics import SequenceSums
from tieline.models.capture import capture
from tieline.models.emulate import emulate
from tieline.models.model import Model
from tieline.models.replay import replay
from tieline.run import schedule
from tieline.run.condition import CLEAN, Condition, Perturbation, applied
from tieline.run.forward import forward, only_running
from tieline.run.observers import Observer, observing
from tieline.run.plan import Budget, Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.runner import Runner
from tieline.run.streamed_passes import require_room_for_hidden_states

INT4 = Condition(Perturbation("rounding", "int4"), seed=(0, 0))
NOISE = Condition(Perturbation("score noise", 0.1), seed=(0, 1))
CONDITIONS = (INT4, INT4.taking("forced"), INT4.taking("live"), NOISE, NOISE.again())


class Divergence(Observer):
    """The example of the runner's docstring, by condition."""

    def __init__(self):
        self.kl, self.order, self.routers = {}, [], []

    def watches(self, run):
        return run.condition == CLEAN

    def on_router(self, run, site, call, output):
        self.routers.append((run.batch, site.name))

    def on_pass_done(self, run, outcome):
        self.order.append((run.batch, run.condition))
        if run.reference is not None:
            sums = self.kl.setdefault(run.condition, SequenceSums())
            sums.add(outcome.divergence(run.reference))


def plan_of(batches):
    passes = [Pass(n) for n in batches]
    passes += [Pass(n, condition, Pass(n)) for condition in CONDITIONS for n in batches]
    return Plan((Phase("test", batches, tuple(passes)),))


def means(observer):
    return {condition: sums.mean() for condition, sums in observer.kl.items()}


@pytest.fixture(scope="module")
def opened():
    return Model(lively(tiny_model("olmoe")))


@pytest.fixture(scope="module")
def batches():
    return dict(enumerate([batch(2, 12), batch(3, 10), batch(1, 8)]))


def run(model, batches, **options):
    observer = Divergence()
    Runner(model, **options).run(plan_of(batches), [observer])
    return observer


def test_divergences_are_those_of_runs_by_hand(opened, batches):
    result, model = run(opened, batches), opened.module
    for n, ids in batches.items():
        with only_running(model):
            clean = forward(model, ids).logits
            with emulate(model, "int4", "router"):
                rounded = forward(model, ids).logits
            with applied(model, NOISE, NOISE.generator(n)):
                noisy = forward(model, ids).logits
        for condition, logits in ((INT4, rounded), (NOISE, noisy)):
            sums = kl_divergence(clean, logits).double().sum(dim=1)
            assert torch.equal(result.kl[condition].sums[n], sums)
    assert not torch.equal(result.kl[NOISE].sums[0], result.kl[NOISE.again()].sums[0])
    assert result.kl[INT4.taking("forced")].mean().value < result.kl[INT4].mean().value


def test_windows_do_not_change_numbers(opened, batches, monkeypatch):
    wide = run(opened, batches)
    monkeypatch.setattr(schedule, "WINDOW", 1)
    narrow = run(opened, batches)
    assert means(wide) == means(narrow)
    assert [n for n, _ in narrow.order] == sorted(n for n, _ in narrow.order)
    assert wide.order[:3] == [(n, CLEAN) for n in batches]
    assert narrow.routers == wide.routers


def test_a_replay_of_the_reference_is_that_of_its_trace(opened, batches):
    result, model = run(opened, batches), opened.module

    for n, ids in batches.items():
        with only_running(model):
            with capture(model, epsilons=(), distances=False) as recorder:
                clean = forward(model, ids).logits
            with emulate(model, "int4", "router"), replay(model, recorder.trace(), "live"):
                logits = forward(model, ids).logits
        sums = kl_divergence(clean, logits).double().sum(dim=1)
        assert torch.equal(result.kl[INT4.taking("live")].sums[n], sums)


@pytest.mark.usefixtures("single_thread")
def test_weights_from_disk_give_the_same_numbers(tmp_path):
    folder = saved(tmp_path / "model", "olmoe", vocab_size=512)
    plain = Model.open(folder, dtype="fp32", stream=False)
    streamed = Model.open(folder, dtype="fp32", stream=True)
    batches = dict(enumerate([batch(2, 12), batch(2, 12)]))
    first, second = run(plain, batches), run(streamed, batches)
    assert means(first) == means(second)
    assert sorted(first.routers) == sorted(second.routers)


def test_observing_shows_calls_whoever_makes_them(opened, batches):
    observer = Divergence()
    with only_running(opened.module), observing(opened.module, [observer]):
        forward(opened.module, batches[0])
    assert [name for _, name in observer.routers] == list(opened.routers)


def test_what_a_run_held_goes_with_its_observers(opened, batches):
    gc.collect()
    gc.disable()
    try:
        observer = Divergence()
        Runner(opened, ranks=Ranks.share_batches(None, list(batches.values()))).run(
            plan_of(batches), [observer]
        )
        reference = weakref.ref(observer)
        del observer
        assert reference() is None  # at once, not at the next collection of cycles
    finally:
        gc.enable()


def test_a_plan_is_known_before_it_runs(batches):
    plan = plan_of(batches)
    assert plan.passes == 3 * (1 + len(CONDITIONS))
    assert plan.conditions == (CLEAN, *CONDITIONS)
    with pytest.raises(ParameterError, match="must come before"):
        Phase("late", batches, (Pass(0, INT4, Pass(0)), Pass(0)))


def test_what_a_condition_does_not_allow_is_refused_once(opened, batches):
    runner = Runner(opened, ranks=Ranks("tp", ()))
    assert "matrices are cut" in runner.supports(INT4)
    assert runner.supports(NOISE) is None
    with pytest.raises(ParameterError, match="matrices are cut"):
        runner.run(plan_of(batches), [])
    with (
        pytest.raises(ParameterError, match="needs the reference pass"),
        applied(opened.module, INT4.taking("forced")),
    ):
        pass


def test_hidden_states_that_do_not_fit_are_refused_before_any_work(tmp_path):
    loaded = Model.open(saved(tmp_path / "model", "olmoe", vocab_size=512), stream=True)
    require_room_for_hidden_states(loaded.stream, tokens=100, passes=17, memory=None)
    with pytest.raises(ParameterError, match=r"take fewer tokens, or perturbations"):
        require_room_for_hidden_states(loaded.stream, tokens=10**9, passes=17, memory=None)
    with pytest.raises(ParameterError, match=r"4.35 GB beside 0.00 GB of weights"):
        require_room_for_hidden_states(loaded.stream, tokens=10**6, passes=17, memory=4 * 10**9)


def test_a_plan_of_two_phases_tells_of_both(opened, batches):
    first = plan_of(batches).phases[0]
    second = Phase("again", {n: batches[n] for n in (0, 1)}, (Pass(0), Pass(1)))
    completed = Runner(opened).run(Plan((first, second)), [Divergence()])
    assert completed.batches == (0, 1, 2)
    assert not completed.dropped


def test_a_batch_that_one_phase_leaves_out_is_not_completed(opened, batches):
    no_time = Budget(1e-9)
    phase = Phase("test", batches, tuple(map(Pass, batches)))
    last = Phase("last", {0: batches[0]}, (Pass(0),))
    completed = Runner(opened).run(Plan((phase, last)), [Divergence()], budget=no_time)
    assert completed.batches == (0,)
