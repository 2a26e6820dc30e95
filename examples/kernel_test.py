"""A kernel test that knows ties from bugs.

    python examples/kernel_test.py [--tokens 4096]

Three "kernels" choose experts: one breaks ties by its own rule, one computes in bf16, one has a bug
that forgets the last expert. Comparing ids exactly fails all three; the oracle fails the bug only.
"""

import argparse

import torch
from torch import Tensor

from tieline import stable_topk
from tieline.analysis.oracles import (
    assert_routing_close,
    tie_band,
    tie_free_scores,
    tie_heavy_scores,
)

EXPERTS, K = 64, 8


def own_tie_rule(scores: Tensor) -> Tensor:
    """torch.topk promises no order among equal scores."""
    return scores.topk(K, dim=-1).indices


def in_bf16(scores: Tensor) -> Tensor:
    """Scores rounded to bf16 before the choice."""
    return stable_topk(scores.bfloat16(), K).indices


def forgets_the_last(scores: Tensor) -> Tensor:
    """An off-by-one: the last expert is never looked at."""
    return stable_topk(scores[:, :-1], K).indices


def check(name: str, ids: Tensor, scores: Tensor, tol: float | Tensor) -> None:
    """Print what an exact comparison and the oracle say."""
    reference = stable_topk(scores, K).indices
    same = (ids.sort(dim=1).values == reference.sort(dim=1).values).all(dim=1)
    print(f"{name}: {int((~same).sum())} of {len(ids)} tokens have other ids")
    try:
        comparison = assert_routing_close(reference, ids, scores, tol)
        print(f"   accepted: {len(comparison.ties)} differences, all of them ties")
    except AssertionError as problem:
        print("   refused:", "\n            ".join(str(problem).splitlines()[:3]))


def main() -> None:
    """Run the three kernels on scores with and without ties."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096)
    tokens = parser.parse_args().tokens
    torch.manual_seed(0)

    heavy = tie_heavy_scores(tokens, EXPERTS, K, share=0.5, order=3).scores
    check("own tie rule, on scores with planted ties", own_tie_rule(heavy), heavy, tol=0.0)

    scores = torch.randn(tokens, EXPERTS)
    band = tie_band(scores, K, "bf16", roundings=1.0)
    check("bf16, on random scores", in_bf16(scores), scores, band)
    check("the bug, on random scores", forgets_the_last(scores), scores, band)

    free = tie_free_scores(tokens, EXPERTS, K).scores  # here even ids must agree
    assert torch.equal(own_tie_rule(free), stable_topk(free, K).indices)
    print("without ties all ids agree, in order")


if __name__ == "__main__":
    main()
