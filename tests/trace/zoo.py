"""Small traces with everything in them: ties, groups, biases, missing fields, broken scores."""

import torch
from hypothesis import strategies as st

from tieline.core.ranking import stable_topk
from tieline.trace import LayerFacts, LayerTrace, RoutingTrace

EPSILONS = (0.125, 0.5, 2.0)
FACTS = (
    LayerFacts(n_experts=6, k=2),
    LayerFacts(n_experts=6, k=3, units="sigmoid", n_groups=3, k_groups=2, group_score="top2sum"),
    LayerFacts(n_experts=4, k=4, affine=False),
    LayerFacts(n_experts=5, k=1, units="softmax"),
)


def near_by_definition(scores, k, epsilons=EPSILONS):
    threshold = scores.sort(dim=1, descending=True).values[:, k - 1 : k]
    columns = [(scores > threshold - eps).sum(dim=1) for eps in epsilons]
    return torch.stack(columns, dim=1)


def make_layer(generator, name, facts, tokens, broken=0.0, ids_only=False):
    """Scores in Z / 8, so that gaps are exact, often equal and often zero."""
    shape = (tokens, facts.n_experts)
    scores = torch.randint(-16, 17, shape, generator=generator).float() / 8
    ranks = min(facts.n_experts, facts.k + 2)
    near = near_by_definition(scores, facts.k)
    bad = torch.rand(tokens, generator=generator) < broken
    scores[bad, 0] = torch.nan
    ranked = stable_topk(scores, ranks)
    if ids_only:
        return LayerTrace(name, facts, ranked.indices)
    group_gap = torch.randint(0, 9, (tokens,), generator=generator).float() / 8
    return LayerTrace(
        name,
        facts,
        experts=ranked.indices,
        scores=ranked.values,
        weights=torch.rand(tokens, facts.k, generator=generator),
        group_gap=group_gap if facts.n_groups > 1 else None,
        distance=torch.rand(tokens, generator=generator) if facts.affine else None,
        near=near,
        bias=torch.arange(facts.n_experts) / 8 if facts.units == "sigmoid" else None,
        inputs=torch.rand(tokens, 3, generator=generator),
    )


def make_trace(seed=0, tokens=20, broken=0.0, ids_only=False, facts=FACTS, repeats=False):
    """Tokens of a few documents, in random order; `repeats` lets tokens come twice."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    layers = tuple(
        make_layer(generator, f"layers.{index}", fact, tokens, broken, ids_only)
        for index, fact in enumerate(facts)
    )
    count = max(tokens // 2 if repeats else 2 * tokens, 1)
    slots = (
        torch.randint(0, count, (tokens,), generator=generator)
        if repeats
        else torch.randperm(count, generator=generator)[:tokens]
    )
    return RoutingTrace(
        layers,
        tokens=torch.randint(0, 50, (tokens,), generator=generator),
        documents=slots // 7 - 1,
        positions=slots % 7,
        epsilons=() if ids_only else EPSILONS,
        provenance={"model": "zoo", "seed": 0, "nested": {"a": [1, 2.5, None, True]}},
    )


# A strategy must not make the trace itself: the type checker draws random numbers of its own.
recipes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**16),
        "tokens": st.integers(1, 24),
        "broken": st.sampled_from([0.0, 0.3]),
        "ids_only": st.booleans(),
        "repeats": st.booleans(),
    }
)
