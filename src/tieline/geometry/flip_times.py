"""How long a random walk of a model's hidden state takes to change its experts, token by token.

    score_flip_times    P(flip by t) of each token from its scores and the router's weight
    trace_flip_times    the same for the tokens of a recorded layer

The hidden state moves by σ dB. Three numbers per token and time: the lower bound of Paper 1,
Thm 5.1, a simulation with its standard error, and the union bound.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.errors import TraceError, require
from tieline.geometry.diffusion import exit_curve, top_k_cell
from tieline.geometry.exit_time import exit_bounds, face_quantile
from tieline.geometry.kinds import Real
from tieline.numerics import one_thread
from tieline.trace.record import LayerTrace

__all__ = ["FlipTimes", "score_flip_times", "trace_flip_times"]


@dataclass(frozen=True, eq=False)
class FlipTimes:
    """Distribution of the time to the first flip of each token.

    Attributes:
        times: t, ascending, in units in which the state moves by σ per unit of √t.
        lower: lower bound of P(flip by t), (T, times).
        value: P(flip by t), simulated.
        stderr: standard error of `value`.
        upper: upper bound.
        nearest: r_min of each token; its flip time has a median of at most (r_min / .6745)².
        paths: paths per token.
    """

    times: Float[Tensor, " times"]
    lower: Float[Tensor, "tokens times"]
    value: Float[Tensor, "tokens times"]
    stderr: Float[Tensor, "tokens times"]
    upper: Float[Tensor, "tokens times"]
    nearest: Float[Tensor, " tokens"]
    paths: int

    def median_bound(self) -> Float[Tensor, " tokens"]:
        """Time by which each token has flipped with probability ½ or more: (r_min / .6745)²."""
        return face_quantile(self.nearest, 0.5)


def score_flip_times(
    scores: Float[Tensor, "tokens experts"],
    W: Float[Tensor, "experts width"],
    k: int,
    horizon: Real,
    *,
    sigma: Real | Float[Tensor, "width width"] = 1.0,
    steps: int = 16,
    paths: int = 2000,
    seed: int = 0,
) -> FlipTimes:
    """P(flip by t) at `steps` times up to the horizon, for each token.

    Args:
        scores: (T, E) scores z = W x + b of the unperturbed states, none of them a tie.
        W: router weight.
        k: number of experts chosen.
        horizon: last time.
        sigma: noise of the state per unit of √t, invertible.
        steps: number of times.
        paths: paths per token.
        seed: of the generator; tokens have the same noise, which makes their comparison sharper.
    """
    require(len(scores) > 0, "flip times need a token, got none")
    curves, lower, upper, nearest = [], [], [], []
    with one_thread():
        for row in scores:
            cell = top_k_cell(row, W, k, sigma)
            curve = exit_curve(cell, horizon, steps, paths, seed)
            bounds = exit_bounds(cell.distances, curve.times)
            curves.append(curve)
            lower.append(bounds.lower)
            upper.append(bounds.upper)
            nearest.append(cell.distances.min())
    return FlipTimes(
        curves[0].times,
        torch.stack(lower),
        torch.stack([curve.value for curve in curves]),
        torch.stack([curve.stderr for curve in curves]),
        torch.stack(upper),
        torch.stack(nearest),
        paths,
    )


def trace_flip_times(
    layer: LayerTrace,
    W: Float[Tensor, "experts width"],
    horizon: Real,
    *,
    tokens: int = 256,
    sigma: Real | Float[Tensor, "width width"] = 1.0,
    steps: int = 16,
    paths: int = 2000,
    seed: int = 0,
) -> FlipTimes:
    """`score_flip_times` of the first `tokens` tokens of a recorded layer that are not ties.

    Args:
        layer: a layer whose scores are affine in its input, all E ranks kept, no groups.
        W: the weight of its router, (E, D).
        horizon: last time.
        tokens: number of tokens.
        sigma: noise of the state per unit of √t, invertible.
        steps: number of times.
        paths: paths per token.
        seed: of the generator.
    """
    facts, scores = layer.facts, layer.scores
    require(
        facts.affine, f"{layer.name}: scores that are not affine have no flat faces", TraceError
    )
    require(facts.n_groups == 1, f"{layer.name}: {facts.n_groups} groups are no top-k", TraceError)
    ranks = 0 if scores is None else scores.shape[1]
    require(
        scores is not None and ranks == facts.n_experts,
        f"{layer.name}: needs all {facts.n_experts} ranks, the trace keeps {ranks}",
        TraceError,
    )
    assert scores is not None
    by_expert = torch.zeros(scores.shape, dtype=torch.float64)
    by_expert.scatter_(1, layer.experts.long(), scores.double())
    clear = scores[:, facts.k - 1] > scores[:, facts.k]
    chosen = by_expert[clear][:tokens]
    return score_flip_times(
        chosen, W, facts.k, horizon, sigma=sigma, steps=steps, paths=paths, seed=seed
    )
