"""Hypothesis strategies shared by the suite."""

import torch
from hypothesis import strategies as st


@st.composite
def score_matrices(draw, min_experts=2, max_experts=6, max_tokens=8):
    """Float64 scores in Z / 8, so ties are common and every difference is exact."""
    tokens = draw(st.integers(1, max_tokens))
    experts = draw(st.integers(min_experts, max_experts))
    size = tokens * experts
    entries = draw(st.lists(st.integers(-40, 40), min_size=size, max_size=size))
    return torch.tensor(entries, dtype=torch.float64).reshape(tokens, experts) / 8


seeds = st.integers(0, 2**32 - 1)


def dyadic_scores(seed, tokens=12, experts=8):
    """Float64 scores in Z / 8 with many ties, from a seed (drawing entries one by one is slow)."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    return torch.randint(-24, 25, (tokens, experts), generator=generator).double() / 8


def distinct_scores(seed, tokens=12, experts=8):
    """Float64 scores in Z / 8 without a tie in any row."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    order = torch.rand(tokens, 64, generator=generator).argsort(dim=-1)
    return (order[:, :experts].double() - 32) / 8


widths = st.integers(0, 80).map(lambda n: torch.tensor(n / 8, dtype=torch.float64))
