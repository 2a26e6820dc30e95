"""Affine routers for tests."""

import torch


def router(experts, width, seed=0, bias=True):
    """Weight and bias with normal entries, in float64."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(experts, width, generator=generator, dtype=torch.float64)
    shift = torch.randn(experts, generator=generator, dtype=torch.float64)
    return weight, shift if bias else torch.zeros_like(shift)


def inputs(tokens, width, seed=1):
    """Normal inputs in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, width, generator=generator, dtype=torch.float64)
