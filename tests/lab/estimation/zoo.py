"""Regression functions whose minima are known, for the solvers."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Line:
    """F = θ·x, whose least squares has a closed form."""

    size: int

    def value(self, theta, x):
        return (x @ theta[..., None])[..., 0]

    def value_and_jacobian(self, theta, x):
        return self.value(theta, x), x.clone()


@dataclass(frozen=True)
class Decay:
    """F = θ_1 exp(-θ_2 x), one input."""

    size: int = 2

    def value(self, theta, x):
        return theta[:, :1] * torch.exp(-theta[:, 1:] * x[..., 0])

    def value_and_jacobian(self, theta, x):
        shape = torch.exp(-theta[:, 1:] * x[..., 0])
        value = theta[:, :1] * shape
        return value, torch.stack([shape, -value * x[..., 0]], dim=-1)


@dataclass(frozen=True)
class Pair:
    """Two outputs, f = (θ_1 x, θ_1 x² + θ_2)."""

    size: int = 2

    def value(self, theta, x):
        t = x[..., 0]
        return torch.stack([theta[:, :1] * t, theta[:, :1] * t**2 + theta[:, 1:]], dim=-1)

    def value_and_jacobian(self, theta, x):
        t = x[..., 0]
        first = torch.stack([t, torch.zeros_like(t)], dim=-1)
        second = torch.stack([t**2, torch.ones_like(t)], dim=-1)
        return self.value(theta, x), torch.stack([first, second], dim=-2)


@dataclass(frozen=True)
class Product:
    """F = θ_1 θ_2 x: the data see the product alone."""

    size: int = 2

    def value(self, theta, x):
        return theta[:, :1] * theta[:, 1:] * x[..., 0]

    def value_and_jacobian(self, theta, x):
        t = x[..., 0]
        return self.value(theta, x), torch.stack([theta[:, 1:] * t, theta[:, :1] * t], dim=-1)
