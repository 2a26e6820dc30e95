"""How the difference of two runs grows from layer to layer."""

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from tieline.audit.diff.rates import clustered_rate
from tieline.audit.diff.records import DepthStep, TokenDiff

__all__ = ["flipped_before", "token_diff"]


def flipped_before(flips: Bool[Tensor, "layers tokens"]) -> Bool[Tensor, "layers tokens"]:
    """Whether each token has flipped in a layer before each layer."""
    so_far = flips.int().cumsum(0) > 0
    return torch.cat((torch.zeros_like(so_far[:1]), so_far[:-1]))


def token_diff(
    flips: Bool[Tensor, "layers tokens"], documents: Int[Tensor, " tokens"], names: list[str]
) -> TokenDiff:
    """Tokens over all layers: flips anywhere, first divergent layer, compounding.

    A token that has flipped enters the next layers with another residual stream and flips more
    readily there; `fresh` and `after` are the two rates, `independent` what the cumulative share
    would be without that.

    Args:
        flips: which tokens flip in which layer, in order of depth.
        documents: document of each token.
        names: names of the layers.
    """
    anywhere, before = flips.any(0), flipped_before(flips)
    rates = flips.double().mean(1)
    independent = 1 - (1 - rates).cumprod(0)
    steps = []
    for layer, name in enumerate(names):
        here, earlier = flips[layer], before[layer]
        steps.append(
            DepthStep(
                name=name,
                first=int((here & ~earlier).sum()),
                cumulative=(here | earlier).double().mean().item(),
                independent=independent[layer].item(),
                fresh=clustered_rate(here[~earlier], documents[~earlier]),
                after=clustered_rate(here[earlier], documents[earlier]),
            )
        )
    return TokenDiff(
        anywhere=clustered_rate(anywhere, documents),
        choices=rates.mean().item(),
        never=int((~anywhere).sum()),
        mean_flips=flips.double().sum(0).mean().item(),
        depth=tuple(steps),
    )
