"""Is U = margin_A / (margin_A + margin_B) of single swaps uniform: by laws of noise, and in bf16.

    python -m benchmarks.single_swaps [--draws 40] [--documents 64] [--json FILE]

A token swaps if one expert i leaves its set and one expert j enters; margin_A = z_A(i) - z_A(j),
margin_B = z_B(j) - z_B(i). Only swaps with margin_A + margin_B below the 20 % quantile of the gap
count. All is computed here, by NumPy in float64, without the package's own test.

noises    scores N(0, 1), 16 experts, top-4; U of all draws together, and how many of the draws
          have a Kolmogorov-Smirnov p-value below 5 %
bf16      float32 against native bfloat16 of four models. *before rounding*: scores recomputed in
          float64 from each run's own router input and weights, and ranked; *as ranked*: those that
          the run itself ranked, whose grid puts many margins at zero
"""

import argparse
import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from scipy import stats
from torch import nn
from transformers.utils import logging

from benchmarks.blind.models import subject
from benchmarks.blind.precisions import cast
from benchmarks.blind.texts import documents
from tieline.models import find_routers

Scores = Float[np.ndarray, "tokens experts"]

TOKENS, EXPERTS, K, NOISE = 20_000, 16, 4, 0.02
QUANTILE = 0.2
MODELS = {
    "demo": 2,
    "mixtral 2 of 8": 2,
    "qwen3_moe 8 of 128": 8,
    "qwen2_moe 4 of 32, shared, trained": 4,
}
"""Kinds of models of the blind protocol, and their k."""


class Swaps(NamedTuple):
    """Single swaps of small margins.

    Attributes:
        u: margin_A / (margin_A + margin_B).
        zero: share of them in which a margin is exactly zero.
    """

    u: Float[np.ndarray, " swaps"]
    zero: float


def chosen(scores: Scores, k: int) -> np.ndarray:
    """Return which experts are among the k largest; a tie goes to the lower number."""
    mask = np.zeros(scores.shape, bool)
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    np.put_along_axis(mask, order, True, axis=1)
    return mask


def single_swaps(a: Scores, b: Scores, k: int) -> Swaps:
    """Return U of the single swaps between two tables of scores."""
    in_a, in_b = chosen(a, k), chosen(b, k)
    leaves, enters = in_a & ~in_b, in_b & ~in_a
    tokens = np.flatnonzero(leaves.sum(1) == 1)
    leaver, enterer = leaves[tokens].argmax(1), enters[tokens].argmax(1)
    of_a = a[tokens, leaver] - a[tokens, enterer]
    of_b = b[tokens, enterer] - b[tokens, leaver]
    ranked = np.sort(a, axis=1)
    limit = np.quantile(ranked[:, -k] - ranked[:, -k - 1], QUANTILE)
    small = (of_a + of_b > 0) & (of_a + of_b <= limit)
    of_a, of_b = of_a[small], of_b[small]
    zero = float((np.minimum(of_a, of_b) == 0).mean()) if len(of_a) else 0.0
    return Swaps(of_a / (of_a + of_b), zero)


def uniform_p(u: np.ndarray) -> float:
    """Return the Kolmogorov-Smirnov p-value of uniformity."""
    return float(stats.kstest(u, "uniform").pvalue)


Draw = Callable[[np.random.Generator], Scores]
SHAPE = (TOKENS, EXPERTS)


def spikes(rate: float, factor: float) -> Draw:
    """Normal noise in which one score in 1 / rate has `factor` times as much."""
    return lambda g: g.normal(size=SHAPE) * np.where(g.random(SHAPE) < rate, factor, 1.0)


NOISES: dict[str, Draw] = {
    "normal": lambda g: g.normal(size=SHAPE),
    "Laplace": lambda g: g.laplace(size=SHAPE),
    "uniform": lambda g: g.uniform(-2, 2, size=SHAPE),
    "t3": lambda g: g.standard_t(3, size=SHAPE),
    "t2.5": lambda g: g.standard_t(2.5, size=SHAPE),
    "spikes 1e-2 x 30": spikes(1e-2, 30),
    "spikes 1e-2 x 100": spikes(1e-2, 100),
    "spikes 1e-3 x 100": spikes(1e-3, 100),
    "token scales": lambda g: g.normal(size=SHAPE) * g.gamma(1, 1, (TOKENS, 1)),
    "shared by experts": lambda g: (
        g.normal(size=(TOKENS, 3)) @ g.normal(size=(3, EXPERTS)) / 2 + g.normal(size=SHAPE) / 2
    ),
}


def noise_row(name: str, draws: int) -> dict[str, Any]:
    """Return the test of one law of noise."""
    swaps = []
    for seed in range(draws):
        generator = np.random.default_rng([seed, sorted(NOISES).index(name)])
        scores = generator.normal(size=SHAPE)
        swaps.append(single_swaps(scores, scores + NOISE * NOISES[name](generator), K).u)
    below = sum(uniform_p(u) < 0.05 for u in swaps)
    pooled = np.concatenate(swaps)
    p, mean = uniform_p(pooled), float(pooled.mean())
    row = {"noise": name, "swaps": len(pooled), "p": p, "mean": mean}
    return row | {"draws": draws, "below 5 %": below}


@torch.no_grad()
def router_scores(model: Any, ids: torch.Tensor) -> dict[str, list[Scores]]:
    """Return the scores of every router, before rounding and as the run ranked them."""
    inputs: list[list[Scores]] = [[], []]
    hooks = []

    def keep(router: nn.Module, args: Any, output: Any) -> None:
        states, weight = args[0], router.get_parameter("weight")
        states = states.reshape(-1, weight.shape[1])
        rounded = nn.functional.linear(states, weight)  # as the family computes it
        inputs[0].append((states.double() @ weight.double().T).numpy())
        inputs[1].append(rounded.double().numpy())

    for router in find_routers(model).values():
        hooks.append(router.register_forward_hook(keep))
    model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return dict(zip(("before rounding", "as ranked"), inputs, strict=True))


def model_rows(name: str, count: int) -> list[dict[str, Any]]:
    """Return the tests of one model, float32 against native bfloat16."""
    model, tokenizer = subject(name, 101)
    ids = documents(tokenizer, "development", count, 128, 77)
    coarse = deepcopy(model)
    cast(coarse, torch.bfloat16)
    exact, rounded = (router_scores(x, ids) for x in (model, coarse))
    rows = []
    for scores in exact:
        pairs = zip(exact[scores], rounded[scores], strict=True)
        layers = [single_swaps(a, b, MODELS[name]) for a, b in pairs]
        u = np.concatenate([layer.u for layer in layers])
        zero = sum(layer.zero * len(layer.u) for layer in layers) / max(len(u), 1)
        row = {"model": name, "scores": scores, "swaps": len(u), "p": uniform_p(u)}
        rows.append(row | {"mean": float(u.mean()), "zero": zero})
    return rows


def main() -> None:
    """Print one line of JSON per law of noise and per model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--documents", type=int, default=64, help="of 128 tokens, for the models")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    rows = []
    for name in NOISES:
        rows.append(noise_row(name, options.draws))
        print(json.dumps(rows[-1]), flush=True)
    for name in MODELS:
        rows += model_rows(name, options.documents)
        print(*map(json.dumps, rows[-2:]), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
