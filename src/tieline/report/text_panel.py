"""The text of the sample, each token on a ground that is stronger the nearer it is to a tie."""

from collections.abc import Mapping
from typing import Any

from tieline.report.markup import escape, visible
from tieline.report.numbers import DASH, short_names, significant

__all__ = ["LIMITS", "text_data", "text_html"]

LIMITS = (0.01, 0.03, 0.1, 0.3)
"""Relative gaps at which the ground becomes weaker; above the last one there is none."""

MOST_GAPS = 40_000
"""Gaps of tokens in layers that the page holds; longer stretches of text are cut."""

HOW = (
    "The ground of a token tells its gap relative to the layer’s median gap; with all layers, the "
    "smallest of them. Choose a layer, or point at a token to see its number."
)
NO_TEXT = "not answerable: the text of these tokens is not known"


def text_html(result: Mapping[str, Any]) -> str:
    """The stretch of text with its legend and choice of layer, or why there is none."""
    sample = result["sample"]
    if sample is None or all(piece["gap"] is None for piece in sample["pieces"]):
        reason = NO_TEXT if sample is None else _reason(result)
        return f'<p class="missing">{escape(reason)}.</p>'
    options = "".join(
        f'<option value="{place}">layer {escape(name)}</option>'
        for place, name in enumerate(short_names(sample["layers"]))
    )
    tokens = "".join(_token(piece) for piece in _shown(sample))
    return (
        f'<p class="controls"><label>Colour by <select id="text-layer"><option value="-1">all '
        f"layers, smallest gap</option>{options}</select></label>{_legend()}</p>"
        f'<div class="text" id="text" tabindex="0" lang="">{tokens}</div>'
        f'<p class="detail" id="text-detail" aria-live="polite">Document '
        f"{sample['document']}.</p>"
        f'<p class="how">{escape(HOW)}</p>'
    )


def text_data(result: Mapping[str, Any]) -> dict[str, Any]:
    """What the script of the page needs to colour the text by another layer."""
    sample = result["sample"]
    if sample is None:
        return {"limits": LIMITS, "layers": [], "gaps": []}
    pieces = _shown(sample)
    gaps = [[_rounded(gap) for gap in piece["gaps"]] for piece in pieces]
    return {"limits": LIMITS, "layers": short_names(sample["layers"]), "gaps": gaps}


def _shown(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return sample["pieces"][: MOST_GAPS // max(1, len(sample["layers"]))]


def _token(piece: Mapping[str, Any]) -> str:
    gap = piece["gap"]
    level = sum(gap >= limit for limit in LIMITS) if gap is not None else len(LIMITS)
    hint = DASH if gap is None else f"{significant(gap, 2)} of the median gap"
    # a token without text of its own, such as a beginning of sequence, still has a gap to show
    text = visible(piece["text"]) or "◦"
    return f'<span class="g{level}" title="{hint}">{escape(text)}</span>'


def _legend() -> str:
    words = [f"below {limit:g}" for limit in LIMITS]
    chips = "".join(f'<span class="g{n}">{word}</span>' for n, word in enumerate(words))
    return f'<span class="legend">gap / median: {chips}<span>{LIMITS[-1]:g} or more</span></span>'


def _reason(result: Mapping[str, Any]) -> str:
    return next(
        (layer["gap"]["status"] for layer in result["measures"]["layers"]),
        "not answerable: there are no layers",
    )


def _rounded(gap: float | None) -> float | None:
    return None if gap is None else float(f"{gap:.2g}")
