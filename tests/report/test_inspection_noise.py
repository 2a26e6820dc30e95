"""The model's own noise and the slice on the page."""

from dataclasses import replace

from tieline.analysis.inspection import LayerSlice, SlicePoint
from tieline.lab.tropical.pictures import slice_router
from tieline.report import page, terminal
from tieline.report.inspection_noise import noise_panels, slice_words

TOKENS = ("a$b", "<b>", "\x00")


def with_slice(result):
    weight = [[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]]
    cut = slice_router([[2.0, 0.1], [0.3, 2.0], [-1.0, -2.0]], weight, None, 1, epsilon=0.1)
    points = tuple(SlicePoint(0, place, text, (place,)) for place, text in enumerate(TOKENS))
    name = result.measures.layers[0].name
    return replace(result, slice=LayerSlice(name, points, "noise of bf16", cut, 1000, 998, 2))


def test_orders_are_stacked_and_walks_stand_between_their_bounds(result):
    orders, walk = noise_panels(result)
    assert "bf16" in orders.title
    assert [bar["name"] for bar in orders.figure["data"]] == [
        "order 1",
        "order 2",
        "order 3 or more",
    ]
    assert [bar["y"] for bar in orders.figure["data"]] == [[0.03] * 3, [0.015] * 3, [0.005] * 3]
    lines = walk.figure["data"]
    assert len(lines) == 6  # two layers with flat walls: value and two bounds
    for value, lower, upper in (lines[:3], lines[3:]):
        rows = zip(lower["y"], value["y"], upper["y"], strict=True)
        assert all(low <= share <= high for low, share, high in rows)


def test_what_was_not_measured_says_why(ids_only):
    assert all(panel.figure is None for panel in noise_panels(ids_only))
    assert "expert ids only" in noise_panels(ids_only)[0].reason


def test_the_slice_is_on_the_page_with_its_check(result):
    cut = with_slice(result)
    shown = page(cut)
    assert "A slice through three hidden states" in shown
    assert "at 998 of the 998 that are not ties" in shown
    assert "<b>" not in "".join(slice_words(cut.slice)).replace("“<b>”", "")
    assert "A slice through three hidden states" not in page(result)
    assert cut.plot("slice").axes
    assert terminal(cut, 80)
