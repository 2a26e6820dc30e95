"""Split the KL of two models by replaying experts, and weights, of one in the other.

    KL(A ‖ B)         B as it is
    KL(A ‖ B_ids)     B takes the experts that A chose, weighted by B's own router
    KL(A ‖ B_both)    B takes A's experts and A's combine weights

The decrease from the first to the second is the share of flips, that from the second to the third
is the share of combine weights, and the third is the rest: attention, experts, norms.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.analysis.diff_records import ReplaySplit, SplitPart
from tieline.analysis.token_distances import ROWS_AT_ONCE
from tieline.core.errors import UnsupportedModelError, require
from tieline.core.predictions import k3_divergence
from tieline.core.statistics import clustered_error
from tieline.models.families import find_routers
from tieline.run.condition import ChoiceMode
from tieline.run.observers import Observer, Outcome
from tieline.run.plan import Pass, Phase, Plan
from tieline.run.ranks import Ranks
from tieline.run.runner import Progress, Runner

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
