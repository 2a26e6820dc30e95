"""Predicted distributions of tokens: their losses, and how far one is from another."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK = 1 << 16
"""Numbers of a distribution that are held in float64 at a time, so that they stay in the cache."""
MOST_KEPT = 32 << 20
"""Bytes of the distributions of a pass in float64 up to which they are kept for comparisons."""


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
    """KL(p ‖ q) = Σ_w p_w (x_w - y_w) + L(y) - L(x) of each token's prediction, in nats.

    x and y are the logits of p and q, and L(x) = log Σ_w exp x_w, in float64. Equal logits have the
    divergence 0 exactly.

    Args:
        clean: logits x of p.
        other: logits y of q.
    """
    chunks = zip(_split_tokens(clean), _split_tokens(other), strict=True)
    return torch.cat([_chunk_divergence(x, y).cpu() for x, y in chunks]).view(other.shape[:2])


class ComparedPredictions:
    """Predictions that several others are compared with: p and L(x) are computed once."""

    def __init__(self, logits: Float[Tensor, "rows length words"]) -> None:
        """Keep p and L(x) of every token, unless p is large."""
        self._logits = logits
        is_small = torch.float64.itemsize * logits.numel() <= MOST_KEPT
        chunks = _split_tokens(logits) if is_small else ()
        self._distributions = [_distributions(x.double()) for x in chunks]

    def divergence(self, other: Float[Tensor, "rows length words"]) -> Float[Tensor, "rows length"]:
        """The `kl_divergence` of each token's prediction to another."""
        if not self._distributions:
            return kl_divergence(self._logits, other)
        chunks = _split_tokens(self._logits), _split_tokens(other), self._distributions
        divergences = [_chunk_divergence(*chunk).cpu() for chunk in zip(*chunks, strict=True)]
        return torch.cat(divergences).view(other.shape[:2])


def _split_tokens(logits: Float[Tensor, "rows length words"]) -> tuple[Tensor, ...]:
    """Logits of some tokens at a time, views of about `CHUNK` numbers."""
    rows = max(2, CHUNK // logits.shape[2])  # threads would share the sum of a single row
    return logits.flatten(0, 1).split(rows)


def _chunk_divergence(
    clean: Float[Tensor, "tokens words"],
    other: Float[Tensor, "tokens words"],
    distributions: tuple[Tensor, Tensor] | None = None,
) -> Float[Tensor, " tokens"]:
    """KL of each token of a chunk (`kl_divergence`), whose p and L(x) may be known."""
    x, y = (logits.to(torch.float64, copy=True) for logits in (clean, other))
    p, normaliser = distributions or _distributions(x)
    shift = y.logsumexp(dim=-1) - normaliser
    change = torch.sub(x, y, out=y)  # in place: fresh memory costs more than the arithmetic
    return change.mul_(p).sum(dim=-1).add_(shift).clamp_(min=0)


def _distributions(x: Float[Tensor, "tokens words"]) -> tuple[Tensor, Tensor]:
    """Distribution p and normaliser L(x) of each token."""
    normaliser = x.logsumexp(dim=-1)
    return torch.sub(x, normaliser[:, None]).exp_(), normaliser


def k3_divergence(
    log_p: Float[Tensor, "*shape"], log_q: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Return Schulman's k3 estimates of KL(p ‖ q): r - 1 - log r >= 0 with r = q/p.

    Their mean under p is KL(p ‖ q).
    """
    difference = log_q - log_p
    return difference.expm1() - difference
