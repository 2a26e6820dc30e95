"""The experts kernel of transformers against our dispatch in the same experts module.

Contestants, the experts of a Mixtral block with the same weights, tokens and choice:

    eager        transformers' loop over experts
    grouped_mm   its grouped product
    tieline      `experts_implementation="tieline"`
    padded       tieline with two more columns, filled for a quarter of the tokens, else skipped

    python benchmarks/experts_kernel.py [--rounds 16] [--shape 0 1 2] [--json PATH]
"""

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import tieline.models  # registers the kernel
from harness import Ratio, Samples, interleave, ratio, report
from tieline.core.ranking import stable_topk

SHAPES = [(512, 256, 8, 2, 512), (4096, 256, 64, 8, 128), (512, 1024, 64, 8, 256)]
# tokens, width, experts, k, expert width
Shape = tuple[int, int, int, int, int]
Choice = tuple[Tensor, Tensor]
assert tieline.models.register_kernel


def experts_module(shape: Shape) -> Any:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    _, width, experts, k, hidden = shape
    config = MixtralConfig(
        hidden_size=width,
        intermediate_size=hidden,
        num_local_experts=experts,
        num_experts_per_tok=k,
    )
    module = MixtralExperts(config)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return module


def choices(shape: Shape) -> tuple[Choice, Choice]:
    """Experts and weights of k columns, and of k + 2 of which most tokens skip the last two."""
    tokens, _, experts, k, _ = shape
    torch.manual_seed(1)
    ranked = stable_topk(torch.rand(tokens, experts), min(k + 2, experts))
    plain = (ranked.indices[:, :k], ranked.values[:, :k])
    skipped = torch.zeros_like(ranked.indices, dtype=torch.bool)
    skipped[:, k:] = (torch.rand(tokens) >= 0.25).unsqueeze(1)
    padded = ranked.indices.masked_fill(skipped, experts), ranked.values.masked_fill(skipped, 0)
    return plain, padded


def step(module: Any, name: str, x: Tensor, choice: Choice, grad: Tensor | None) -> None:
    module.config._experts_implementation = name
    if grad is None:
        with torch.no_grad():
            module(x, *choice)
        return
    module(x, *choice).backward(grad)
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None


def time_shape(shape: Shape, rounds: int, backward: bool) -> dict[str, Samples]:
    module, (plain, padded) = experts_module(shape), choices(shape)
    x = torch.randn(shape[0], shape[1], requires_grad=True)
    grad = torch.randn_like(x) if backward else None
    run: dict[str, Callable[[], object]] = {
        name: lambda name=name: step(module, name, x, plain, grad)
        for name in ("eager", "grouped_mm", "tieline")
    }
    run["padded"] = lambda: step(module, "tieline", x, padded, grad)
    return interleave(run, rounds)


def ratios_of(shape: Shape, samples: dict[str, Samples], backward: bool) -> list[Ratio]:
    title = f"{shape} {'fwd+bwd' if backward else 'fwd'}"
    used = 1 + 0.25 * 2 / shape[3]  # slots that are computed, against those without padding
    pairs = [("tieline", "eager", 1.0), ("tieline", "grouped_mm", 1.0)]
    pairs += [("padded", "tieline", used + 0.1)]
    return [ratio(f"{title}: {a} / {b}", samples[a], samples[b], t) for a, b, t in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--shape", type=int, nargs="*", default=range(len(SHAPES)))
    parser.add_argument("--json")
    options = parser.parse_args()
    results: list[Ratio] = []
    medians: dict[str, object] = {}
    for index in options.shape:
        for backward in (False, True):
            samples = time_shape(SHAPES[index], options.rounds, backward)
            results += ratios_of(SHAPES[index], samples, backward)
            key = f"{SHAPES[index]} {'fwd+bwd' if backward else 'fwd'}"
            medians[key] = {name: median(s.cpu) for name, s in samples.items()}
    report("Experts kernel", results, options.json, medians=medians)


if __name__ == "__main__":
    main()
