"""What a trace cannot answer, in words."""

from collections.abc import Sequence

from tieline.trace.record import LayerTrace

__all__ = ["unanswered"]

_NEEDS = {
    "scores": "gap quantiles, boundary mass, gap density and flip rates (no selection scores)",
    "rank k+1": "gap quantiles, boundary mass, gap density and flip rates (chosen ranks only)",
    "near": "experts within ε of the threshold and orders of ties (no counts over all experts)",
    "distance": "Euclidean distance to the nearest tie (not recorded)",
    "weights": "jump sizes and combine weights (no weights)",
    "inputs": "walks, slices and angular statistics (no router inputs)",
}


def unanswered(layers: Sequence[LayerTrace]) -> list[str]:
    """The questions that none of the layers has the data for; empty if there are none.

    An ids-only trace answers load, entropy, dead and cold experts, coalitions and agreement.
    """
    missing = [_missing(layer) for layer in layers]
    return [text for need, text in _NEEDS.items() if all(need in part for part in missing)]


def _missing(layer: LayerTrace) -> set[str]:
    absent = {need for need in _NEEDS if getattr(layer, need, layer) is None}
    return absent | ({"rank k+1"} if layer.scores is not None and not layer.has_gaps else set())
