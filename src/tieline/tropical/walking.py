"""Where the chosen experts change along straight segments, exactly.

Along a segment every score is linear, so that each pair of experts changes order at most once. The
next change of the coalition is the first crossing of a chosen expert by a faster one that is not
chosen; all segments take their next step together.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from tieline.tropical.affine import Router, chosen

__all__ = ["Walk", "walk"]

CHUNK = 1 << 22
"""Pairs of experts over all segments that are held at once."""


class Walk(NamedTuple):
    """Every change of coalition, by segment and in the order of the walk.

    Attributes:
        segment: which segment it happens on.
        place: where, as a share of the segment, 0 < place < 1.
        leaving: the expert that is no longer chosen.
        entering: the expert that is from there on.
        first: experts chosen at the start of each segment.
    """

    segment: Int[np.ndarray, " events"]
    place: Float[np.ndarray, " events"]
    leaving: Int[np.ndarray, " events"]
    entering: Int[np.ndarray, " events"]
    first: Bool[np.ndarray, "segments experts"]

    def per_segment(self) -> Int[np.ndarray, " segments"]:
        """Number of changes on each segment."""
        return np.bincount(self.segment, minlength=len(self.first))


def walk(
    starts: Float[np.ndarray, "segments width"],
    ends: Float[np.ndarray, "segments width"],
    router: Router,
) -> Walk:
    """The changes of coalition along the segments from `starts` to `ends`."""
    experts = len(router.bias)
    size = max(1, CHUNK // experts**2)
    parts = [
        _walk(router.scores(starts[at : at + size]), router.scores(ends[at : at + size]), router.k)
        for at in range(0, len(starts), size)
    ]
    shifted = [part._replace(segment=part.segment + i * size) for i, part in enumerate(parts)]
    return Walk(*(np.concatenate(columns) for columns in zip(*shifted, strict=True)))


def _walk(start: np.ndarray, end: np.ndarray, k: int) -> Walk:
    first = chosen(start, k)
    overtakes = _overtakes(start, end - start)
    inside, rows = first.copy(), np.arange(len(start))
    events: list[tuple[np.ndarray, ...]] = []
    while len(rows):
        usable = inside[rows][:, :, None] & ~inside[rows][:, None, :]
        times = np.where(usable, overtakes[rows], np.inf).reshape(len(rows), -1)
        best = times.argmin(axis=1)
        when = times[np.arange(len(rows)), best]
        going = when < 1
        rows, best, when = rows[going], best[going], when[going]
        leaving, entering = np.divmod(best, start.shape[1])
        inside[rows, leaving], inside[rows, entering] = False, True
        at_start = when <= 0  # a tie at the very start is settled before the walk begins
        first[rows[at_start]] = inside[rows[at_start]]
        events.append(tuple(x[~at_start] for x in (rows, when, leaving, entering)))
    return _ordered(events, first)


def _overtakes(score: np.ndarray, slope: np.ndarray) -> np.ndarray:
    """When expert j passes expert i, infinite if it never does: (segments, i, j)."""
    closing = slope[:, None, :] - slope[:, :, None]
    ahead = score[:, :, None] - score[:, None, :]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(closing > 0, ahead / closing, np.inf)


def _ordered(events: list[tuple[np.ndarray, ...]], first: np.ndarray) -> Walk:
    """Events by segment; those of one segment were found in the order of the walk."""
    segment, place, leaving, entering = map(np.concatenate, zip(*events, strict=True))
    order = np.argsort(segment, kind="stable")
    return Walk(segment[order], place[order], leaving[order], entering[order], first)
