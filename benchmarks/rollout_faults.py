"""Does `RolloutMismatch` warn of planted faults in GRPO, and only of these?

    python benchmarks/rollout_faults.py [--seeds development|judged] [--results FOLDER]  (needs trl)

A small DeepSeek-V3 (3 layers, 16 experts, top-2, selection bias) is pretrained on the text in the
box, its bias by the rule of its paper: 0.001 times the sign of what an expert's load lacks, a step.
GRPO of TRL trains it in float32, five steps of 10 prompts with two completions each, through the
mixin `RolloutReplay`, with activation checkpointing. The engine that generates is a bfloat16 copy
that gets the trainer's weights before every rollout; it hands its routes over. Planted in its
rollouts:

    shifted       rows of one prompt of ten one position late
    checkpoint    weights of the pretraining 50 steps before the last; 20, 10, 5, 2 or 1 steps where
                  the name says so
    bias          no selection bias

Twenty runs of each, ten of the smaller changes, and forty without a fault, count as warned if a
`RolloutWarning` is raised within the five steps, and end there. Limits are the defaults; they may
be looked at on the development seeds. Judged seeds have models, prompts and samples of their own.
What `FOLDER` holds of an earlier call is not repeated.
"""

import argparse
import json
import tempfile
import warnings
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import datasets  # pyright: ignore[reportMissingImports]
import torch
import trl  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, PrinterCallback, TrainerCallback

from harness import machine
from tieline.analysis.rollout import RolloutWarning
from tieline.analysis.trainer_callbacks import RolloutReplay
from tieline.models.capture import capture
from tieline.models.demo import demo_text, load_demo_tokenizer
from tieline.trace.record import RoutingTrace

SEEDS = {"development": (0, 1), "judged": (100, 101, 102)}
"""Seeds of the models; run i of a kind has model i modulo their number, and a seed of its own."""

PRETRAINED = 200
EARLIER = {"checkpoint": 50} | {f"checkpoint-{steps}": steps for steps in (20, 10, 5, 2, 1)}
"""By how many steps of the pretraining the engine's weights are older."""

STEPS, PROMPTS, COMPLETIONS = 5, 10, 2
RUNS = {"shifted": 20, "checkpoint": 20, "bias": 20, "sound": 40}
RUNS |= dict.fromkeys([name for name in EARLIER if name != "checkpoint"], 10)
BIAS_RATE = 0.001


@dataclass(frozen=True)
class Run:
    """One run of GRPO.

    Attributes:
        fault: what was planted.
        model: seed of the model.
        seed: seed of prompts and samples.
        warned: first step with a warning, 0 for none.
        messages: the warnings.
        flip_rate: largest share of a layer's tokens that flip in a step.
        unexplained: largest share that flips far from a tie.
    """

    fault: str
    model: int
    seed: int
    warned: int
    messages: list[str]
    flip_rate: float
    unexplained: float


@cache
def tokens_of_text() -> Tensor:
    """Token ids of the text in the box."""
    return torch.tensor(load_demo_tokenizer()(demo_text())["input_ids"])


def small_model(seed: int) -> Any:
    """A random model."""
    torch.manual_seed(seed)
    tokenizer: Any = load_demo_tokenizer()
    config = DeepseekV3Config(
        vocab_size=len(tokenizer),
        hidden_size=48,
        intermediate_size=64,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        first_k_dense_replace=0,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=16,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=12,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.eos_token_id,
    )
    return DeepseekV3ForCausalLM(config)


@cache
def checkpoints(seed: int, folder: Path) -> dict[int, dict[str, Tensor]]:
    """States of the pretraining, kept in the folder."""
    files = {step: folder / f"model-{seed}-{step}.safetensors" for step in kept_steps()}
    if not all(file.is_file() for file in files.values()):
        for step, state in pretrained_states(seed).items():
            save_file(state, files[step])
    return {step: load_file(file) for step, file in files.items()}


def kept_steps() -> list[int]:
    """Steps of the pretraining whose states are kept."""
    return [PRETRAINED, *(PRETRAINED - steps for steps in EARLIER.values())]


def pretrained_states(seed: int) -> dict[int, dict[str, Tensor]]:
    """States of the pretraining at the steps that are kept."""
    model, text = small_model(seed), tokens_of_text()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(seed)
    states: dict[int, dict[str, Tensor]] = {}
    for step in range(1, PRETRAINED + 1):
        starts = torch.randint(len(text) - 64, (16,), generator=generator)
        ids = torch.stack([text[start : start + 64] for start in starts.tolist()])
        with capture(model, ranks=1, epsilons=(), distances=False) as recorder:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        move_biases(model, recorder.trace())
        if step in kept_steps():
            states[step] = {k: v.detach().clone() for k, v in model.state_dict().items()}
    return states


def move_biases(model: DeepseekV3ForCausalLM, trace: RoutingTrace) -> None:
    """Raise the biases of experts with less than an even load, lower the others."""
    for layer in trace.layers:
        chosen = layer.experts[:, : layer.facts.k].long().flatten()
        load = torch.bincount(chosen, minlength=layer.facts.n_experts).float()
        bias: Any = model.get_submodule(layer.name).e_score_correction_bias
        bias += BIAS_RATE * (load.mean() - load).sign()


class Engine:
    """Generates with a bfloat16 copy of the trainer's model, and plants a fault."""

    def __init__(self, fault: str, seed: int, earlier: dict[str, Tensor]) -> None:
        self.fault, self.earlier = fault, earlier
        self.generator = torch.Generator().manual_seed(seed)

    def synced_model(self, live: Any) -> Any:
        """The engine's model: parameters in bfloat16, biases and positions as they are."""
        model = small_model(0).eval()
        model.load_state_dict(self.earlier if self.fault in EARLIER else live.state_dict())
        for name, tensor in model.named_buffers():
            if self.fault == "bias" and name.endswith("e_score_correction_bias"):
                tensor.zero_()
        for tensor in model.parameters():
            tensor.data = tensor.data.bfloat16()
        return model

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """The rollout; sets the routes of the trainer."""
        tokenizer = trainer.processing_class
        batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
        model, config = self.synced_model(trainer.model), trainer.generation_config
        with torch.no_grad(), capture(model, ranks=1, epsilons=(), distances=False) as recorder:
            rows = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                generation_config=config,
            )
        trainer.routes = self.planted(recorder.trace())
        length = batch["input_ids"].shape[1]
        completions = [until_end(row[length:].tolist(), tokenizer.eos_token_id) for row in rows]
        ids = [
            row[mask.bool()].tolist()
            for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
        ]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": None}

    def planted(self, trace: RoutingTrace) -> RoutingTrace:
        """The routes, with rows of one prompt of ten shifted if that is the fault."""
        if self.fault != "shifted":
            return trace
        prompts = torch.randperm(PROMPTS, generator=self.generator)[: PROMPTS // 10]
        order = torch.arange(len(trace.tokens))
        for prompt in prompts.tolist():
            for document in range(prompt * COMPLETIONS, (prompt + 1) * COMPLETIONS):
                rows = (trace.documents == document).nonzero().flatten()
                order[rows] = rows.roll(1)
        layers = [type(a)(a.name, a.facts, a.experts[order]) for a in trace.layers]
        return RoutingTrace(layers, trace.tokens, trace.documents, trace.positions)


def until_end(tokens: list[int], end: int) -> list[int]:
    """The tokens up to the first end of text, which is kept."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


class Trainer(RolloutReplay, trl.GRPOTrainer):
    """GRPO that records, replays and compares routes."""


class WarningSteps(TrainerCallback):
    """Notes the first step whose log comes after a warning, and ends the run there."""

    def __init__(self, caught: list[warnings.WarningMessage]) -> None:
        self.caught, self.step, self.messages = caught, 0, list[str]()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look for a warning of the rollout."""
        raised = [w for w in self.caught if issubclass(w.category, RolloutWarning)]
        self.messages = [str(w.message).split(". To see")[0] for w in raised]
        self.step = self.step or state.global_step * bool(raised)
        control.should_training_stop = control.should_training_stop or bool(raised)


def prompts_of(seed: int) -> list[str]:
    """Pieces of the text in the box, 12 to 32 tokens each."""
    generator = torch.Generator().manual_seed(seed)
    text, tokenizer = tokens_of_text(), load_demo_tokenizer()
    pieces = []
    for _ in range(STEPS * PROMPTS):
        length = int(torch.randint(12, 33, (1,), generator=generator))
        start = int(torch.randint(len(text) - length, (1,), generator=generator))
        pieces.append(tokenizer.decode(text[start : start + length]))
    return pieces


def trained_run(fault: str, model_seed: int, seed: int, folder: Path) -> Run:
    """Train with GRPO; say when it warned."""
    states = checkpoints(model_seed, folder)
    model = small_model(model_seed)
    model.load_state_dict(states[PRETRAINED])
    tokenizer = load_demo_tokenizer()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    arguments = trl.GRPOConfig(
        str(folder / "trainer"),
        max_steps=STEPS,
        logging_steps=1,
        per_device_train_batch_size=PROMPTS * COMPLETIONS,
        num_generations=COMPLETIONS,
        max_completion_length=16,
        learning_rate=1e-5,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        seed=seed,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = WarningSteps(caught)
        build: Any = Trainer
        trainer = build(
            model=model,
            reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
            args=arguments,
            train_dataset=datasets.Dataset.from_dict({"prompt": prompts_of(seed)}),
            processing_class=tokenizer,
            rollout_func=Engine(fault, seed, states[PRETRAINED - EARLIER.get(fault, 0)]),
            callbacks=[steps],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [log for log in trainer.state.log_history if "rollout/tokens" in log]
    assert len(logs) == (steps.step or STEPS)
    flips = max(log["rollout/flip_rate_max"] for log in logs)
    unexplained = max(log["rollout/unexplained_max"] for log in logs)
    return Run(fault, model_seed, seed, steps.step, steps.messages, flips, unexplained)


def planned_runs(name: str, faults: list[str]) -> list[tuple[str, int, int]]:
    """Fault, seed of the model and seed of each run."""
    models = SEEDS[name]
    return [
        (fault, models[index % len(models)], 1000 * models[0] + 100 * kind + index)
        for kind, (fault, count) in enumerate(RUNS.items())
        for index in range(count)
        if fault in faults
    ]


def summary(fault: str, runs: list[Run]) -> str:
    """What became of the runs with a fault."""
    warned = [run.warned for run in runs if run.warned]
    shifted = sum("rows were shifted" in " ".join(run.messages) for run in runs)
    rates = [run.flip_rate for run in runs]
    return (
        f"{fault}: warned in {len(warned)} of {len(runs)} runs (planned {RUNS[fault]}), at step "
        f"{max(warned, default=0)} at the latest; shifted rows named in {shifted}; flips in the "
        f"worst layer {min(rates):.1%} to {max(rates):.1%}, unexplained at most "
        f"{max(run.unexplained for run in runs):.2%}"
    )


def main() -> None:
    """Run the benchmark and report it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", choices=list(SEEDS), default="judged")
    parser.add_argument("--faults", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--most", type=int, default=100, help="runs of this call")
    parser.add_argument("--results", type=Path, help="folder of models and runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{options.seeds} seeds of {SEEDS}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.results or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{options.seeds}.json"
        runs = [Run(**run) for run in json.loads(file.read_text())["runs"]] if file.exists() else []
        finished = {(run.fault, run.model, run.seed) for run in runs}
        missing = [p for p in planned_runs(options.seeds, options.faults) if p not in finished]
        for plan in missing[: options.most]:
            runs.append(trained_run(*plan, folder))
            result = {"machine": machine(), "seeds": SEEDS, "runs": [asdict(run) for run in runs]}
            file.write_text(json.dumps(result, indent=1))
    for fault in RUNS:
        some = [run for run in runs if run.fault == fault]
        if some:
            print(summary(fault, some))


if __name__ == "__main__":
    main()
