"""How much of the distance between two runs is routing: the same run with routes replayed.

    KL(A ‖ B)         B as it is
    KL(A ‖ B_ids)     B takes the experts that A chose, weighted by B's own router
    KL(A ‖ B_both)    B takes A's experts and A's combine weights

What the first loses to the second is the share of flips, what the second loses to the third that of
combine weights, and the rest is everything else: attention, experts, norms.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.core.statistics import clustered_error, k3
from tieline.models.capture import capture
from tieline.models.emulate import emulate
from tieline.models.replay import replay
from tieline.models.running import forward, only_running
from tieline.run.processes import Ranks
from tieline.trace.record import RoutingTrace

ROWS = 128
"""Tokens at a time whose distributions are held in float64."""

Weights = Literal["live", "recorded"]
WEIGHTS: dict[str, Weights | None] = {"live": None, "ids": "live", "both": "recorded"}
"""The weights with which routes are replayed, by part of the split."""


@dataclass(frozen=True)
class SplitPart:
    """Mean KL(A ‖ B) over predicted tokens, in nats.

    Attributes:
        kl: the mean.
        error: standard error, clustered by document; None for one document.
    """

    kl: float
    error: float | None


@dataclass(frozen=True)
class ReplaySplit:
    """The distance of two runs with and without A's routes replayed in B.

    Attributes:
        live: B as it is.
        ids: B with A's experts.
        both: B with A's experts and combine weights.
        tokens: predicted tokens.
        changed: choices of all layers that replay changed.
    """

    live: SplitPart
    ids: SplitPart
    both: SplitPart
    tokens: int
    changed: int

    @property
    def by_ids(self) -> float:
        """Share of the KL that replaying experts removes."""
        return 1 - self.ids.kl / self.live.kl if self.live.kl else 0.0

    @property
    def by_both(self) -> float:
        """Share of the KL that replaying experts and weights removes."""
        return 1 - self.both.kl / self.live.kl if self.live.kl else 0.0


def replay_split(
    a: Any,
    b: Any,
    batches: Iterable[Tensor],
    progress: Callable[[int], None] | None = None,
    share: Ranks | None = None,
) -> ReplaySplit:
    """Measure KL(A ‖ B) live, with A's experts, and with A's experts and weights replayed in B.

    Args:
        a: the run whose routes are replayed, with `model`, `emulated` and `parts`.
        b: the other run; may be the same model in another format.
        batches: token ids (rows, length); each row is a document.
        progress: called with the tokens done after each batch.
        share: what this process has of all batches; by default it has them all.
    """
    share = share or Ranks(None, ())
    columns: dict[str, list[Tensor]] = {"live": [], "ids": [], "both": []}
    documents, first, changed = [], share.documents, 0
    for ids in batches:
        trace, logits_a = _recorded(a, ids)
        for name in columns:
            logits_b, count = _replayed(b, ids, trace, WEIGHTS[name])
            changed += count if name == "ids" else 0
            columns[name].append(_distances(logits_a, logits_b))
        rows = torch.arange(first, first + len(ids))
        documents.append(rows[:, None].expand(-1, ids.shape[1] - 1).reshape(-1))
        first += len(ids)
        if progress is not None:
            progress(ids.numel())
    own = {name: torch.cat(values) for name, values in columns.items()}
    own |= {"documents": torch.cat(documents), "changed": torch.tensor([changed])}
    found = share.join_rows(own)
    groups, changed = found["documents"], int(found["changed"].sum())
    parts = {name: _part(found[name], groups) for name in columns}
    return ReplaySplit(**parts, tokens=len(groups), changed=changed)


def _part(values: Float[Tensor, " tokens"], documents: Int[Tensor, " tokens"]) -> SplitPart:
    return SplitPart(values.mean().item(), clustered_error(values, documents))


def _format(side: Any) -> AbstractContextManager[None]:
    if side.emulated is None:
        return nullcontext()
    return emulate(side.model, side.emulated, side.parts)


def _recorded(side: Any, ids: Tensor) -> tuple[RoutingTrace, Tensor]:
    """Routes and logits of a run."""
    options: dict[str, Any] = {"distances": False, "epsilons": ()}
    with only_running(side.model), _format(side), capture(side.model, **options) as recorder:
        logits = forward(side.model, ids).logits
    return recorder.trace(), logits


def _replayed(
    side: Any, ids: Tensor, trace: RoutingTrace, weights: Weights | None
) -> tuple[Tensor, int]:
    """Logits of a run that replays routes, or none, and the choices that replay changed."""
    with only_running(side.model), _format(side):  # formats first: they try the routers once
        if weights is None:
            return forward(side.model, ids).logits, 0
        with replay(side.model, trace, weights) as replayed:
            logits = forward(side.model, ids).logits
    return logits, sum(replayed.changed.values())


def _distances(a: Tensor, b: Tensor) -> Float[Tensor, " tokens"]:
    """KL(A ‖ B) at every token that predicts one, in float64."""
    flat = [logits[:, :-1].flatten(0, 1) for logits in (a, b)]
    return torch.cat([*_chunks(flat[0], flat[1])])


def _chunks(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    for rows in torch.arange(len(a)).split(ROWS):
        log_a, log_b = (x[rows].double().cpu().log_softmax(1) for x in (a, b))
        yield (log_a.exp() * k3(log_a, log_b)).sum(1)
