"""Gradients of a model that transformers cuts over processes, beside those of one process.

    python -m benchmarks.native_training [--steps 12]

A random OLMoE (16 experts, top-2) is cut over two gloo processes by `DistributedConfig(fsdp_size=2,
ep_size=2)`, whose plan sends tokens to experts, and by `fsdp_size=2` alone. Printed is how far the
gradient of a parameter is from that of one process, |g - g'| / |g'|, the largest and the median
over parameters, with equal and with unequal shares of the rows; and the CPU seconds of all
processes per step over those of one. Then whether 16 experts can be cut over three processes. One
thread per process.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

ROWS, LENGTH, WORDS = 8, 128, 512
SIZES = {"width": 128, "hidden": 256, "experts": 16, "chosen": 2, "layers": 2}
SHARES = {"equal": (4, 4), "unequal": (6, 2), "three": (3, 3, 2), "alone": (8,)}


def native(folder: Path, how: str) -> Any:
    """OLMoE of transformers, whole or cut by its own plan."""
    from transformers import OlmoeConfig, OlmoeForCausalLM
    from transformers.distributed.configuration_utils import DistributedConfig

    if not folder.is_dir():
        torch.manual_seed(0)
        config = OlmoeConfig(
            vocab_size=WORDS,
            hidden_size=SIZES["width"],
            intermediate_size=SIZES["hidden"],
            num_hidden_layers=SIZES["layers"],
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts=SIZES["experts"],
            num_experts_per_tok=SIZES["chosen"],
        )
        OlmoeForCausalLM(config).save_pretrained(folder)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    spread: dict[str, Any] = {}
    if ranks > 1:
        experts: dict[str, Any] = {"ep_size": ranks} if how == "ep" else {}
        spread = {"distributed_config": DistributedConfig(fsdp_size=ranks, **experts)}
    return OlmoeForCausalLM.from_pretrained(folder, dtype=torch.float32, **spread).train()


def step(model: Any, ids: Tensor) -> None:
    """Gradients of this process's rows; FSDP averages those of all processes."""
    # the mean over a process's tokens has the weight of its share of the rows
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    (model(input_ids=ids, labels=ids).loss * len(ids) * ranks / ROWS).backward()


def work(how: str, shares: str, steps: int, folder: Path, out: Path) -> None:
    """Write whole gradients and CPU seconds per step of this process."""
    rank, sizes = int(os.environ.get("RANK", "0")), SHARES[shares]
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    ids = ids.split(sizes)[rank]
    model = native(folder, how)
    step(model, ids)
    gradients = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        whole_grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        gradients[name] = whole_grad.contiguous()
    if rank == 0:
        save_file(gradients, out / "gradients")
    began = time.process_time()
    for _ in range(steps):
        model.zero_grad()
        step(model, ids)
    spent = (time.process_time() - began) / max(1, steps)
    (out / f"seconds-{rank}").write_text(json.dumps(spent))


def run(how: str, shares: str, steps: int, folder: Path) -> tuple[dict[str, Tensor], float] | str:
    """Gradients and CPU seconds per step of all processes, or the last line of an error."""
    count, out = len(SHARES[shares]), Path(tempfile.mkdtemp(dir=folder))
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", str(count)]
    command = [sys.executable] if count == 1 else torchrun
    arguments = ["--how", how, "--shares", shares, "--steps", steps, "--place", folder / "model"]
    done = subprocess.run(
        [*command, "-m", "benchmarks.native_training", *map(str, arguments), "--out", str(out)],
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "Error: " in line]
        return (lines or [done.stderr[-300:]])[0].strip()
    seconds = sum(json.loads((out / f"seconds-{rank}").read_text()) for rank in range(count))
    return load_file(out / "gradients"), seconds


def table_row(how: str, shares: str, steps: int, folder: Path, alone: Any) -> str:
    """One row of the table."""
    outcome = run(how, shares, steps, folder)
    if isinstance(outcome, str):
        return f"| {how} | {shares} | {outcome} | |"
    gradients, seconds = outcome
    apart = {name: float((gradients[name] - x).norm() / x.norm()) for name, x in alone[0].items()}
    worst = max(apart, key=lambda name: apart[name])
    middle = sorted(apart.values())[len(apart) // 2]
    deviation = f"{apart[worst]:.1e} ({worst}), median {middle:.1e}"
    return f"| {how} | {shares} | {deviation} | {seconds / alone[1]:.2f} |"


def main() -> None:
    """Run everything, or the part of one process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--how")
    parser.add_argument("--shares")
    parser.add_argument("--place", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.how is not None:
        from contextlib import nullcontext

        from tieline.core.collectives import is_parallel, join_processes

        with join_processes() if is_parallel() else nullcontext():
            work(given.how, given.shares, given.steps, given.place, given.out)
        return
    with tempfile.TemporaryDirectory() as name:
        print("| | shares | gradients apart | CPU over one process |\n|---|---|---|---|")
        for how in ("ep", "fsdp"):
            alone = run(how, "alone", given.steps, Path(name))
            if isinstance(alone, str):
                raise SystemExit(alone)
            for shares in ("equal", "unequal", "three"):
                print(table_row(how, shares, given.steps, Path(name), alone), flush=True)


if __name__ == "__main__":
    main()
