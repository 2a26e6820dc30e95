"""Scalars over ranks are those of one process; a rank that cannot measure silences all."""

import pytest
import torch
from torch import multiprocessing

from tests.models.tiny import batch, lively, tiny_model
from tieline.analysis.monitor import RoutingMonitor, join_scalars, layer_scalars
from tieline.models.router_calls import watch_routing

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = 6


def scalars_of(rows, over_ranks, model=None):
    """Scalars of a training pass over some rows of the batch."""
    model = lively(tiny_model("olmoe")).train() if model is None else model
    monitor = RoutingMonitor(model, every=1, check_losses=False, over_ranks=over_ranks)
    for row in rows:
        model(input_ids=row[None])
    return monitor.read(0)


def test_statistics_join_as_those_of_all_tokens():
    model, calls = lively(tiny_model("olmoe")), []
    with watch_routing(model, calls.append):
        for row in batch(ROWS, 9):
            model(input_ids=row[None])
    layer_calls = [call for call in calls if call.trace.name == calls[0].trace.name]
    pieces = [layer_scalars(layer_calls[:2]), layer_scalars(layer_calls[2:])]
    joined, expected = join_scalars(pieces), layer_scalars(layer_calls)
    assert joined.tokens == expected.tokens == ROWS * 9
    assert joined.load == expected.load
    assert torch.equal(joined.gaps, expected.gaps)
    assert joined.logits == pytest.approx(expected.logits)
    assert joined.rounding == pytest.approx(expected.rounding)


def test_one_process_is_its_own_sum():
    rows = batch(ROWS, 9)
    alone = scalars_of(rows, over_ranks=False)
    assert scalars_of(rows, over_ranks=True) == pytest.approx(alone, rel=1e-12)


def one_rank(rank, folder, results):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    rows = batch(ROWS, 9)
    both_ranks = scalars_of(rows[:2] if rank else rows[2:], over_ranks=True)
    nothing = scalars_of(rows[:0] if rank else rows, over_ranks=True)
    broken = lively(tiny_model("olmoe")).train()
    if rank:
        broken.model.layers[0].mlp.gate.weight.fill_(torch.nan)
    results[rank] = both_ranks, nothing, scalars_of(rows, over_ranks=True, model=broken)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one_process(tmp_path):
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(one_rank, (str(tmp_path), results), nprocs=2)
        by_rank = dict(results)
    expected = scalars_of(batch(ROWS, 9), over_ranks=False)
    for both_ranks, nothing, broken in by_rank.values():
        assert both_ranks == pytest.approx(expected, rel=1e-12)
        assert nothing == pytest.approx(expected, rel=1e-12)
        assert broken == {}
