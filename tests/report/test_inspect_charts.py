"""Every panel shows the numbers of the result, or says why it cannot."""

import itertools
from dataclasses import replace

import plotly.graph_objects as go
import pytest

from tests.report.zoo import make_inspection
from tieline.core.errors import TraceError
from tieline.measure.boundary import MassProfile
from tieline.report.inspect import figures
from tieline.report.inspect_charts import (
    MAX_JUMP_POINTS,
    format_names,
    format_steps,
    gap_log_range,
    inspection_panels,
)

KEYS = [
    "gap-quantiles",
    "gap-cdf",
    "flips-by-format",
    "flips-by-noise",
    "gap-jump",
    "jump-loss",
    "near-threshold",
    "tie-orders",
    "load",
]
ROLE_COLOURS = (
    "accent",
    "ramp:",
    "scale:ramp",
    "scale:gap",
    "scale:load",
    "ink",
    "muted",
    "band",
    "warn",
    "on-load",
    "card",
)


def panel(result, key):
    return next(panel for panel in inspection_panels(result) if panel.key == key)


def colours(value, key=""):
    if isinstance(value, dict):
        for name, item in value.items():
            yield from colours(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from colours(item, key)
    elif isinstance(value, str) and key.endswith(("color", "colorscale")):
        yield value


def without_roles(value):
    """The figure in plain colours, as Plotly wants them."""
    if isinstance(value, dict):
        return {key: without_roles(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_roles(item) for item in value]
    if isinstance(value, str) and value.startswith("@"):
        return "Viridis" if value.startswith("@scale") else "#123456"
    return value


def test_panels_have_distinct_keys_in_the_order_of_reading(result):
    assert [panel.key for panel in inspection_panels(result)] == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_a_figure_is_valid_has_axis_titles_and_is_explained(result, key):
    drawn = panel(result, key)
    go.Figure(without_roles(drawn.figure))
    assert drawn.how.endswith(".")
    for axis in ("xaxis", "yaxis"):
        assert drawn.figure["layout"][axis]["title"]["text"]
    assert all(colour[1:].startswith(ROLE_COLOURS) for colour in colours(drawn.figure))


@pytest.mark.parametrize("key", [key for key in KEYS if key != "load"])
def test_a_trace_of_ids_gives_the_reason_in_place_of_a_chart(ids_only, key):
    drawn = panel(ids_only, key)
    assert drawn.figure is None
    assert drawn.reason == "not answerable: the trace has expert ids only, no scores"


def test_jumps_and_losses_that_were_not_measured_say_so():
    result = make_inspection(jumps=False, tokens=60)
    assert panel(result, "gap-jump").reason == "not measured: no model"
    assert panel(result, "jump-loss").reason == "not measured: no model"
    result = make_inspection(tokens=60)
    assert panel(result, "gap-jump").figure is not None
    assert "loss_jumps" in panel(result, "jump-loss").reason


def test_the_quantile_map_holds_the_quantiles_of_each_layer(result):
    heat = panel(result, "gap-quantiles").figure["data"][0]
    assert heat["y"] == ["0", "1", "2"]
    assert heat["x"][:3] == ["0.1 %", "1 %", "5 %"]
    for row, layer in zip(heat["z"], result.measures.layers, strict=True):
        values = layer.gap.value.quantiles.value
        for shown, value in zip(row, values, strict=True):
            assert 10**shown == pytest.approx(value) if value else shown < min(row[2:])


def test_the_distribution_holds_each_layer_and_all_of_them(result):
    figure = panel(result, "gap-cdf").figure
    assert [trace["name"] for trace in figure["data"]] == ["layer 0", "layer 1", "layer 2", "all"]
    profile = result.measures.layers[1].gap.value.profile
    assert figure["data"][1]["x"] == list(profile.widths)
    assert figure["data"][1]["y"] == [100 * mass or None for mass in profile.mass]
    names = {note["text"] for note in figure["layout"]["annotations"]}
    assert names == {"bf16", "fp16", "fp8 e4m3", "fp8 e5m2", "int8", "int4"}


def test_the_step_of_a_format_spans_its_layers(result):
    layers = result.measures.layers
    for name, low, high in format_steps(layers):
        steps = [
            row.step for layer in layers for row in layer.precision.value if row.precision == name
        ]
        assert (low, high) == (min(steps), max(steps))


def test_steps_of_logits_are_not_drawn_among_gaps_of_sigmoid_scores():
    result = make_inspection(units="sigmoid", tokens=60)
    figure = panel(result, "gap-cdf").figure
    assert figure["layout"]["shapes"] == []
    assert figure["layout"]["xaxis"]["title"]["text"] == "gap (sigmoid score)"
    assert "not shown" in panel(result, "gap-cdf").how
    assert panel(result, "flips-by-format").figure is not None


def test_names_of_formats_never_stand_on_each_other():
    spans = [("a", 1.0, 1.0), ("b", 1.01, 1.01), ("c", 1.02, 1.02), ("d", 100.0, 100.0)]
    labels = format_names(spans, -3.0, 3.0)
    for (_, x, lift), (_, other_x, other_lift) in itertools.combinations(labels, 2):
        assert abs(x - other_x) >= 0.3 or abs(lift - other_lift) >= 0.19


def profile(widths, mass):
    return MassProfile(widths, mass, mass, mass, 10, 0.95)


def test_the_axis_shows_every_gap_between_none_and_all_and_every_step():
    low, high = gap_log_range(
        [profile((1e-6, 1e-3, 1.0, 100.0), (0.0, 0.2, 0.8, 1.0))], [("bf16", 1e-4, 1e-4)]
    )
    assert -5 < low < -4
    assert 0 < high < 1
    low, high = gap_log_range([profile((1.0,), (0.0,))], [])
    assert low < high


def test_counted_and_predicted_flips_share_the_layer_s_colour(result):
    data = panel(result, "flips-by-format").figure["data"]
    dots, dashes = data[:3], data[3:6]
    rows = result.measures.layers[0].precision.value
    by_name = {row.precision.replace("_", " "): row for row in rows}
    for name, counted, predicted in zip(dots[0]["x"], dots[0]["y"], dashes[0]["y"], strict=True):
        assert counted == (100 * by_name[name].flip_emulated.value or None)
        assert predicted == (100 * by_name[name].flip.value or None)
    for dot, dash in zip(dots, dashes, strict=True):
        assert dot["marker"]["color"] == dash["marker"]["color"]


def test_near_curves_mark_the_price_of_half_an_expert(result):
    curve, half = panel(result, "near-threshold").figure["data"][:2]
    near = result.measures.layers[0].near.value
    assert curve["x"] == list(near.epsilons)
    assert curve["y"] == [count.value for count in near.experts]
    assert half["x"] == [near.epsilon_half.value]
    assert half["y"] == [2.5]


def test_the_load_map_is_relative_to_an_even_load_and_crosses_the_dead(result):
    heat, crosses = panel(result, "load").figure["data"]
    for row, layer in zip(heat["z"], result.measures.layers, strict=True):
        for shown, share in zip(row, layer.load.share, strict=True):
            assert 2**shown == pytest.approx(share * 8, rel=0.004) if share else shown == -3
    dead = [(e, str(y)) for y, x in enumerate(result.measures.layers) for e in x.load.dead]
    assert list(zip(crosses["x"], crosses["y"], strict=True)) == dead
    assert dead


def test_exact_ties_stand_left_of_every_other_point(result):
    data = panel(result, "gap-jump").figure["data"]
    gaps = result.jumps[0].value.near.gaps
    assert 0 in gaps
    near = data[1]
    others = [x for x, gap in zip(near["x"], gaps, strict=True) if gap]
    assert 0 < min(near["x"]) < min(others)
    assert [row[0] for row in near["customdata"]] == list(gaps)


def test_many_points_are_thinned_out_evenly():
    result = make_inspection(layers=2)
    first = result.jumps[0]
    sample = first.value.near
    names = ("tokens", "gaps", "jumps", "leaving", "entering", "documents", "positions")
    sample = replace(sample, **{name: getattr(sample, name) * 200 for name in names})
    first = replace(first, value=replace(first.value, near=sample))
    result = replace(result, jumps=(first, *result.jumps[1:]))
    data = panel(result, "gap-jump").figure["data"]
    assert sum(len(trace["x"]) for trace in data) <= MAX_JUMP_POINTS
    assert len(data[1]["x"]) > MAX_JUMP_POINTS // 8


def test_many_layers_are_told_by_a_bar_of_colours():
    result = make_inspection(layers=12, tokens=40)
    for key in ("gap-cdf", "flips-by-noise", "near-threshold", "gap-jump"):
        data = panel(result, key).figure["data"]
        bars = [trace for trace in data if trace.get("marker", {}).get("showscale")]
        assert len(bars) == 1
        assert bars[0]["marker"]["colorbar"]["ticktext"] == ["0", "5", "11"]
        legend_names = [trace["name"] for trace in data if trace.get("showlegend")]
        assert legend_names in ([], ["all"])


def test_orders_of_ties_are_stacked(result):
    orders = panel(result, "tie-orders")
    assert "bf16" in orders.title
    bars = orders.figure["data"]
    assert [bar["name"] for bar in bars] == ["order 1", "order 2", "order 3 or more"]
    assert [bar["y"] for bar in bars] == [[3.0] * 3, [1.5] * 3, [0.5] * 3]


def test_curves_are_the_profiles_and_counts_of_the_layers(result):
    left, right = figures(result)["routing"]().axes
    curves = [line for line in left.lines if line.get_linestyle() == "-"]
    assert len(left.lines) == len(curves) + 6 + 1  # one line for each format, one for all layers
    for index, layer in enumerate(result.measures.layers):
        profile = layer.gap.value.profile
        assert tuple(curves[index].get_xdata()) == profile.widths
        kept = [mass for mass in profile.mass if mass]
        drawn = curves[index].get_ydata()
        assert drawn[drawn == drawn].tolist() == kept
        counts = [count.value for count in layer.near.value.experts]
        assert right.lines[2 * index].get_ydata().tolist() == counts
    assert left.get_xscale() == left.get_yscale() == right.get_xscale() == "log"
    assert all(axes.get_xlabel() and axes.get_ylabel() for axes in (left, right))
    assert right.get_legend().get_texts()[0].get_text() == "layer 0"


def test_flips_are_those_of_the_formats_fine_to_coarse(result):
    (axes,) = figures(result)["flips"]().axes
    for index, layer in enumerate(result.measures.layers):
        rows = sorted(layer.precision.value, key=lambda row: row.step)
        counted, predicted = axes.lines[index], axes.lines[index + len(result.jumps)]
        expected = [row.flip_emulated.value for row in rows]
        assert [y for y in counted.get_ydata() if y == y] == [y for y in expected if y]
        expected = [row.flip.value for row in rows]
        assert [y for y in predicted.get_ydata() if y == y] == [y for y in expected if y]


def test_points_are_the_jumps_of_both_samples(result):
    (axes,) = figures(result)["jumps"]().axes
    for index, layer in enumerate(result.jumps):
        others, near = axes.collections[2 * index : 2 * index + 2]
        assert near.get_offsets()[:, 1].tolist() == pytest.approx(layer.value.near.jumps)
        assert others.get_offsets()[:, 1].tolist() == pytest.approx(layer.value.random.jumps)
        assert near.get_offsets()[:, 0].min() > 0  # exact ties have a place too


def test_the_load_is_relative_to_an_even_one_and_the_dead_are_crossed(result):
    axes, _ = figures(result)["load"]().axes
    cells = axes.images[0].get_array()
    for row, layer in zip(cells, result.measures.layers, strict=True):
        for shown, share in zip(row, layer.load.share, strict=True):
            assert 2**shown == pytest.approx(share * 8, rel=0.004) if share else shown == -3
    crosses = axes.collections[0].get_offsets().tolist()
    assert crosses == [[e, y] for y, x in enumerate(result.measures.layers) for e in x.load.dead]


def test_many_layers_get_a_bar_of_colours_and_few_a_legend():
    drawn = figures(make_inspection(layers=9, tokens=40))
    for name in ("routing", "gaps", "near", "flips", "jumps"):
        many = drawn[name]()
        assert [axes.get_ylabel() for axes in many.axes][-1] == "layer"
        assert all(axes.get_legend() is None for axes in many.axes)


@pytest.mark.parametrize("name", ["routing", "gaps", "near", "flips", "jumps"])
def test_what_the_result_does_not_hold_is_refused_with_the_reason(ids_only, name):
    with pytest.raises(TraceError, match=r"no figure without .*: not answerable"):
        figures(ids_only)[name]()


def test_every_figure_has_a_name_and_can_be_asked_for_by_it(result):
    assert list(figures(result)) == ["routing", "gaps", "near", "flips", "jumps", "load"]
    assert result.plot("gaps").axes[0].get_xlabel() == "gap (logits)"
    with pytest.raises(ValueError, match="no figure 'gap'; the figures are: routing, gaps, near"):
        result.plot("gap")
