"""The model's own noise and the slice of an inspection: charts and figure.

noise_panels     orders of ties at the noise, and the time to the first flip
slice_figure_of  the slice through three hidden states, with its tokens named
"""

from typing import TYPE_CHECKING, Any

from tieline.analysis.inspection import FlipWalk, Inspection, LayerSlice, OwnNoise
from tieline.lab.report.slices import slice_figure
from tieline.report.charts import MOST_NAMED, Panel, axis, depth_bar, figure, layer_colour
from tieline.report.tables import short_names, visible
from tieline.report.words.numbers import finite, percent, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ORDERS = Panel(
    "tie-orders",
    "How many experts the noise of {} can mix",
    "A token has tie order n at tolerance ε if n + 1 experts score within ε of the threshold, on "
    "both sides of it. Here ε is the noise of the layer’s own gap when the whole model is rounded. "
    "Order 1 is a plain tie of two experts; higher orders are left to chance among more.",
)
WALK = Panel(
    "flip-times",
    "How many roundings until a token changes its experts",
    "Each layer’s hidden states take a random walk whose steps have the size and directions that "
    "rounding the whole model really has. Height is the share of tokens that have changed an "
    "expert at least once after so many steps. Pale dashes are the exact bounds: the nearest wall "
    "alone, and the sum over all walls.",
)
COLOURS = ("@accent", "@warn", "@ink")
"""Orders 1, 2, and from 3 on."""


def noise_panels(result: Inspection) -> list[Panel]:
    """Both charts, or the reason why they cannot be drawn."""
    labels = short_names([layer.name for layer in result.measures.layers])
    places = {
        layer.name: label for layer, label in zip(result.measures.layers, labels, strict=True)
    }
    known = [(places[x.name], x) for x in result.noise.layers if x.name in places]
    walks = [(label, layer.walk.value) for label, layer in known if layer.walk.value is not None]
    named = Panel(ORDERS.key, ORDERS.title.format(_precision(result)), ORDERS.how)
    reasons = [layer.walk.status for _, layer in known] or [result.noise.status]
    return [
        named.drawn(_orders(known)) if known else named.missing([result.noise.status]),
        WALK.drawn(_walks(walks)) if walks else WALK.missing(reasons),
    ]


def _precision(result: Inspection) -> str:
    return result.noise.layers[0].precision if result.noise.layers else "rounding"


def _orders(known: list[tuple[str, OwnNoise]]) -> dict[str, Any]:
    """Stacked shares of orders 1, 2, ..., by layer."""
    most = max(len(layer.orders) for _, layer in known)
    bars = []
    for order in range(1, most):
        shares = [layer.orders[order] for _, layer in known]
        if any(shares):
            bars.append(
                {
                    "type": "bar",
                    "name": f"order {order}" + (" or more" if order == most - 1 else ""),
                    "x": [label for label, _ in known],
                    "y": shares,
                    "customdata": [significant(layer.epsilon) for _, layer in known],
                    "marker": {"color": COLOURS[min(order, len(COLOURS)) - 1]},
                    "hovertemplate": f"layer %{{x}}: %{{y:.2~p}} of tokens have order {order} at "
                    "ε = %{customdata}<extra></extra>",
                }
            )
    layout = {
        "barmode": "stack",
        "xaxis": axis("layer", scale="category"),
        "yaxis": axis("share of tokens", tickformat=".2~p", rangemode="tozero"),
    }
    return figure(bars, 400, **layout)


def _walks(known: list[tuple[str, FlipWalk]]) -> dict[str, Any]:
    lines = []
    for place, (label, walk) in enumerate(known):
        colour = layer_colour(place, len(known))
        share = [finite(value.value) or None for value in walk.value]
        lines.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": f"layer {label}",
                "x": list(walk.times),
                "y": share,
                "line": {"color": colour, "width": 1.75},
                "marker": {"size": 5},
                "showlegend": len(known) <= MOST_NAMED,
                "hovertemplate": "after %{x} roundings %{y:.3~p} have changed an expert"
                "<extra>%{fullData.name}</extra>",
            }
        )
        pale = {"color": colour, "width": 1, "dash": "dot"}
        common = {"type": "scatter", "mode": "lines", "line": pale, "opacity": 0.5}
        common |= {"showlegend": False, "hoverinfo": "skip", "x": list(walk.times)}
        lines += [common | {"y": list(bound)} for bound in (walk.lower, walk.upper)]
    layout = {
        "xaxis": axis("roundings of the whole model", scale="log"),
        "yaxis": axis("share of tokens", tickformat=".0%", range=[0, 1]),
    }
    return figure([*lines, *depth_bar([label for label, _ in known])], 400, **layout)


def slice_figure_of(drawn: LayerSlice) -> "Figure":
    """The slice with its three tokens named."""
    return slice_figure(drawn.cut, [_quoted(point.text) for point in drawn.points])


def _quoted(text: str) -> str:
    """The text of a token for a picture, whose font has Latin letters and reads $ as a formula."""
    shown = "".join(sign if sign.isprintable() and ord(sign) < 0x250 else "·" for sign in text)
    return f"“{shown or '·'}”".replace("$", "\\$")


def slice_words(drawn: LayerSlice) -> list[str]:
    """What the slice shows, and how it was checked, in sentences."""
    tokens = ", ".join(
        f"“{visible(point.text) or '◦'}” ({point.document}:{point.position}, experts "
        f"{', '.join(map(str, point.experts))})"
        for point in drawn.points
    )
    cut = drawn.cut
    band = (
        f"the band of gap below {significant(cut.epsilon)} ({drawn.noise}) covers "
        f"{percent(cut.band_share)} of it"
        if cut.epsilon > 0
        else "the noise of this layer is not known, so no band is drawn"
    )
    sure = drawn.checked - drawn.undecided
    return [
        f"Slice of layer {drawn.layer} through the tokens {tokens} (document:position).",
        f"It holds {len(cut.cells)} coalitions; {band}.",
        f"Asked at {drawn.checked:,} random points of the plane, the router chose the coalition of "
        f"the picture at {drawn.agreed:,} of the {sure:,} that are not ties.",
    ]
