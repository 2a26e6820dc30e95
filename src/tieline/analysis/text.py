"""The first tokens of a text with their gaps."""

from tieline.analysis.inspection import TextPiece, TextSample
from tieline.measure.measures import scored
from tieline.run.corpus import TokenisedText
from tieline.trace.record import LayerTrace, RoutingTrace


def text_sample(trace: RoutingTrace, text: TokenisedText, most: int = 400) -> TextSample:
    """Return the first tokens of the text with gaps relative to each layer's median gap.

    Args:
        trace: routing of `text`, in order.
        text: what was routed.
        most: number of tokens, from the first sequence.
    """
    count = min(most, len(text.sequences[0]))
    texts = ["" for _ in text.prefix] + list(text.pieces)
    columns, scales = zip(*(_relative_gaps(layer, count) for layer in trace.layers), strict=True)
    pieces = []
    for place, gaps in enumerate(zip(*columns, strict=True)):
        known = [gap for gap in gaps if gap is not None]
        token, position = int(trace.tokens[place]), int(trace.positions[place])
        pieces.append(TextPiece(texts[place], token, position, min(known, default=None), gaps))
    names = tuple(layer.name for layer in trace.layers)
    return TextSample(names, int(trace.documents[0]), tuple(pieces), tuple(scales))


def _relative_gaps(layer: LayerTrace, count: int) -> tuple[list[float | None], float | None]:
    """Gaps of the first tokens over the median gap, and that median; None where unknown."""
    nothing: list[float | None] = [None] * count
    if scored(layer) != "ok":
        return nothing, None
    gaps = layer.gap
    middle = gaps.median().item()
    if not 0 < middle < float("inf"):
        return nothing, None
    return [gap if gap < float("inf") else None for gap in (gaps[:count] / middle).tolist()], middle
