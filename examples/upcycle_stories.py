"""A trained dense model becomes a Mixture of Experts, keeps its loss, and learns a new text.

    python examples/upcycle_stories.py MODEL.bin TOKENIZER.bin TEXT [--steps 60] [--experts 4]

MODEL.bin is a checkpoint of llama2.c, such as stories260K. The dense model and the mixture are then
trained in the same way on the first nine tenths of TEXT; losses are those on the rest.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from tieline.analysis.text import text_loss
from tieline.models import find_routers, upcycle_
from tieline.models.llama2c import load_llama2c, load_llama2c_tokenizer

ROWS, LENGTH, RATE, HELD_OUT = 8, 128, 1e-3, 8192


def train(model: Any, ids: torch.Tensor, steps: int) -> None:
    """AdamW on random windows of the text, the same ones for every model."""
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model.train()
    for _ in range(steps):
        starts = torch.randint(len(ids) - LENGTH, (ROWS,), generator=generator)
        rows = torch.stack([ids[start : start + LENGTH] for start in starts.tolist()])
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
    model.eval()


@torch.no_grad()
def spread(model: Any, ids: torch.Tensor) -> float:
    """Largest load of an expert over the mean load, averaged over layers."""
    loads: list[float] = []

    def count(router: Any, args: Any, output: Any) -> None:
        load = torch.bincount(output[2].flatten(), minlength=router.num_experts).double()
        loads.append((load.max() / load.mean()).item())

    hooks = [router.register_forward_hook(count) for router in find_routers(model).values()]
    model(input_ids=ids[: ROWS * LENGTH].view(ROWS, LENGTH))
    for hook in hooks:
        hook.remove()
    return sum(loads) / len(loads)


def main() -> None:
    """Measure, upcycle, train both, measure again."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--experts", type=int, default=4)
    options = parser.parse_args()
    dense, mixture = load_llama2c(options.model), load_llama2c(options.model)
    words = load_llama2c_tokenizer(options.tokenizer, dense.config.vocab_size)
    text = options.text.read_text()
    cut = len(text) * 9 // 10
    lines = words(text[:cut].split("\n\n"), add_special_tokens=False)["input_ids"]
    ids = torch.tensor([token for line in lines for token in line])

    def loss(model: Any) -> float:
        return round(text_loss(model, words, text[cut:], tokens=HELD_OUT).value, 4)

    told: dict[str, Any] = {"loss of the dense model": loss(dense)}
    done = upcycle_(mixture, n_experts=options.experts, k=2, router_scale=0.2)
    told |= {"loss of the mixture": loss(mixture), "spread before": spread(mixture, ids)}
    told |= {"parameters": [done.parameters_before, done.parameters_after]}
    for name, model in (("dense", dense), ("mixture", mixture)):
        train(model, ids, options.steps)
        told[f"{name} after {options.steps} steps"] = loss(model)
    experts = mixture.get_parameter("model.layers.0.mlp.experts.down_proj")
    apart = (experts[0] - experts[1]).norm() / experts[0].norm()
    told |= {"experts apart": apart.item(), "spread after": spread(mixture, ids)}
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
