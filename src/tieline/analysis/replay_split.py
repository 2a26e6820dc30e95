"""How much of the distance between two runs is routing: the same run with routes replayed.

    KL(A ‖ B)         B as it is
    KL(A ‖ B_ids)     B takes the experts that A chose, weighted by B's own router
    KL(A ‖ B_both)    B takes A's experts and A's combine weights

What the first loses to the second is the share of flips, what the second loses to the third that of
combine weights, and the rest is everything else: attention, experts, norms.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.statistics import clustered_error, k3
from tieline.models.families import find_routers
from tieline.run.condition import ChoiceMode
from tieline.run.observers import Observer, Outcome
from tieline.run.plan import Pass, Phase, Plan
from tieline.run.processes import Ranks
from tieline.run.runner import Runner
from tieline.run.schedule import Progress

ROWS = 128
"""Tokens at a time whose distributions are held in float64."""

CHOICES: dict[str, ChoiceMode] = {"live": "own", "ids": "live", "both": "recorded"}
"""Whose experts B takes, with which weights, by part of the split."""


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


def replay_split(a: Any, b: Any, ranks: Ranks, progress: Progress | None = None) -> ReplaySplit:
    """Measure KL(A ‖ B) live, with A's experts, and with A's experts and weights replayed in B.

    Args:
        a: the run whose routes are replayed, with `opened` and `condition` as `diff.Side` has them.
        b: the other run; may be the same model in another format.
        ranks: the batches, each row a document, and how processes share them.
        progress: called with stage, done and total.
    """
    _check_routers(a.model, b.model)
    passes: list[Pass] = []
    names: dict[Pass, str] = {}
    for number in ranks.numbered:
        first = Pass(number, a.condition)
        runs = {
            Pass(number, b.condition.taking(choice), first, model=1): name
            for name, choice in CHOICES.items()
        }
        passes += [first, *runs]
        names |= runs
    distances = _SplitDistances(names, ranks.documents)
    plan = Plan((Phase("replay", ranks.numbered, tuple(passes)),))
    Runner(a.opened, b.opened, ranks=ranks).run(plan, [distances], progress)
    return distances.split()


def _check_routers(a: nn.Module, b: nn.Module) -> None:
    """Refuse models whose routers have other names: routes are replayed by name."""
    others = sorted({*find_routers(a)} ^ {*find_routers(b)})
    require(
        not others,
        f"routes are replayed by the names of routers, and {others[:3]} are in one model only",
        UnsupportedModelError,
    )


class _SplitDistances(Observer):
    """KL(A ‖ B) at every token, by the way in which B runs."""

    def __init__(self, names: Mapping[Pass, str], first_document: int) -> None:
        self._names, self._documents = names, first_document
        empty = torch.empty(0, dtype=torch.float64)
        self._columns = {name: [empty] for name in CHOICES}
        self._rows: list[Tensor] = [torch.empty(0, dtype=torch.int64)]
        self._changed = 0
        self._joined: dict[str, Tensor] = {}

    def on_pass_done(self, run: Pass, outcome: Outcome) -> None:
        """Compare a pass of B with that of A."""
        name = self._names.get(run)
        if name is None or run.reference is None:
            return
        assert outcome.logits is not None
        distances = _distances(outcome.references[run.reference], outcome.logits)
        self._columns[name].append(distances)
        if name == "ids":
            self._changed += sum(outcome.changed.values())
            rows, length = outcome.ids.shape
            numbers = torch.arange(self._documents, self._documents + rows)
            self._rows.append(numbers[:, None].expand(-1, length - 1).reshape(-1))
            self._documents += rows

    def join(self, ranks: Ranks) -> None:
        """Gather the distances of all processes."""
        local = {name: torch.cat(values) for name, values in self._columns.items()}
        local |= {"documents": torch.cat(self._rows), "changed": torch.tensor([self._changed])}
        self._joined = ranks.join_rows(local)

    def split(self) -> ReplaySplit:
        """The means, once all passes have ended."""
        groups = self._joined["documents"]
        means = {name: _part(self._joined[name], groups) for name in CHOICES}
        changed = int(self._joined["changed"].sum())
        return ReplaySplit(**means, tokens=len(groups), changed=changed)


def _part(values: Float[Tensor, " tokens"], documents: Int[Tensor, " tokens"]) -> SplitPart:
    return SplitPart(values.mean().item(), clustered_error(values, documents))


def _distances(a: Tensor, b: Tensor) -> Float[Tensor, " tokens"]:
    """KL(A ‖ B) at every token that predicts one, in float64."""
    flat = [logits[:, :-1].flatten(0, 1) for logits in (a, b)]
    return torch.cat([*_chunks(flat[0], flat[1])])


def _chunks(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    for rows in torch.arange(len(a)).split(ROWS):
        log_a, log_b = (x[rows].double().cpu().log_softmax(1) for x in (a, b))
        yield (log_a.exp() * k3(log_a, log_b)).sum(1)
