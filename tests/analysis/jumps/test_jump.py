"""Jumps: their definition on a real block, the table, and what cannot be answered."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.walls import watched
from tests.models.tiny import CHOSEN, EXPERTS, batch, lively, tiny_model
from tieline.analysis.inspect_records import JumpSample
from tieline.analysis.jumps import JumpSettings, gap_jump_table, measure_jumps, relative_change
from tieline.core.errors import ParameterError
from tieline.models import smooth_

FEW = JumpSettings(near=8, random=8)


def jumps_of(model, ids, settings=FEW):
    trace, sampler = watched(model, ids, settings.near, settings.random)
    with torch.inference_mode():
        return trace, measure_jumps(model, trace, sampler, settings)


def expert_outputs(model, layer, states):
    """Output of every expert of an OLMoE for each token, by the definition."""
    experts = model.model.layers[layer].mlp.experts
    outputs = []
    for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True):
        gate, up = (states @ gate_up.T).chunk(2, dim=-1)
        outputs.append((torch.nn.functional.silu(gate) * up) @ down.T)
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("kind", ["near", "random"])
def test_jumps_are_those_of_the_definition(kind):
    model, block_calls = lively(tiny_model("olmoe")), []
    block = model.model.layers[1].mlp
    block.register_forward_hook(lambda m, args, output: block_calls.append((args[0], output)))
    trace, layer_jumps = jumps_of(model, [batch()])
    states, output = (x.flatten(0, 1) for x in block_calls[1])
    layer, sample = trace.layers[1], getattr(layer_jumps[1].value, kind)
    outputs = expert_outputs(model, 1, states)
    for token, jump, gap, leaving, entering in zip(
        sample.tokens, sample.jumps, sample.gaps, sample.leaving, sample.entering, strict=True
    ):
        weight = layer.weights[token, CHOSEN - 1]
        change = weight * (outputs[token, entering] - outputs[token, leaving])
        assert jump == pytest.approx((change.norm() / output[token].norm()).item(), rel=1e-4)
        assert gap == layer.gap[token].item()
        assert [leaving, entering] == layer.experts[token, CHOSEN - 1 : CHOSEN + 1].tolist()


def test_the_record_tells_where_and_what():
    model = lively(tiny_model("olmoe"))
    trace, layer_jumps = jumps_of(model, [batch(), batch(3, 9)])
    for layer, jumps in zip(trace.layers, layer_jumps, strict=True):
        value = jumps.value
        assert (jumps.name, jumps.status) == (layer.name, "ok")
        assert value.module == layer.name.removesuffix(".gate")
        near = torch.tensor(value.near.tokens)
        assert list(value.near.gaps) == sorted(value.near.gaps)
        assert list(value.near.documents) == trace.documents[near].tolist()
        assert list(value.near.positions) == trace.positions[near].tolist()
        share = sum(jump >= 0.1 for jump in value.near.jumps) / 8
        assert value.dangerous.value == share
        assert value.near_quantiles.value[2] == sorted(value.near.jumps)[3]
        assert sum(map(sum, value.table.counts)) == 16
        assert value.loss is None


def test_equal_experts_have_no_jump_and_the_threshold_counts():
    model = lively(tiny_model("olmoe"))
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            weight.copy_(weight[:1].expand_as(weight))
    _, layer_jumps = jumps_of(model, [batch()])
    for jumps in layer_jumps:
        assert max(jumps.value.near.jumps) < 1e-6
        assert jumps.value.dangerous.value == 0
    _, strict = jumps_of(model, [batch()], JumpSettings(8, 8, dangerous_above=0.0))
    assert strict[0].value.dangerous.value == 1


def test_all_experts_chosen_leaves_nothing_to_swap():
    model = lively(tiny_model("olmoe", num_experts_per_tok=EXPERTS))
    _, layer_jumps = jumps_of(model, [batch()])
    assert {jumps.status for jumps in layer_jumps} == {
        f"not answerable: all {EXPERTS} experts are chosen, so no tie is possible"
    }


def test_chosen_groups_that_hold_k_experts_leave_nothing_to_swap():
    model = lively(tiny_model("deepseek_v3", topk_group=1))
    _, layer_jumps = jumps_of(model, [batch()])
    assert {jumps.status for jumps in layer_jumps} == {
        "not answerable: no token has an expert that could enter"
    }


def test_a_block_that_mixes_tokens_is_refused():
    model = lively(tiny_model("olmoe"))
    block = model.model.layers[0].mlp
    block.register_forward_hook(lambda m, args, output: output + args[0].mean(dim=1, keepdim=True))
    _, layer_jumps = jumps_of(model, [batch()])
    assert "does not reproduce its output" in layer_jumps[0].status
    assert layer_jumps[0].value is None
    assert layer_jumps[1].status == "ok"


@pytest.mark.filterwarnings("ignore")
def test_routed_attention_of_jetmoe_is_no_block():
    _, layer_jumps = jumps_of(lively(tiny_model("jetmoe")), [batch()])
    assert "is not called as a module" in layer_jumps[0].status
    assert layer_jumps[1].status == "ok"


def test_relative_change_of_rows():
    before = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0]])
    after = torch.tensor([[3.0, 5.0], [0.0, 0.0], [1.0, 0.0]])
    assert relative_change(before, after).tolist() == [0.2, 0.0, math.inf]


values = st.lists(st.integers(0, 40).map(lambda n: n / 8), min_size=2, max_size=12)


def sample_of(gaps, jumps):
    none = tuple(range(len(gaps)))
    return JumpSample(none, none, none, tuple(gaps), tuple(jumps), none, none)


@given(values, values, st.data())
def test_the_table_counts_every_token_once_and_its_shares_are_those_of_all(near, rest, data):
    gaps = sorted([*near, *rest])
    near, rest = gaps[: len(near)], gaps[len(near) :]
    jumps = [data.draw(st.integers(0, 24)) / 8 for _ in gaps]
    halves = [rest[i] for i in range(0, len(rest), 2)]  # the random sample
    drawn = jumps[len(near) :][: len(halves)]
    settings = JumpSettings(gap_levels=(0.0, 0.5, 1.0), jump_levels=(0.0, 0.5, 1.0))
    table = gap_jump_table(
        torch.tensor([*gaps, math.inf], dtype=torch.float64),
        sample_of(near, jumps[: len(near)]),
        sample_of(halves, drawn),
        settings,
    )
    tokens = list(zip([*near, *halves], [*jumps[: len(near)], *drawn], strict=True))
    for row in range(2):
        for column in range(2):
            inside = [
                index
                for index, (gap, jump) in enumerate(tokens)
                if held(gap, table.gap_edges, row) and held(jump, table.jump_edges, column)
            ]
            weight = sum(1 if i < len(near) else len(rest) / len(halves) for i in inside)
            assert table.counts[row][column] == len(inside)
            assert table.shares[row][column] == pytest.approx(weight / (len(gaps) + 1))
    assert sum(map(sum, table.counts)) == len(tokens)


def held(value, edges, bin_index):
    """Whether `bin_index` is the bin of the value: the last bin that starts at or below it."""
    starts = [i for i in range(len(edges) - 1) if edges[i] <= value]
    return bin_index == max(starts, default=0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"near": 0},
        {"random": -1},
        {"loss_swaps": -1},
        {"seed": -1},
        {"gap_levels": (0.1, 1.0)},
        {"jump_levels": (0.0, 0.7, 0.3, 1.0)},
        {"jump_levels": (0.0,)},
    ],
)
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ParameterError):
        JumpSettings(**wrong)


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "llama4"])
def test_at_the_ties_of_a_smoothed_layer_the_output_hardly_moves(family):
    """Top-k jumps there; the smoothed layer moves only in proportion to its change of share."""
    model, ids = lively(tiny_model(family)), [batch(8, 64)]
    _, hard = jumps_of(model, ids)
    first = hard[0].name
    smooth_(model, epsilon={first: 1.0}, k_max=EXPERTS)
    trace, soft = jumps_of(model, ids)
    assert trace.layer(first).smoothed
    before, after = hard[0].value.near, soft[0].value.near
    assert (before.tokens, before.gaps) == (after.tokens, after.gaps)
    pairs = [
        (old, new, gap)
        for old, new, gap in zip(before.jumps, after.jumps, before.gaps, strict=True)
        if gap < 0.05
    ]
    assert pairs
    assert all(new < 4 * gap * max(old, 0.1) for old, new, gap in pairs)
