"""Score matrices and layers whose answers are known or can be simulated."""

import torch

from tieline.core.ranking import stable_topk
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace


def normal_scores(tokens, experts, seed=0):
    """Independent N(0, 1) scores."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator, dtype=torch.float64)


def linear_router(tokens=2000, experts=16, dim=32, shift=0.3, seed=0):
    """Inputs, weight and logits of a linear router, in float32 as a model has them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, dim, generator=generator) / dim**0.5
    inputs = torch.randn(tokens, dim, generator=generator) + shift
    return inputs, weight, (inputs.double() @ weight.double().T).float()


SCORES = {
    "logits": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


def layer_of(logits, k, units="logits", bias=None, ranks=None, name="layer", **facts):
    """The trace of a layer that routes by these logits."""
    scores = SCORES[units](logits)
    selection = scores if bias is None else scores + bias
    ranked = stable_topk(selection.float(), ranks or logits.shape[1])
    return LayerTrace(
        name=name,
        facts=LayerFacts(logits.shape[1], k, units=units, **facts),
        experts=ranked.indices,
        scores=ranked.values,
        bias=bias,
    )


def trace_of(*layers, epsilons=()):
    """A trace of layers over the same tokens."""
    ids = torch.arange(len(layers[0].experts))
    return RoutingTrace(layers, ids, torch.zeros_like(ids), ids, epsilons, {"model": "made up"})


def chosen_sets(scores, k):
    """Chosen experts as booleans."""
    picked = scores.topk(k, dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, picked, True)


def simulated_flips(scores, k, noise, repeats, seed=1):
    """Share of noisy runs whose chosen set differs, and its standard error over tokens."""
    generator = torch.Generator().manual_seed(seed)
    clean, total = chosen_sets(scores, k), torch.zeros(len(scores), dtype=torch.float64)
    for _ in range(repeats):
        noisy = scores + noise * torch.randn(scores.shape, generator=generator, dtype=scores.dtype)
        total += (chosen_sets(noisy, k) != clean).any(dim=-1)
    return total / repeats
