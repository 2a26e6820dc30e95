"""Tables whose best prediction is known."""

import numpy as np

__all__ = ["piecewise", "steps"]


def piecewise(n, width, regions, noise, seed=0, outputs=None):
    """Inputs, targets and an oracle's predictions: one linear model where each score is largest."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, width))
    region = (x @ random.normal(size=(width, regions))).argmax(axis=1)
    shape = (regions, width + 1) if outputs is None else (regions, width + 1, outputs)
    models = random.normal(size=shape)
    design = np.hstack([x, np.ones((n, 1))])
    exact = np.einsum("nd,nd...->n...", design, models[region])
    return x, exact + noise * random.normal(size=exact.shape), exact


def steps(n, noise, seed=0):
    """A line with a jump: y = 2x below 0 and 3 - x above."""
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, size=(n, 1))
    exact = np.where(x[:, 0] < 0, 2 * x[:, 0], 3 - x[:, 0])
    return x, exact + noise * random.normal(size=n), exact
