"""The integration of TRL, with the real package: rollouts are recorded, replayed and compared."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.analysis.trainer_callbacks.trl_runs import (
    grpo_trainer,
    rollout_logs,
    sft_trainer,
    small_model,
)
from tieline.analysis.trainer_callbacks import RolloutReplay
from tieline.models.capture import capture
from tieline.models.families import find_routers
from tieline.trace.record import RoutingTrace

trl = pytest.importorskip("trl", reason="trl is not installed: pip install trl")
pytest.importorskip("datasets", reason="datasets is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


class GRPO(RolloutReplay, trl.GRPOTrainer): ...


def other_experts(trace, shift=1):
    """The trace with every expert replaced by the next one, so that each choice is another."""
    layers = [
        type(a)(a.name, a.facts, (a.experts + shift) % a.facts.n_experts) for a in trace.layers
    ]
    return RoutingTrace(layers, trace.tokens, trace.documents, trace.positions)


class Recorded(GRPO):
    """Routes of the rollout replaced by others; the choices of all update passes are kept."""

    replaced = staticmethod(other_experts)

    def _generate(self, *args, **kwargs):
        answer = super()._generate(*args, **kwargs)
        if self.model.training:
            self.routes = self.replaced(self.routes)
        return answer


def router_ids(model):
    """Experts that each call of the first router returned, appended while the block lasts."""
    calls = []
    router = next(iter(find_routers(model).values()))
    handle = router.register_forward_hook(
        lambda module, args, output: calls.append(
            (torch.is_grad_enabled(), output[-1].detach().sort(dim=-1).values)
        )
    )
    return calls, handle


def test_own_routes_of_a_rollout_agree_with_the_update(tmp_path):
    logs = rollout_logs(grpo_trainer(GRPO, tmp_path))
    assert len(logs) == 2
    for log in logs:
        assert log["rollout/flip_rate"] == log["rollout/unexplained_max"] == 0
        assert log["rollout/shifted_documents"] == log["rollout/exchanged_documents"] == 0
        assert log["rollout/tokens"] > 0


def test_the_last_token_of_a_completion_needs_no_record(tmp_path):
    logs = rollout_logs(grpo_trainer(GRPO, tmp_path, max_completion_length=2))
    assert all(log["rollout/unrecorded"] == 0 for log in logs)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_update_takes_recorded_experts_also_in_repeated_passes(tmp_path, checkpointing):
    trainer = grpo_trainer(Recorded, tmp_path, gradient_checkpointing=checkpointing, max_steps=1)
    calls, handle = router_ids(trainer.model)
    logs = rollout_logs(trainer)
    handle.remove()
    learning = [ids for grad, ids in calls if grad]
    assert len(learning) == 1 + checkpointing
    if checkpointing:
        assert torch.equal(*learning)
    assert logs[0]["rollout/flip_rate/layer_0"] == 1


def test_compared_alone_the_update_goes_by_the_live_router(tmp_path):
    trainer = grpo_trainer(Recorded, tmp_path, max_steps=1)
    trainer.replay_routes = False
    calls, handle = router_ids(trainer.model)
    logs = rollout_logs(trainer)
    handle.remove()
    assert logs[0]["rollout/flip_rate/layer_0"] == 1
    plain = grpo_trainer(trl.GRPOTrainer, tmp_path, max_steps=1)
    others, handle = router_ids(plain.model)
    plain.train()
    handle.remove()
    assert all(torch.equal(a[1], b[1]) for a, b in zip(calls, others, strict=True))


def test_old_probabilities_are_those_of_the_replayed_policy(tmp_path):
    """Several updates per rollout: at the first of them the ratio of policies is 1."""
    options = {"steps_per_generation": 1, "num_iterations": 2, "learning_rate": 0.0}
    logs = rollout_logs(grpo_trainer(Recorded, tmp_path, epsilon=1e-4, **options))
    assert [log["clip_ratio/region_mean"] for log in logs] == [0, 0]


def test_evaluation_keeps_the_routes_of_training(tmp_path):
    trainer = grpo_trainer(GRPO, tmp_path, max_steps=1)
    rollout_logs(trainer)
    routes = trainer.routes
    trainer.model.eval()
    trainer._generate(["import os"] * 2)
    assert trainer.routes is routes


def test_routes_of_another_engine_are_taken_from_its_rollout(tmp_path):
    def generate(prompts, trainer):
        engine = small_model(seed=1)
        engine.load_state_dict(trainer.model.state_dict())
        ids = trainer.processing_class(prompts)["input_ids"]
        generator = torch.Generator().manual_seed(0)
        completions = torch.randint(3, 500, (len(ids), 6), generator=generator).tolist()
        rows = [torch.tensor([a + b]) for a, b in zip(ids, completions, strict=True)]
        with torch.no_grad(), capture(engine, ranks=1, epsilons=(), distances=False) as recorder:
            for row in rows:
                engine(input_ids=row)
        trainer.routes = recorder.trace()
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    options = {"rollout_func": generate, "max_steps": 1}
    logs = rollout_logs(grpo_trainer(GRPO, tmp_path, **options))
    assert logs[0]["rollout/flip_rate"] == logs[0]["rollout/unrecorded"] == 0


def adapters(**options):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    return peft.LoraConfig(r=2, target_modules=["o_proj"], task_type="CAUSAL_LM", **options)


def test_grpo_with_adapters(tmp_path):
    options = {"peft_config": adapters(), "learning_rate": 1e-3}
    logs = rollout_logs(grpo_trainer(GRPO, tmp_path, **options))
    assert len(logs) == 2
    for log in logs:
        assert log["rollout/flip_rate"] == log["rollout/unrecorded"] == 0


@pytest.mark.parametrize(("trainer_class", "replayed"), [(GRPO, False), (Recorded, True)])
def test_the_reference_of_adapters_goes_by_its_live_routers(tmp_path, trainer_class, replayed):
    """New adapters change nothing, so only the replay separates policy and reference."""
    options = {"peft_config": adapters(), "learning_rate": 0.0, "beta": 0.1, "max_steps": 1}
    (log,) = rollout_logs(grpo_trainer(trainer_class, tmp_path, **options))
    assert (log["kl"] > 1e-3) == replayed


def documents_and_routes():
    """Documents of several lengths, and their routes recorded in another order."""
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(3, 500, (n,), generator=generator) for n in (20, 9, 31, 14, 26, 11)]
    engine = small_model()
    with torch.no_grad(), capture(engine, ranks=1, epsilons=(), distances=False) as recorder:
        for row in reversed(documents):
            engine(input_ids=row[None])
    return documents, recorder.trace()


class SFT(RolloutReplay, trl.SFTTrainer): ...


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_sft_takes_routes_by_hand(tmp_path, packing, lora):
    documents, routes = documents_and_routes()
    options = {"packing": packing, "peft_config": adapters() if lora else None}
    trainer = sft_trainer(SFT, tmp_path, documents, **options)
    trainer.routes = routes
    (log,) = rollout_logs(trainer)
    assert log["rollout/flip_rate"] == log["rollout/unrecorded"] == 0
    assert log["rollout/tokens"] == sum(map(len, documents))


@pytest.mark.parametrize("packing", [False, True])
def test_sft_replays_other_experts(tmp_path, packing):
    documents, routes = documents_and_routes()
    trainer = sft_trainer(SFT, tmp_path, documents, packing=packing)
    trainer.routes = other_experts(routes)
    (log,) = rollout_logs(trainer)
    assert log["rollout/flip_rate/layer_0"] == 1
    plain = sft_trainer(trl.SFTTrainer, tmp_path, documents, packing=packing)
    plain.train()
    losses = [t.state.log_history[0]["loss"] for t in (trainer, plain)]
    assert abs(losses[0] - losses[1]) > 1e-3


def test_the_example_prints_its_steps(tmp_path):
    root = Path(__file__).parents[3]
    command = [sys.executable, "examples/trl_grpo.py", "2"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(lines) == 2
    assert all("0.00% unexplained, 0.00% without a record" in line for line in lines)
