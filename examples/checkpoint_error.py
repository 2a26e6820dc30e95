"""A CheckpointError, explained: a near-tie that the repeated forward pass decides otherwise.

    python examples/checkpoint_error.py [--tokens 4096]

A Mixtral block sits behind a sum whose order changes from call to call, as atomic additions on a
GPU do. Some tokens are put on a wall of the router, where a long run meets them by chance.
"""

import argparse
import random
import warnings

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from tieline import gap, recompute_check, stable_topk
from tieline.analysis.tie_density import tie_density
from tieline.models.router_calls import RouterCall, watch_routing
from tieline.trace import RoutingTrace

WIDTH, EXPERTS, K, PARTS = 64, 8, 2, 16


class UnorderedSum(nn.Module):
    """A linear layer that adds its partial products in an order of its own, or in a fixed one."""

    def __init__(self, fixed: bool) -> None:
        super().__init__()
        self.linear, self.fixed = nn.Linear(WIDTH, WIDTH, bias=False), fixed

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the products of slices of the input."""
        slices = list(zip(x.chunk(PARTS, -1), self.linear.weight.chunk(PARTS, 1), strict=True))
        if not self.fixed:
            random.shuffle(slices)  # Python's generator: checkpointing does not restore it
        total = torch.zeros_like(x)
        for part, weight in slices:
            total = total + part @ weight.T
        return total


class Block(nn.Module):
    """The sum, then the experts."""

    def __init__(self, fixed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MixtralConfig(
            hidden_size=WIDTH,
            intermediate_size=WIDTH,
            num_local_experts=EXPERTS,
            num_experts_per_tok=K,
        )
        config._experts_implementation = "eager"
        self.mix, self.moe = UnorderedSum(fixed), MixtralSparseMoeBlock(config)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=WIDTH**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Output of the experts."""
        return self.moe(self.mix(x))


def tokens_on_walls(block: Block, tokens: int, planted: int) -> Tensor:
    """Random tokens, the first of which tie between the ranks k and k + 1 but for rounding."""
    x = torch.randn(1, tokens, WIDTH, dtype=torch.float64)
    weight = (block.moe.gate.weight @ block.mix.linear.weight).detach().double()
    scores = x[0, :planted] @ weight.T
    ranks = stable_topk(scores, K + 1).indices
    normal = weight[ranks[:, K - 1]] - weight[ranks[:, K]]
    x[0, :planted] -= (gap(scores, K) / normal.square().sum(dim=1))[:, None] * normal
    return x.float()


def routing(block: Block, x: Tensor) -> RoutingTrace:
    """The routing of the batch, for what can be known before training."""
    calls: list[RouterCall] = []
    with torch.no_grad(), watch_routing(block, calls.append):
        block(x)
    rows = torch.arange(calls[0].tokens)
    return RoutingTrace([calls[0].trace], rows, torch.zeros_like(rows), rows)


def main() -> None:
    """Crash, explain, repair."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    random.seed(0)
    block = Block()
    x = tokens_on_walls(block, tokens, planted=tokens // 16)

    print("1. Training crashes:")
    try:
        y = checkpoint(block, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        y.square().sum().backward()
    except CheckpointError as problem:
        print("   CheckpointError:", " ".join(str(problem).split())[:140], "...")

    print("2. Why:")
    report = recompute_check(block, x, kinds=("recompute",))
    print(f"   {report.verdict}: {report.explanation}")
    for flip in report.repetitions[0].flips[:3]:
        print(
            f"   token {flip.token} of {flip.layer!r}: expert {flip.left} -> {flip.entered}, "
            f"gap {flip.gap:.1e}, scores moved by {flip.moved:.1e}"
        )

    print("3. How often to expect it, from the tokens that were not planted:")
    trace = routing(block, x[:, tokens // 16 :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the message is printed below
        for dtype in ("fp32", "bf16"):
            density = tie_density(trace, dtype)
            print(f"   {dtype}: {density.expected(10**6):.3g} ties per million tokens")
            if density.message:
                print(f"   {density.message}")

    print("4. With a fixed order of summation:")
    print(f"   {recompute_check(Block(fixed=True), x, kinds=('recompute',)).verdict}")


if __name__ == "__main__":
    main()
