"""Comparing two traces: `diff(a, b)`."""

import time

import torch

from tieline.audit.diff.align import Aligned, align
from tieline.audit.diff.attribution import attribute
from tieline.audit.diff.depth import token_diff
from tieline.audit.diff.flips import set_flips, weight_moved
from tieline.audit.diff.rates import clustered_rate
from tieline.audit.diff.records import LayerDiff, LogitsDiff, RoutingDiff
from tieline.audit.diff.words import findings, metrics, verdict
from tieline.numerics import one_thread
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["Compared", "compare", "diff", "summed_up"]


def diff(trace_a: RoutingTrace, trace_b: RoutingTrace, *, partial: bool = False) -> RoutingDiff:
    """How two runs route the same tokens, and whether near-ties explain where they differ.

    Args:
        trace_a: the run that is compared with; names and numbers of the result are its own.
        trace_b: the other run.
        partial: compare what both have where one has fewer tokens or a smaller k, instead of
            refusing.
    """
    started = time.perf_counter()
    with one_thread():  # many small operations
        found = compare(trace_a, trace_b, partial=partial)
    timings = {"compare": time.perf_counter() - started}
    return summed_up(found, None, timings)


class Compared:
    """The layers of two runs laid on each other, and which tokens flip in which."""

    def __init__(self, aligned: Aligned) -> None:
        """Compare every pair of layers, one at a time."""
        self.aligned = aligned
        places = aligned.places.in_a
        self.documents = aligned.a.documents[places].long()
        self.positions = aligned.a.positions[places].long()
        self._earlier = torch.zeros(len(places), dtype=torch.bool)
        flips, self.layers = [], []
        for index in range(len(aligned.alignment.pairs)):
            flipped, layer = self._layer(*aligned.pair(index))
            flips.append(flipped)
            self.layers.append(layer)
        self.flips = torch.stack(flips)
        self.tokens = token_diff(self.flips, self.documents, [x.name for x in self.layers])

    def _layer(self, a: LayerTrace, b: LayerTrace) -> tuple[torch.Tensor, LayerDiff]:
        flipped, changed = set_flips(a, b)
        weight = weight_moved(a, b, flipped)
        keys = self.documents, self.positions
        attribution, status = attribute(a, b, flipped, self._earlier, keys)
        self._earlier = self._earlier | flipped
        return flipped, LayerDiff(
            name=a.name,
            name_b=b.name,
            n_experts=a.facts.n_experts,
            k=a.facts.k,
            flip=clustered_rate(flipped, self.documents),
            changed=changed,
            weight=weight,
            weight_status="ok" if weight else "not answerable: one side has no combine weights",
            attribution=attribution,
            attribution_status=status,
        )


def compare(a: RoutingTrace, b: RoutingTrace, *, partial: bool = False) -> Compared:
    """Lay B on A and compare them layer by layer."""
    return Compared(align(a, b, partial=partial))


def summed_up(found: Compared, logits: LogitsDiff | None, timings: dict[str, float]) -> RoutingDiff:
    """The result with its words and metrics.

    Args:
        found: the layers compared.
        logits: how far the final distributions are apart, if models were run.
        timings: seconds per stage.
    """
    layers, alignment = tuple(found.layers), found.aligned.alignment
    aligned = found.aligned
    return RoutingDiff(
        verdict=verdict(alignment, layers, found.tokens),
        findings=findings(alignment, layers, found.tokens, logits),
        metrics=metrics(layers, found.tokens, logits),
        alignment=alignment,
        layers=layers,
        tokens=found.tokens,
        logits=logits,
        provenance={"a": aligned.a.provenance, "b": aligned.b.provenance},
        timings=timings,
    )
