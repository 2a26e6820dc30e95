"""Comparing what routers did in two forward passes of the same tokens."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.audit.monitor_calls import RouterCall

__all__ = ["VERDICTS", "Flip", "Repetition", "Run", "compared", "worst"]

VERDICTS = ("identical", "differs, but not by routing", "exact tie", "near-tie flip")
"""From harmless to what crashes: the verdict of several repetitions is the last of theirs."""

SAME, OTHER, TIE, NEAR = VERDICTS

ROUNDINGS, MOST = 1024, 0.05
"""Scores of two runs that differ by up to so many roundings, and at most by this part of the
largest score of the token, differ by rounding: sums of thousands of terms, over some layers."""


@dataclass(frozen=True, eq=False)
class Run:
    """A forward pass: its output (None if it did not end), the calls of its routers, its rounding.

    `error` is what checkpointing said of it.
    """

    output: Tensor | None
    calls: tuple[RouterCall, ...]
    rounding: float
    error: str | None = None


@dataclass(frozen=True)
class Flip:
    """A token that chose other experts.

    Attributes:
        layer: name of the router.
        token: place of the token among those that the layer routed.
        gap: its gap in the first run.
        moved: largest change of a score of this token between the runs.
        left: experts that it lost.
        entered: experts that it got instead.
        follows: whether an earlier layer differs already, so that this may be its consequence.
    """

    layer: str
    token: int
    gap: float
    moved: float
    left: tuple[int, ...]
    entered: tuple[int, ...]
    follows: bool


@dataclass(frozen=True)
class Repetition:
    """One way of running the batch again, against the first run.

    Attributes:
        way: which.
        verdict: one of `VERDICTS`.
        explanation: the reason in words.
        flipped: flips in all layers.
        flips: the first of them, those of earlier layers and smaller gaps first.
        score_change: largest change of a score.
        output_change: largest change of the output over its largest entry; None without an output.
        error: what `CheckpointError` said, if it was raised.
    """

    way: str
    verdict: str
    explanation: str
    flipped: int
    flips: tuple[Flip, ...]
    score_change: float
    output_change: float | None
    error: str | None = None


@dataclass(frozen=True, eq=False)
class _Difference:
    """One layer in both runs: what flipped, how far scores moved, and how far rounding may."""

    name: str
    before: Bool[Tensor, "tokens experts"]
    after: Bool[Tensor, "tokens experts"]
    gap: Float[Tensor, " tokens"]
    moved: Float[Tensor, " tokens"]
    limit: Float[Tensor, " tokens"]

    @property
    def flipped(self) -> Int[Tensor, " flips"]:
        """Tokens with another choice."""
        return (self.before != self.after).any(dim=1).nonzero().squeeze(1)


def compared(way: str, first: Run, again: Run, most_flips: int) -> Repetition:
    """What the second run did differently, and why."""
    layers = _differences(first, again)
    flips = _flips(layers)
    change = _output_change(first.output, again.output)
    moved = max((layer.moved.max().item() for layer in layers if len(layer.moved)), default=0.0)
    causes = next((layer for layer in layers if len(layer.flipped)), None)
    if causes is not None:
        verdict, why = _cause(causes)
    elif moved or change != 0.0 or again.error:
        verdict, why = OTHER, _without_flips(moved, change)
    else:
        verdict, why = SAME, "the same experts, scores and output, bit for bit"
    shown = tuple(flips[:most_flips])
    return Repetition(way, verdict, why, len(flips), shown, moved, change, again.error)


def worst(repetitions: Sequence[Repetition]) -> Repetition:
    """The one that speaks for all."""
    return max(repetitions, key=lambda one: VERDICTS.index(one.verdict))


def _cause(layer: _Difference) -> tuple[str, str]:
    """Verdict from the first layer whose choices differ."""
    rows = layer.flipped
    gap, moved, limit = layer.gap[rows], layer.moved[rows], layer.limit[rows]
    tied = (gap == 0) & (moved <= limit)
    near = (gap > 0) & (moved > 0) & (moved <= limit)
    strange = int((~(tied | near)).sum())
    where = f"{len(rows)} of {len(layer.gap)} tokens choose other experts in layer {layer.name!r}"
    size = f"gaps up to {gap.max().item():.3g}, scores moved by up to {moved.max().item():.3g}"
    if strange:
        return OTHER, f"{where}, {strange} of them not by rounding ({size}): {_strange(layer)}"
    if bool(tied.all()):
        return TIE, f"{where}, all of them at exact ties, which the top-k breaks as it likes"
    return NEAR, f"{where}: near-ties ({size}), which rounding decides"


def _strange(layer: _Difference) -> str:
    rows = layer.flipped
    if bool((layer.moved[rows] > layer.limit[rows]).any()):
        return "the scores differ beforehand, as by dropout, jitter, other inputs or a bug"
    return "the same scores gave another choice, so the router draws at random or is broken"


def _without_flips(moved: float, change: float | None) -> str:
    output = "no output" if change is None else f"the output differs by {change:.3g} of its largest"
    return f"the same experts everywhere; scores moved by up to {moved:.3g}, {output}"


def _differences(first: Run, again: Run) -> list[_Difference]:
    """The layers that both runs have for as many tokens, in order of depth."""
    before, after = _by_layer(first), _by_layer(again)
    found = []
    for name, calls in before.items():
        others = after.get(name, [])
        tokens = [sum(call.tokens for call in some) for some in (calls, others)]
        if tokens[0] == tokens[1] and all(c.trace.has_gaps for c in (*calls, *others)):
            found.append(_difference(name, calls, others, first.rounding))
    return found


def _difference(
    name: str, calls: list[RouterCall], others: list[RouterCall], rounding: float
) -> _Difference:
    one, two = _dense(calls), _dense(others)
    moved = (one[0] - two[0]).abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(dim=1)
    size = one[0].masked_fill(one[0].isinf(), 0.0).abs().amax(dim=1)
    roundoff = max(rounding, *(call.rounding for call in calls))
    limit = min(ROUNDINGS * roundoff, MOST) * size
    gap = torch.cat([call.trace.gap for call in calls])
    return _Difference(name, one[1], two[1], gap, moved, limit)


def _dense(calls: list[RouterCall]) -> tuple[Float[Tensor, "t e"], Bool[Tensor, "t e"]]:
    """Scores of all experts in float64 and the chosen ones, over all calls of a layer."""
    scores, chosen = [], []
    for call in calls:
        trace = call.trace
        assert trace.scores is not None
        ids = trace.experts.long()
        nothing = torch.full((len(ids), trace.facts.n_experts), -torch.inf, dtype=torch.float64)
        scores.append(nothing.scatter(1, ids, trace.scores.double()))
        nobody = torch.zeros_like(nothing, dtype=torch.bool)
        chosen.append(nobody.scatter(1, ids[:, : trace.facts.k], True))
    return torch.cat(scores), torch.cat(chosen)


def _flips(layers: list[_Difference]) -> list[Flip]:
    found: list[Flip] = []
    follows = False
    for layer in layers:
        rows = layer.flipped
        for token in rows[layer.gap[rows].argsort(stable=True)].tolist():
            before, after = layer.before[token], layer.after[token]
            left, entered = (_places(before & ~after), _places(after & ~before))
            gap, moved = layer.gap[token].item(), layer.moved[token].item()
            found.append(Flip(layer.name, token, gap, moved, left, entered, follows))
        follows = follows or len(rows) > 0
    return found


def _places(mask: Bool[Tensor, " experts"]) -> tuple[int, ...]:
    return tuple(mask.nonzero().squeeze(1).tolist())


def _by_layer(run: Run) -> dict[str, list[RouterCall]]:
    calls: dict[str, list[RouterCall]] = defaultdict(list)
    for call in run.calls:
        calls[call.trace.name].append(call)
    return calls


def _output_change(first: Tensor | None, again: Tensor | None) -> float | None:
    """Largest change over the largest entry; None where there are no two outputs to compare."""
    if first is None or again is None or first.shape != again.shape:
        return None
    if torch.equal(first, again):
        return 0.0
    one, two = first.double(), again.double()
    return ((one - two).abs().max() / one.abs().max().clamp(min=1e-300)).item()
