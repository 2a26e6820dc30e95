"""Whether the time that a job announces first is the time that it takes.

    python benchmarks/estimates.py [--only diff audit]

Three models in memory: the one in the box, a small Mixtral and a small Qwen3-MoE with random
weights. Announced and taken are CPU time of the process on one thread, so that other processes
matter little; an estimate that is wrong by more than a factor of two is a defect.
"""

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import tieline
from tieline.models.model import Model
from tieline.run import plan

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


class CpuClock:
    """Stands in for `time` where a pass is measured."""

    perf_counter = staticmethod(time.process_time)


def random_models() -> dict[str, PreTrainedModel]:
    """A small Mixtral and a small Qwen3-MoE whose routers are far from uniform."""
    torch.manual_seed(0)
    mixtral = MixtralConfig.from_dict({**SHAPE, "num_hidden_layers": 3, "num_local_experts": 8})
    wide = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
    qwen = Qwen3MoeConfig.from_dict({**SHAPE, **wide, "num_hidden_layers": 4, "head_dim": 48})
    models = {"mixtral": MixtralForCausalLM(mixtral), "qwen3_moe": Qwen3MoeForCausalLM(qwen)}
    for model in models.values():
        model.eval()
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):
                weight.data.mul_(20)
    return models


def jobs(source: Any) -> dict[str, Callable[..., Any]]:
    """Every analysis that announces its time, by name."""
    rounded = {"dtype_b": "bf16-emulated"}
    return {
        "inspect": lambda **k: tieline.inspect(source, tokens=8192, **k),
        "diff": lambda **k: tieline.diff(source, source, tokens=8192, **rounded, **k),
        "smooth": lambda **k: tieline.smooth(source, tokens=4096, **k),
        "smooth by factor": lambda **k: tieline.smooth(
            source, tokens=2048, calibration=1024, factor=3.0, **k
        ),
        "audit": lambda **k: tieline.audit(source, tokens=4096, **k),
    }


def announced_and_taken(job: Callable[..., Any]) -> tuple[float, float]:
    """Seconds that a job announces, and seconds that it takes."""
    announced: list[int] = []

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage == plan.IN_ALL:
            announced.append(total)

    start = time.process_time()
    job(progress=on_progress)
    return float(announced[0]), time.process_time() - start


def main() -> None:
    """Measure and print, a line per model and job."""
    parser = argparse.ArgumentParser(description="Announced time over the time taken.")
    parser.add_argument("--only", nargs="+", default=[], metavar="ANALYSIS")
    options = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)
    torch.set_num_threads(1)
    plan.LONG, plan.time = 0.0, CpuClock  # type: ignore[assignment]
    demo = Model.open("demo", dtype="fp32")
    for name, model in {"demo": demo.module, **random_models()}.items():
        for job_name, job in jobs((model, demo.tokenizer)).items():
            if not options.only or job_name in options.only:
                announced, taken = announced_and_taken(job)
                print(
                    f"{name:10} {job_name:17} announced {announced:4.0f} s, taken {taken:5.1f} s, "
                    f"ratio {announced / taken:.2f}"
                )


if __name__ == "__main__":
    main()
