"""Distances of the predictions of two runs, token by token and in the mean.

With d_v = log P_B(v) - log P_A(v) and k3(d) = e^d - 1 - d:

    k3 at the text      k3(d_x), x the next token of the text
    KL(A ‖ B)           Σ_v P_A(v) k3(d_v) = Σ_v P_A(v) (-d_v)

The terms of the sum of k3 are nonnegative, so distances far below the rounding of the
log-probabilities are not lost. All sums are in float64.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tieline.analysis.comparison import ComparedRuns
from tieline.analysis.diff_records import LogitsDiff
from tieline.core.errors import TielineError
from tieline.core.predictions import k3_divergence
from tieline.core.statistics import Estimate, clustered_error
from tieline.core.text import layer_label
from tieline.models.families import find_routers
from tieline.models.weight_checks import is_finite_tensor
from tieline.run.observers import Observer, Outcome
from tieline.run.plan import Pass
from tieline.run.ranks import Ranks

ROWS_AT_ONCE = 128
"""Tokens whose distributions are held in float64 at a time."""


class TokenDistances(NamedTuple):
    """k3 and KL of the predictions and both losses, per token; NaN at the last of a sequence."""

    k3: Float[Tensor, " tokens"]
    kl: Float[Tensor, " tokens"]
    loss_a: Float[Tensor, " tokens"]
    loss_b: Float[Tensor, " tokens"]

    @classmethod
    def joined(cls, batches: "Sequence[TokenDistances]") -> "TokenDistances":
        """The distances of all batches, one after the other."""
        return cls(*(torch.cat(column) for column in zip(*batches, strict=True)))


def check_logits(
    logits: Float[Tensor, "rows length vocabulary"], side: str, model: nn.Module | None = None
) -> None:
    """Raise if logits are NaN or +inf; -inf excludes a token from the vocabulary.

    Args:
        logits: the logits of a batch.
        side: "A" or "B".
        model: the model, whose layers and weights the error names.
    """
    if logits.amax(-1).sum().isfinite():  # the maximum of a row with a NaN is NaN
        return
    wrong = ~logits.amax(-1).isfinite()
    if not bool(wrong.any()):
        return
    row, position = (int(x) for x in wrong.nonzero()[0])
    raise TielineError(
        f"the logits of {side} are NaN or infinite at {int(wrong.sum())} of {wrong.numel()} tokens "
        f"of a batch, first at token {position} of its row {row}{_nonfinite_origin(model)}"
    )


def _nonfinite_origin(model: nn.Module | None) -> str:
    """Names the first tensor that is not finite or, if all are, the last router."""
    if model is None:
        return ""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    broken = [name for name, x in tensors if not x.is_meta and not is_finite_tensor(x)]
    if broken:
        return f": {len(broken)} tensors of the model are not finite, {broken[0]!r} first"
    routers = list(find_routers(model))
    return f": it began after the scores of {layer_label(routers[-1])}, the last with a router"


def token_distances(
    logits_a: Float[Tensor, "rows length vocabulary"],
    logits_b: Float[Tensor, "rows length vocabulary"],
    ids: Int[Tensor, "rows length"],
) -> TokenDistances:
    """Distances at every token of a batch, row by row."""
    following = torch.cat((ids[:, 1:], torch.zeros_like(ids[:, :1])), dim=1).flatten()
    flat = logits_a.flatten(0, 1), logits_b.flatten(0, 1), following
    chunks = [
        _row_distances(*rows) for rows in zip(*(x.split(ROWS_AT_ONCE) for x in flat), strict=True)
    ]
    last = torch.zeros(ids.shape, dtype=torch.bool, device="cpu")
    last[:, -1] = True
    joined = TokenDistances.joined(chunks)
    return TokenDistances(*(column.masked_fill(last.flatten(), torch.nan) for column in joined))


def _row_distances(a: Tensor, b: Tensor, target: Tensor) -> TokenDistances:
    """Distances of rows of logits."""
    log_a, log_b = (logits.double().cpu().log_softmax(1) for logits in (a, b))
    index = target.cpu()[:, None]
    loss_a, loss_b = (-x.gather(1, index).squeeze(1) for x in (log_a, log_b))
    terms = k3_divergence(log_a, log_b)
    if bool(terms.sum().isnan()):  # tokens that both exclude from the vocabulary
        terms = terms.masked_fill(log_a.isneginf() & log_b.isneginf(), 0.0)
    k3 = terms.gather(1, index).squeeze(1)
    kl = log_a.exp_().mul_(terms).sum(1)
    return TokenDistances(k3, kl, loss_a, loss_b)


def logits_diff(
    distances: TokenDistances, flipped: Bool[Tensor, " tokens"], documents: Int[Tensor, " tokens"]
) -> LogitsDiff | None:
    """Means, standard errors and tails over the tokens with a next token; None if there are none.

    Args:
        distances: distances of every token.
        flipped: tokens that flip in at least one layer.
        documents: document of each token.
    """
    predicted = ~distances.kl.isnan()
    if not bool(predicted.any()):
        return None
    values = TokenDistances(*(column[predicted] for column in distances))
    groups, is_flipped = documents[predicted], flipped[predicted]
    return LogitsDiff(
        k3=values.k3.mean().item(),
        k3_error=clustered_error(values.k3, groups),
        kl=values.kl.mean().item(),
        kl_error=clustered_error(values.kl, groups),
        kl_p99=float(np.quantile(values.kl.numpy(), 0.99, method="inverted_cdf")),
        kl_flipped=_mean_or_none(values.kl[is_flipped]),
        kl_unflipped=_mean_or_none(values.kl[~is_flipped]),
        loss_a=values.loss_a.mean().item(),
        loss_b=values.loss_b.mean().item(),
        tokens=int(predicted.sum()),
        loss_error=clustered_error(values.loss_b - values.loss_a, groups),
        kl_before=_mean_or_none(distances.kl[predicted & before_flips(flipped, documents)]),
    )


def before_flips(
    flipped: Bool[Tensor, " tokens"], documents: Int[Tensor, " tokens"]
) -> Bool[Tensor, " tokens"]:
    """Mask of the tokens before the first flip of their document; documents are contiguous."""
    count = flipped.long().cumsum(0)
    starts = torch.ones_like(flipped)
    starts[1:] = documents[1:] != documents[:-1]
    earlier = (count - flipped.long())[starts]
    return count == earlier[starts.long().cumsum(0) - 1]


def _mean_or_none(values: Tensor) -> float | None:
    """Mean of the values; None if there are none."""
    return values.mean().item() if len(values) else None


PairedPasses = tuple[tuple[Pass, ...], tuple[Pass, ...]]
"""Passes of A and of B over the same sequences."""


class DistanceObserver(Observer):
    """Compares the predictions of two models, batch by batch.

    A pass with a reference is compared with it. If A and B run the same sequences in passes of
    different sizes, `split` lists the passes over the same sequences, in order. `models` are A and
    B, for errors that name a weight.

    Attributes:
        distances: distances of all batches; None for models with different vocabularies.
    """

    def __init__(
        self, split: Sequence[PairedPasses] = (), models: Sequence[nn.Module] = ()
    ) -> None:
        self.distances: list[TokenDistances] | None = []
        self._models = models or (None, None)
        self._split = {run: rows for rows in split for side in rows for run in side}
        self._ended: dict[Pass, Outcome] = {}

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Compare a pass with its reference, or all passes over the same sequences at the last."""
        if run.reference is not None:
            self._compare(outcome.references.get(run.reference), outcome.logits, outcome.ids)
        if run not in self._split:
            return
        self._ended[run] = outcome
        sides = self._split[run]
        if all(other in self._ended for side in sides for other in side):
            ended = [[self._ended.pop(other) for other in side] for side in sides]
            logits_a, logits_b = (_joined_logits(side) for side in ended)
            self._compare(logits_a, logits_b, torch.cat([x.ids for x in ended[0]]))

    def _compare(self, a: Any, b: Any, ids: Tensor) -> None:
        """Append the distances of a batch; `distances` is None if the shapes differ."""
        is_comparable = isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape
        if not is_comparable or a.shape[:2] != ids.shape:
            self.distances = None
        elif self.distances is not None:
            for logits, side, model in zip((a, b), "AB", self._models, strict=True):
                check_logits(logits, side, model)
            self.distances.append(token_distances(a, b, ids))

    def join(self, ranks: Ranks) -> None:
        """Gather the distances of all batches from all processes."""
        if self.distances:
            columns = TokenDistances.joined(self.distances)._asdict()
            self.distances = [TokenDistances(**ranks.join_rows(columns))]


def _joined_logits(outcomes: Sequence[Outcome]) -> Tensor | None:
    """Logits of several passes as one batch; None if a pass has none."""
    logits = [outcome.logits for outcome in outcomes]
    present = [values for values in logits if values is not None]
    return torch.cat(present) if len(present) == len(logits) else None


def compared_logits(
    compared: ComparedRuns, distances: list[TokenDistances] | None
) -> LogitsDiff | None:
    """Summary of the distances at the compared tokens of A; None without distances."""
    if not distances:
        return None
    tokens = compared.aligned.common.in_a
    columns = (column[tokens] for column in TokenDistances.joined(distances))
    return logits_diff(TokenDistances(*columns), compared.flips.any(0), compared.documents)


def mean_kl(distances: list[TokenDistances] | None, documents: Tensor) -> Estimate | None:
    """Mean KL over all tokens of a run, clustered by document; None without predictions.

    Args:
        distances: distances of its batches.
        documents: document of each token (T,), in the same order.
    """
    if not distances:
        return None
    kl = torch.cat([batch.kl for batch in distances])
    predicted = ~kl.isnan()
    if not bool(predicted.any()):
        return None
    return Estimate(
        kl[predicted].mean().item(), clustered_error(kl[predicted], documents[predicted])
    )
