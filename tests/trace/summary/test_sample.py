"""The buffer behind a sample stays small, whatever passes through it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tieline.core.errors import TraceError
from tieline.trace.counts import token_hash
from tieline.trace.summary import SampleBuffer, rows_with_smallest_hashes


def rows(documents, **fields):
    ids = torch.tensor(documents)
    keys = {"tokens": ids, "documents": ids, "positions": ids * 0}
    return {**keys, "experts": ids[:, None], **fields}


def test_rows_that_wait_never_exceed_two_samples_and_a_batch():
    buffer, batch, size = SampleBuffer(8), 10, 8
    for start in range(0, 2000, batch):
        part = rows(list(range(start, start + batch)))
        buffer.add(part, token_hash(part["documents"], part["positions"]))
        held = sum(len(part["documents"]) for part in buffer._samples)
        assert held == buffer._pending < 2 * size + batch
    all_rows = rows(list(range(2000)))
    hashes = token_hash(all_rows["documents"], all_rows["positions"])
    smallest = sorted(range(2000), key=lambda token: hashes[token])[:size]
    assert buffer.rows()["documents"].tolist() == sorted(smallest)


def test_of_two_records_of_a_token_the_same_one_wins_in_any_order():
    first, second = rows([3], weights=torch.ones(1, 1)), rows([3], weights=torch.zeros(1, 1))
    assert rows_with_smallest_hashes([first, second], 5)["weights"].tolist() == [[0.0]]
    assert rows_with_smallest_hashes([second, first], 5)["weights"].tolist() == [[0.0]]
    bigger = {**first, "tokens": torch.tensor([9])}
    assert rows_with_smallest_hashes([bigger, second], 5)["tokens"].tolist() == [3]
    assert rows_with_smallest_hashes([{**second, "tokens": torch.tensor([9])}, first], 5)[
        "tokens"
    ].tolist() == [3]


def test_a_later_record_of_the_last_token_of_a_full_sample_still_counts():
    buffer = SampleBuffer(1)
    for weight in (1.0, 3.0, 2.0):  # of these, 2.0 has the smallest bytes
        part = rows([3], weights=torch.full((1, 1), weight))
        buffer.add(part, token_hash(part["documents"], part["positions"]))
        buffer.rows()
    assert buffer.rows()["weights"].tolist() == [[2.0]]


def test_repeats_do_not_take_the_place_of_other_tokens():
    batches = [rows([1, 2, 3])] * 5
    assert rows_with_smallest_hashes(batches, 3)["documents"].tolist() == [1, 2, 3]


def test_different_fields_and_types_are_refused():
    with pytest.raises(TraceError, match="same fields"):
        rows_with_smallest_hashes([rows([1]), rows([1], weights=torch.ones(1, 1))], 5)
    with pytest.raises(TraceError, match="one type and width"):
        rows_with_smallest_hashes([rows([1], weights=torch.ones(1, n)) for n in (1, 2)], 5)


@pytest.mark.slow
def test_a_million_tokens_of_sixteen_layers_stay_under_300_mb():
    script = Path(__file__).parents[3] / "benchmarks" / "summary_memory.py"
    run = subprocess.run(
        [sys.executable, str(script), "--json"], capture_output=True, text=True, check=True
    )
    result = json.loads(run.stdout)
    assert result["tokens"] >= 1_000_000
    assert result["growth_mb"] < result["limit_mb"]
