"""Which tokens are sampled: the smallest gaps exactly, others at random, however batched."""

import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.walls import sampled, watched
from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.jumps import BlockSampler, _TokenPool
from tieline.models.routed_block import BlockCall, Rows, block_of
from tieline.run.observers import RouteRecorder, observing, sites_of
from tieline.run.plan import Pass


def offered(keys, lots, cuts, size):
    """A pool that was offered the tokens in pieces, split at `cuts`."""
    pool, states = _TokenPool(size), torch.arange(len(keys)).double()[:, None]
    edges = [0, *sorted(cuts), len(keys)]
    for low, high in itertools.pairwise(edges):
        part = slice(low, high)
        call = BlockCall((states[part],), {}, states[part])
        pool.offer(keys[part], lots[part], torch.arange(low, high), call)
    return pool


keys = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, torch.inf]), min_size=1, max_size=14)


@given(keys, st.sets(st.integers(0, 14), max_size=3), st.integers(1, 6))
def test_a_pool_holds_the_smallest_keys_however_the_stream_is_cut(values, cuts, size):
    order = torch.tensor(values, dtype=torch.float64)
    lots = torch.randperm(len(values), generator=torch.Generator().manual_seed(0)).double()
    pool = offered(order, lots, {min(cut, len(values)) for cut in cuts}, size)
    ranked = sorted(range(len(values)), key=lambda i: (values[i], lots[i].item()))
    expected = [index for index in ranked if values[index] < torch.inf][:size]
    assert pool.tokens.tolist() == expected
    left = pool.excluding(torch.tensor(expected[:1], dtype=torch.int64), most=2)
    assert (left is None) == (len(expected) < 2)
    if left is not None:
        assert left.tokens.tolist() == expected[1:3]
        assert left.rows.output[:, 0].tolist() == expected[1:3]


def test_equal_keys_draw_lots_also_with_those_that_are_there():
    keys, lots = torch.zeros(4, dtype=torch.float64), torch.tensor([3.0, 2.0, 1.0, 0.0]).double()
    assert offered(keys, lots, {2}, size=2).tokens.tolist() == [3, 2]


def test_near_are_the_smallest_gaps_and_random_ones_are_others():
    model = lively(tiny_model("olmoe"))
    trace, sampler = watched(model, [batch(), batch(3, 9)], near=10, random=12)
    for layer in trace.layers:
        near, random = sampler.near(layer.name), sampler.random(layer.name)
        assert layer.gap[near.tokens].tolist() == layer.gap.sort().values[:10].tolist()
        assert len(random.tokens) == 12
        assert not set(near.tokens.tolist()) & set(random.tokens.tolist())
        assert isinstance(near.rows, Rows)


def test_rows_are_what_the_block_was_given_and_made():
    model, calls = lively(tiny_model("olmoe")), []
    block = model.get_submodule("model.layers.1.mlp")
    block.register_forward_hook(lambda m, args, output: calls.append((args[0], output)))
    _, sampler = watched(model, [batch(), batch(3, 9)])
    inputs, outputs = (torch.cat([c[i].flatten(0, 1) for c in calls[1:]]) for i in (0, 1))
    near = sampler.near("model.layers.1.mlp.gate")
    assert torch.equal(near.rows.inputs[0], inputs[near.tokens])
    assert torch.equal(near.rows.output, outputs[near.tokens])


def test_the_random_sample_depends_on_the_seed_and_not_on_the_batches():
    model, ids = lively(tiny_model("olmoe")), batch(4, 12)
    name = "model.layers.0.mlp.gate"

    def drawn(seed, rows):
        blocks = {name: block_of(model, name)}
        _, sampler = sampled(model, blocks, ids.split(rows), near=4, random=8, seed=seed)
        return sampler.random(name).tokens.tolist()

    assert drawn(0, 4) == drawn(0, 1)
    assert drawn(0, 4) != drawn(1, 4)


def test_padding_and_blocks_that_are_not_called_are_told():
    model, name = lively(tiny_model("olmoe")), "model.layers.0.mlp.gate"
    blocks = {name: block_of(model, name), "model.norm": block_of(model, "model.norm")}
    recorder = RouteRecorder(model, layers=[name])
    sampler = BlockSampler(blocks, recorder, near=4, random=0, seed=0)
    run = Pass(0)
    recorder.on_start(run, batch())
    with torch.inference_mode(), observing(model, [recorder, sampler], run):
        model(input_ids=batch())
        site = sites_of(model)[name]
        shorter = BlockCall((torch.zeros(2, 9, 32),), {}, torch.zeros(2, 9, 32))
        sampler.on_block(run, site, shorter, None)
    assert "must not be padded" in sampler.status(name)
    assert "is not called as a module" in sampler.status("model.norm")
