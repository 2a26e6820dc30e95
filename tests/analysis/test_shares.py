"""Shares of batches: together they are all batches, and what is put together is in their order."""

import pytest
import torch
import torch.distributed as dist

from tests.analysis.on_ranks import inspected
from tests.training.parallel.ranks import Ranks
from tieline.analysis import shares
from tieline.analysis.shares import Share
from tieline.core.errors import ParameterError
from tieline.core.statistics import SequenceSums


@pytest.fixture
def as_rank(monkeypatch):
    """Only rank and number of processes are asked for; messages are handed over by the test."""

    def of(rank, count):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: count)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)

    return of


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_are_all_batches_in_order(as_rank, count):
    parts = [torch.full((1 + place % 2, 3), place) for place in range(5)]
    seen, documents, tokens = [], 0, 0
    for rank in range(count):
        as_rank(rank, count)
        share = Share.of("data", parts)
        assert (share.number, share.documents, share.tokens) == (len(seen), documents, tokens)
        assert len(share.batches) <= share.passes
        seen += [int(batch[0, 0]) for batch in share.batches]
        documents += sum(len(batch) for batch in share.batches)
        tokens += share.own_tokens
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("way", [None, "tp", "ep", "pp"])
def test_all_tokens_are_run_where_the_model_is_spread(as_rank, way):
    as_rank(1, 2)
    parts = [torch.ones(1, 3, dtype=torch.int64)] * 3
    assert len(Share.of(way, parts).batches) == 3


def test_fewer_batches_than_processes_are_refused(as_rank):
    as_rank(0, 3)
    with pytest.raises(ParameterError, match="2 batches are too few for 3 processes: take more"):
        Share.of("data", [torch.ones(1, 3, dtype=torch.int64)] * 2)


def test_sums_of_all_processes_are_those_of_one(as_rank, monkeypatch):
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    one, parts = SequenceSums(), [SequenceSums(), SequenceSums()]
    for place, row in enumerate(values):
        one.add(row[None])
        parts[place // 2].add(row[None])
    never = SequenceSums()
    sent = []
    for rank in (0, 1):
        as_rank(rank, 2)
        monkeypatch.setattr(shares, "gathered_tensors", lambda own: sent.append(own) or [own])
        copy = SequenceSums(list(parts[rank].sums), list(parts[rank].counts))
        Share("data", ()).all_sums([copy, never])
    monkeypatch.setattr(shares, "gathered_tensors", lambda own: sent)
    Share("data", ()).all_sums([parts[0], never])
    assert parts[0].mean() == one.mean()
    assert never.sums == []


@pytest.fixture(scope="module")
def alone():
    return inspected(None)


WAYS = [("data", 2), ("ep", 2)]
SLOW = [("tp", 2), ("pp", 2), ("fsdp", 2), ("data", 3), ("tp", 4), ("ep", 4), ("fsdp", 3)]


@pytest.mark.parametrize(
    ("way", "count"), [*WAYS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW)]
)
def test_processes_find_what_one_finds(alone, way, count):
    """Exactly, but where matrices are cut: there sums of products are added in another order."""
    ranks = Ranks(count)
    try:
        everywhere = ranks.run(inspected, way)
    finally:
        ranks.close()
    for metrics, jumps, layers in everywhere:
        if way != "tp":
            assert metrics == alone[0]
            assert jumps == alone[1]
        assert metrics == pytest.approx(alone[0], abs=1e-4)
        for (experts, scores), (other, others) in zip(layers, alone[2], strict=True):
            if way == "tp":
                assert (scores[:, :2] - others[:, :2]).abs().max() < 1e-4
            else:
                assert torch.equal(experts, other)
                assert torch.equal(scores, others)
