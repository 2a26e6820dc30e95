"""Distances of the predictions of two runs, token by token and in the mean.

With d_v = log P_B(v) - log P_A(v) and k3(d) = e^d - 1 - d:

    k3 at the text      k3(d_x), x the next token of the text
    KL(A ‖ B)           Σ_v P_A(v) k3(d_v) = Σ_v P_A(v) (-d_v)

The terms of the sum of k3 are nonnegative, so distances far below the rounding of the
log-probabilities are not lost. All sums are in float64.

The share of routing in the KL, from runs of B that replay A's routes:

    KL(A ‖ B)         B as it is
    KL(A ‖ B_ids)     B takes the experts that A chose, weighted by B's own router
    KL(A ‖ B_both)    B takes A's experts and A's combine weights

The decrease from the first to the second is the share of flips, that from the second to the third
is the share of combine weights, and the third is the rest: attention, experts, norms.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from tieline.analysis.comparison import ComparedRuns
from tieline.analysis.diff_records import LogitsDiff, ReplaySplit, SplitPart
from tieline.core.errors import TielineError, UnsupportedModelError, require
from tieline.core.predictions import k3_divergence
from tieline.core.statistics import Estimate, clustered_error
from tieline.core.text import layer_label
from tieline.models.families import find_routers
from tieline.run.condition import ChoiceMode
from tieline.run.observers import Observer, Outcome
from tieline.run.plan import Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner

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
    broken = [name for name, x in tensors if not x.is_meta and _has_nonfinite(x)]
    if broken:
        return f": {len(broken)} tensors of the model are not finite, {broken[0]!r} first"
    routers = list(find_routers(model))
    return f": it began after the scores of {layer_label(routers[-1])}, the last with a router"


def _has_nonfinite(values: Tensor) -> bool:
    """Whether a tensor has a NaN or an infinite value."""
    return values.is_floating_point() and not bool(values.isfinite().all())


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


REPLAY_CHOICES: dict[str, ChoiceMode] = {"live": "own", "ids": "live", "both": "recorded"}
"""Choice mode of B for each field of `ReplaySplit`."""


def replay_split(a: Any, b: Any, ranks: Ranks, progress: Progress | None = None) -> ReplaySplit:
    """Measure KL(A ‖ B) live, with A's experts, and with A's experts and weights replayed in B.

    Args:
        a: the side whose routes are replayed, a `compared_sides.ModelSide`.
        b: the other side, which may be the same model in another format.
        ranks: the batches, each row a document, and how processes share them.
        progress: called with stage, done and total.
    """
    unshared = sorted({*find_routers(a.model)} ^ {*find_routers(b.model)})
    require(
        not unshared,
        f"routes are replayed by the names of routers, and {unshared[:3]} are in one model only",
        UnsupportedModelError,
    )
    passes: list[Pass] = []
    names: dict[Pass, str] = {}
    for number in ranks.numbered:
        first = Pass(number, a.condition)
        runs = {
            Pass(number, b.condition.taking(choice), first, model=1): name
            for name, choice in REPLAY_CHOICES.items()
        }
        passes += [first, *runs]
        names |= runs
    distances = _ReplayDistances(names, ranks.documents)
    plan = Plan((Phase("replay", ranks.numbered, tuple(passes)),))
    Runner(a.runner_model, b.runner_model, ranks=ranks).run(plan, [distances], progress)
    return distances.split()


class _ReplayDistances(Observer):
    """KL(A ‖ B) at every token, for each choice mode of B."""

    def __init__(self, names: Mapping[Pass, str], first_document: int) -> None:
        self._names, self._documents = names, first_document
        empty = torch.empty(0, dtype=torch.float64, device="cpu")
        self._columns = {name: [empty] for name in REPLAY_CHOICES}
        self._rows: list[Tensor] = [torch.empty(0, dtype=torch.int64, device="cpu")]
        self._changed = 0
        self._joined: dict[str, Tensor] = {}

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Compare a pass of B with that of A."""
        name = self._names.get(run)
        if name is None or run.reference is None:
            return
        assert outcome.logits is not None
        logits = outcome.references[run.reference][:, :-1], outcome.logits[:, :-1]
        self._columns[name].append(_row_kl(logits[0].flatten(0, 1), logits[1].flatten(0, 1)))
        if name == "ids":
            self._changed += sum(outcome.changed.values())
            rows, length = outcome.ids.shape
            numbers = torch.arange(self._documents, self._documents + rows, device="cpu")
            self._rows.append(numbers[:, None].expand(-1, length - 1).reshape(-1))
            self._documents += rows

    def join(self, ranks: Ranks) -> None:
        """Gather the distances of all processes."""
        local = {name: torch.cat(values) for name, values in self._columns.items()}
        local |= {
            "documents": torch.cat(self._rows),
            "changed": torch.tensor([self._changed], device="cpu"),
        }
        self._joined = ranks.join_rows(local)

    def split(self) -> ReplaySplit:
        """Mean KL for each choice mode, after all passes."""
        groups = self._joined["documents"]
        columns = {name: self._joined[name] for name in REPLAY_CHOICES}
        means = {
            name: SplitPart(values.mean().item(), clustered_error(values, groups))
            for name, values in columns.items()
        }
        changed = int(self._joined["changed"].sum())
        return ReplaySplit(**means, tokens=len(groups), changed=changed)


def _row_kl(a: Tensor, b: Tensor) -> Float[Tensor, " tokens"]:
    """KL(A ‖ B) of each row of logits, in float64."""
    chunks = zip(a.split(ROWS_AT_ONCE), b.split(ROWS_AT_ONCE), strict=True)
    logs = ([x.double().cpu().log_softmax(1) for x in pair] for pair in chunks)
    return torch.cat([(log_a.exp() * k3_divergence(log_a, log_b)).sum(1) for log_a, log_b in logs])
