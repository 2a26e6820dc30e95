"""Whether the flips of a layer are near-ties or something else."""

from jaxtyping import Bool, Int
from torch import Tensor

from tieline.audit.diff.flips import flip_margins, noise_band
from tieline.audit.diff.records import Attribution
from tieline.trace.ops import take_tokens
from tieline.trace.record import LayerTrace

__all__ = ["attribute", "attribution_status"]

MOST_NAMED = 20
"""Unexplained flips that are named one by one."""
NO_NOISE = "not attributable: no token keeps its experts, so none tells the noise of the scores"


def attribution_status(a: LayerTrace, b: LayerTrace) -> str:
    """The word "ok", or why the flips of a layer cannot be attributed."""
    sides = (("A", a), ("B", b))
    for side, layer in sides:
        if layer.scores is None:
            return f"not attributable: {side} has expert ids only, no scores"
        if not layer.has_gaps:
            return f"not attributable: {side} has the scores of chosen experts only"
    grouped = [side for side, layer in sides if layer.facts.n_groups > 1]
    if len(grouped) == 1:
        return f"not attributable: only {grouped[0]} routes within groups"
    if a.facts.units != b.facts.units:
        return f"not attributable: scores of A are {a.facts.units}, those of B {b.facts.units}"
    return "ok"


def attribute(
    a: LayerTrace,
    b: LayerTrace,
    flipped: Bool[Tensor, " tokens"],
    before: Bool[Tensor, " tokens"],
    keys: tuple[Int[Tensor, " tokens"], Int[Tensor, " tokens"]],
) -> tuple[Attribution | None, str]:
    """The attribution of a layer's flips, or None and the reason.

    Args:
        a: the layer in A.
        b: the same tokens in B, experts numbered as in A.
        flipped: which tokens flip.
        before: which tokens flipped in an earlier layer.
        keys: document and position of each token in A.
    """
    status = attribution_status(a, b)
    if status != "ok":
        return None, status
    found = noise_band(a, b, flipped)
    if found is None:
        return None, NO_NOISE
    rows = flipped.nonzero().squeeze(1)
    margins = flip_margins(take_tokens(a, rows), take_tokens(b, rows))
    outside = margins > found.band
    places, widths = rows[outside], margins[outside]
    order = widths.argsort(descending=True, stable=True)[:MOST_NAMED]
    named = zip(*(key[places[order]].tolist() for key in keys), widths[order].tolist(), strict=True)
    return Attribution(
        noise=found.noise,
        band=found.band,
        inside=int((~outside).sum()),
        unexplained=int(outside.sum()),
        unexplained_first=int((~before[places]).sum()),
        widest=margins.max().item() if len(margins) else None,
        unexplained_tokens=tuple(named),
    ), "ok"
