"""Soft gates that are hardened: how far their weights are from those of top-k."""

import math

from torch import Tensor

from tieline.core.ranking import gap
from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import Evidence, at_least, at_most, near
from tieline.lab.power_law import exponent

EXPERTS = 8


def moved_weights(scores: Tensor, k: int, tau: float) -> Tensor:
    """Total variation between the weights of the gate at temperature τ and of top-k, by token."""
    from tieline.lab.training.soft_to_hard import TemperatureTopK  # loads transformers

    gate = TemperatureTopK(k, temperature=tau)
    return (gate(scores) - gate.hard()(scores)).abs().sum(dim=1) / 2


@claim("p5-hardening", "the soft-to-hard bound for top-k", number="hardening", seconds=1)
def hardening_bound(run: ClaimRun) -> Evidence:
    """With P_τ(S) ∝ exp(Σ_{i∈S} c_i/τ) over sets of k experts and w_i ∝ score(z_i) P_τ(i ∈ S), the
    weights differ from those of top-k by a total variation of at most min(1, c M e^{-Δ/τ}), with
    M = C(E, k) - 1, c = 1 for k = 1 and 2 beyond: Theorem 4.5 holds for top-k with M in place of
    E - 1, and the mean difference is O(τ) under a linear margin tail.

    Setting: normal scores of 8 experts, k from 1 to 4, τ from 0.003 to 3; the best sets have ties
    Tested: Every token against the bound; the power of τ in the mean difference; for k = 1 the
        weights against softmax(z(1 + 1/τ)).
    Overturned by: a token whose weights move by more than the bound
    """
    from tieline.lab.training.soft_to_hard import TemperatureTopK, moved_weight_bound

    scores, excess = run.normal(run.size(4_000, 40_000), EXPERTS, stream=1), -math.inf
    taus, slopes = (3.0, 1.0, 0.3, 0.1, 0.03, 0.01, 0.003), {}
    for k in (1, 2, 3, 4):
        means = []
        for tau in taus:
            moved = moved_weights(scores, k, tau)
            bound = moved_weight_bound(gap(scores, k), tau, k, EXPERTS)
            excess = max(excess, (moved - bound).max().item())
            means.append(moved.mean().item())
        slopes[k] = exponent(taus[3:], means[3:])
    soft = TemperatureTopK(1, temperature=0.2)(scores)
    apart = (soft - (6 * scores).softmax(dim=1)).abs().max().item()
    return Evidence.of(
        at_most("largest excess over the bound", excess, 0, 1e-6),
        near("k = 1: distance to softmax(z(1 + 1/τ))", apart, 0, 1e-6),
        *(near(f"power of τ, k = {k}", slope, 1, 0.2) for k, slope in slopes.items()),
        at_least("largest mean difference at τ = 3, which is soft", means[0], 0.1),
        paper="at most 0",
        measured=excess,
    )
