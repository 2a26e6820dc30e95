"""One rank of a model sharded by transformers: replays a saved trace and writes the results.

torchrun --nproc-per-node 2 -m tests.models.replay_ranks FOLDER tensor|expert
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tieline.models.replay import replay

CUTS = {
    "tensor": {"tp_size": 2},
    "expert": {"tp_size": 2, "ep_size": 2, "tp_plan": {}},
}


def main() -> None:
    """Write logits of a plain and of replayed passes, and how many choices changed."""
    folder, cut = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    config = DistributedConfig(**CUTS[cut])
    model = AutoModelForCausalLM.from_pretrained(folder / "model", distributed_config=config)
    model.eval()
    ids = load_file(folder / "ids.safetensors")["ids"]
    tensors = {}
    with torch.no_grad():
        tensors["plain"] = model(input_ids=ids).logits
        for weights in ("live", "recorded"):
            with replay(model, folder / "trace", weights) as replayed:
                tensors[weights] = model(input_ids=ids).logits
    tensors["local"] = torch.tensor(sum(_local(weight) for weight in model.parameters()))
    tensors["changed"] = torch.tensor(list(replayed.changed.values()))
    tensors = {name: value.contiguous().clone() for name, value in tensors.items()}
    tensors = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in tensors.items()}
    save_file(tensors, folder / f"{cut}-{dist.get_rank()}.safetensors")
    dist.destroy_process_group()


def _local(weight: torch.Tensor) -> int:
    """Number of entries of a parameter on this rank."""
    return weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel()


if __name__ == "__main__":
    main()
