"""Shares of batches: together they are all batches, and what is put together is in their order."""

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Ranks as Processes
from tests.run.on_ranks import captured, compared, inspected, repaired
from tests.tiers import slow
from tieline.analysis.audit import audit
from tieline.analysis.diff import diff
from tieline.analysis.smooth import smooth
from tieline.core.errors import ParameterError
from tieline.core.statistics import SequenceSums
from tieline.engines.engine_capture import capture_engine
from tieline.run import ranks
from tieline.run.ranks import Ranks


@pytest.fixture
def as_rank(monkeypatch):
    """Set rank and number of processes; tests replace the communication."""

    def of(rank, count):
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_world_size", lambda: count)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)

    return of


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_are_all_batches_in_order(as_rank, count):
    batches = [torch.full((1 + index % 2, 3), index) for index in range(5)]
    batch_numbers, documents, tokens = [], 0, 0
    for rank in range(count):
        as_rank(rank, count)
        share = Ranks.share_batches("data", batches)
        assert (share.number, share.documents, share.tokens) == (
            len(batch_numbers),
            documents,
            tokens,
        )
        assert len(share.batches) <= share.passes
        assert all(int(batch[0, 0]) == number for number, batch in share.numbered.items())
        batch_numbers += [int(batch[0, 0]) for batch in share.batches]
        documents += sum(len(batch) for batch in share.batches)
        tokens += sum(ids.numel() for ids in share.batches)
    assert batch_numbers == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("way", [None, "tp", "ep", "pp"])
def test_all_tokens_are_run_where_the_model_is_spread(as_rank, way):
    as_rank(1, 2)
    batches = [torch.ones(1, 3, dtype=torch.int64)] * 3
    assert len(Ranks.share_batches(way, batches).batches) == 3


def test_fewer_batches_than_processes_are_refused(as_rank):
    as_rank(0, 3)
    with pytest.raises(ParameterError, match="2 batches are too few for 3 processes: take more"):
        Ranks.share_batches("data", [torch.ones(1, 3, dtype=torch.int64)] * 2)


def test_sums_of_all_processes_are_those_of_one(as_rank, monkeypatch):
    values = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    total, shares = SequenceSums(), [SequenceSums(), SequenceSums()]
    for index, row in enumerate(values):
        total.add(row[None])
        shares[index // 2].add(row[None])
    never = SequenceSums()
    sent = []
    for rank in (0, 1):
        as_rank(rank, 2)
        monkeypatch.setattr(ranks, "gathered_tensors", lambda sums: sent.append(sums) or [sums])
        copy = SequenceSums(list(shares[rank].sums), list(shares[rank].counts))
        Ranks("data", ()).join_sums([copy, never])
    monkeypatch.setattr(ranks, "gathered_tensors", lambda sums: sent)
    Ranks("data", ()).join_sums([shares[0], never])
    assert shares[0].mean() == total.mean()
    assert never.sums == []


@pytest.fixture(scope="module")
def alone():
    return inspected(None)


WAYS = [("data", 2), ("ep", 2)]
SLOW = [("tp", 2), ("pp", 2), ("fsdp", 2), ("data", 3), ("tp", 4), ("ep", 4), ("fsdp", 3)]


@pytest.mark.parametrize(("way", "count"), [*WAYS, *(slow(*each) for each in SLOW)])
def test_processes_find_what_one_finds(alone, way, count):
    """Exactly, except where matrices are sharded: their products are summed in another order."""
    ranks = Processes(count)
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


def on_ranks(count, task, *args):
    ranks = Processes(count)
    try:
        return ranks.run(task, *args)
    finally:
        ranks.close()


def numbers(plain, path=""):
    """Every leaf of JSON values, by its path."""
    if isinstance(plain, dict):
        return {k: v for key, x in plain.items() for k, v in numbers(x, f"{path}.{key}").items()}
    if isinstance(plain, list):
        return {k: v for n, x in enumerate(plain) for k, v in numbers(x, f"{path}[{n}]").items()}
    return {path: plain}


@pytest.mark.parametrize(
    ("way", "count"),
    [("data", 2), slow("data", 4), slow("tp", 2), slow("ep", 2), slow("pp", 2), slow("fsdp", 2)],
)
def test_a_capture_of_processes_is_that_of_one(way, count):
    documents, layers, metrics = captured(None, 5)
    for result in on_ranks(count, captured, way, 5):
        assert torch.equal(result[0], documents)
        assert result[2] == metrics
        for (experts, scores), (other, others) in zip(result[1], layers, strict=True):
            if way == "tp":
                assert (scores[:, :2] - others[:, :2]).abs().max() < 1e-4
            else:
                assert torch.equal(experts, other)
                assert torch.equal(scores, others)


@pytest.mark.parametrize(
    ("way", "count"),
    [("data", 2), slow("data", 4), slow("ep", 2), slow("ep", 4), slow("pp", 2), slow("fsdp", 2)],
)
def test_a_comparison_of_processes_is_that_of_one(way, count):
    """Exactly; where low precision is not emulated, no reference run says what to expect."""
    alone = compared(None, 5)
    for result in on_ranks(count, compared, way, 5):
        if way in ("data", "ep"):
            assert result == alone
        assert result["logits"] == alone["logits"]
        assert result["metrics"]["flip"] == alone["metrics"]["flip"]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["data", "ep"])
def test_emulated_formats_and_replay_too(way):
    options = {"dtype": "int8-emulated", "replay": True}
    alone = compared(None, 3, **options)
    for result in on_ranks(2, _compared_so, way, options):
        ours, others = numbers(result), numbers(alone)
        assert ours.keys() == others.keys()
        if way == "data":
            assert ours == others
        assert result["replay"]["live"]["kl"] == pytest.approx(alone["replay"]["live"]["kl"], 1e-3)


def _compared_so(way, options):
    return compared(way, 3, **options)


@pytest.mark.slow
def test_a_model_that_processes_smoothed_is_saved_by_one(tmp_path):
    on_ranks(2, repaired, "data", 3, tmp_path / "model")
    assert (tmp_path / "model" / "model.tieline.safetensors").is_file()


REFUSED = [
    (audit, {"parallel": "tp"}, "an audit emulates low precision, and matrices are cut inside"),
    (audit, {"parallel": "fsdp"}, "and weights are gathered from a store that is not rounded"),
    (audit, {"parallel": "pp"}, "every process has some of the layers alone: take data or ep"),
    (audit, {"parallel": "xx"}, "must be one of data, tp, ep, pp, fsdp, got 'xx'"),
    (audit, {"parallel": "data", "budget_minutes": 1.0}, "budget_minutes goes by the clock of one"),
    (smooth, {"parallel": "ep"}, "a whole model with a whole copy of it"),
    (capture_engine, {"parallel": "data", "engine": "vllm"}, "vllm runs by itself"),
]


@pytest.mark.parametrize(("work", "options", "message"), REFUSED)
def test_what_cannot_be_shared_is_refused_before_anything_is_loaded(
    as_rank, work, options, message
):
    as_rank(0, 2)
    with pytest.raises(ParameterError, match=message):
        work("no/such-model", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parallel": "tp", "dtype_b": "int8-emulated"}, "the dtype 'int8-emulated' of B emulates"),
        ({"parallel": "pp", "replay": True}, "replay needs all layers in every process"),
        ({"parallel": "fsdp", "batch_size_b": 2}, "run equally many passes: take parallel data"),
    ],
)
def test_comparisons_that_cannot_be_shared_are_refused(as_rank, options, message):
    as_rank(0, 2)
    with pytest.raises(ParameterError, match=message):
        diff("no/such-model", "no/other-model", **options)


def test_an_engine_is_compared_with_in_one_process(as_rank):
    as_rank(0, 2)
    with pytest.raises(ParameterError, match="an engine runs by itself"):
        diff("no/such-model", "vllm:no/other-model", parallel="data")
