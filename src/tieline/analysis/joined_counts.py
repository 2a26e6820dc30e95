"""What processes counted of an audit or a repair, made that of all of them.

Sums are kept per sequence and joined in the order of the batches, and whole numbers are added, so
that the joined counts are bit for bit those of one process. Where all processes run all tokens
there is nothing to join.
"""

from collections.abc import Iterable
from dataclasses import replace

import torch

from tieline.analysis.precision_runs import FullEffect, LocalRuns
from tieline.core.processes import gathered_tensors
from tieline.models.spread import SHARES_TEXT
from tieline.run.processes import Ranks
from tieline.trace.record import LayerTrace


def join_local(share: Ranks, runs: LocalRuns) -> None:
    """Make what was counted of each router by itself that of all batches, in place."""
    if share.parallel not in SHARES_TEXT:
        return
    effects = list(runs.effects.values())
    share.join_sums(
        [sums for one in effects for sums in (one.flips, one.low, one.high, one.damage)]
    )
    own = {"counts": torch.tensor([[[one.seen, one.trials] for one in effects]])}
    own |= {f"hits.{name}": hits[None] for name, hits in runs.hits.items()}
    found = {name: parts.sum(dim=0) for name, parts in share.join_rows(own).items()}
    for one, (seen, trials) in zip(effects, found["counts"].tolist(), strict=True):
        one.seen, one.trials = seen, trials
    for name in runs.hits:
        runs.hits[name] = found[f"hits.{name}"]
        runs.kept[name] = _all_parts(runs.kept[name])


def _all_parts(own: list[LayerTrace]) -> list[LayerTrace]:
    """The tokens of a layer that all processes kept, batch by batch in their order."""
    named = {f"{n}.{key}": row for n, part in enumerate(own) for key, row in part.rows().items()}
    parts = []
    for tensors in gathered_tensors(named):
        for number in sorted({int(key.partition(".")[0]) for key in tensors}):
            rows = {key: tensors[f"{number}.{key}"] for key in own[0].rows()}
            parts.append(replace(own[0], **rows))
    return parts


def join_full(share: Ranks, effects: Iterable[FullEffect]) -> None:
    """Make what was counted of runs of the whole model that of all batches, in place."""
    every = list(effects)
    share.join_sums(
        [
            sums
            for one in every
            for sums in (*one.flips.values(), one.any_layer, one.moved, one.loss, one.kl, one.floor)
        ]
    )
    lost = {str(place): torch.cat(one.shares) for place, one in enumerate(every) if one.shares}
    for place, shares in share.join_rows(lost).items():
        every[int(place)].shares[:] = [shares]
