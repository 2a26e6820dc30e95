"""Predicted distributions of tokens: their losses, and how far one is from another.

next_token_losses    loss of each predicted token
kl_divergence        KL(p ‖ q) of two predictions, from logits
Predictions          predictions that several others are compared with, one after the other
k3_divergence        terms whose mean under p is KL(p ‖ q), from log-probabilities
"""

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 1 << 19
"""Numbers of a distribution that are held in float64 at a time, so that they stay in the cache."""


def next_token_losses(
    logits: Float[Tensor, "rows length words"], ids: Int[Tensor, "rows length"]
) -> Float[Tensor, "rows predicted"]:
    """Loss of every token but the first of each row, in float64 on the CPU."""
    targets = ids[:, 1:].to(logits.device)
    losses = [
        torch.nn.functional.cross_entropy(row[:-1].float(), target, reduction="none")
        for row, target in zip(logits, targets, strict=True)  # logits are large: no second copy
    ]
    return torch.stack(losses).double().cpu()


def kl_divergence(
    clean: Float[Tensor, "rows length words"], other: Float[Tensor, "rows length words"]
) -> Float[Tensor, "rows length"]:
    """KL(clean ‖ other) of each token's prediction, in nats and float64, from logits."""
    return Predictions(clean).divergence(other)


class Predictions:
    """Predicted distributions of tokens that others are compared with, one after the other.

    Args:
        logits: logits of each token.
        keep: whether probabilities and their logarithms, each twice the bytes of float32 logits,
            are computed once.
    """

    def __init__(self, logits: Float[Tensor, "rows length words"], keep: bool = False) -> None:
        self.logits, self._keep = logits, keep
        self._kept: list[tuple[Tensor, Tensor]] = []

    def divergence(self, other: Float[Tensor, "rows length words"]) -> Float[Tensor, "rows length"]:
        """KL(p ‖ q) = Σ_w p_w (log p_w - log q_w) of each token, q from these logits, in nats."""
        chunks = self._chunks(other)
        rows_kl = []
        for (p, log_p), after in zip(self._distributions(), chunks, strict=True):
            q = after.double().log_softmax(dim=-1)
            rows_kl.append(torch.sub(log_p, q, out=q).mul_(p).sum(dim=-1).clamp_(min=0).cpu())
        return torch.cat(rows_kl).view(other.shape[:2])

    def _chunks(self, logits: Tensor) -> tuple[Tensor, ...]:
        """Logits of some tokens at a time."""
        rows = max(2, CHUNK // logits.shape[2])  # threads would share the sum of a single row
        return logits.flatten(0, 1).split(rows)

    def _distributions(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Probabilities and their logarithms of some tokens at a time, in float64."""
        if self._kept:
            return self._kept
        logarithms = (x.double().log_softmax(dim=-1) for x in self._chunks(self.logits))
        computed = ((log_p.exp(), log_p) for log_p in logarithms)
        if self._keep:
            computed = self._kept = list(computed)
        return computed


def k3_divergence(
    log_p: Float[Tensor, "*shape"], log_q: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return r - 1 - log r >= 0 with r = q/p, whose mean under p is KL(p ‖ q)."""
    difference = log_q - log_p
    return difference.expm1() - difference
