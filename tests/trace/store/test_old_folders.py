"""Folders of version 1, as they were written before the store was rewritten, still load."""

from pathlib import Path

import pytest
import torch

from tieline.trace import folder_kind, load_summary, load_trace, save_summary, save_trace
from tieline.trace.record import identical_values

pytestmark = pytest.mark.usefixtures("axes_unchecked")
FIXTURES = Path(__file__).parents[1] / "fixtures"
PROVENANCE = {"model": "zoo", "seed": 0, "nested": {"a": [1, 2.5, None, True]}}


def test_a_trace_of_version_1_holds_the_numbers_that_were_saved(tmp_path):
    trace = load_trace(FIXTURES / "v1-trace")
    assert folder_kind(FIXTURES / "v1-trace") == "trace"
    assert trace.tokens.tolist() == [21, 27, 47, 18, 34]
    assert trace.documents.tolist() == [-1, -1, -1, 0, -1]
    assert trace.positions.tolist() == [4, 3, 5, 1, 1]
    assert trace.epsilons == (0.125, 0.5, 2.0)
    assert trace.provenance == PROVENANCE
    plain, grouped = trace.layers
    assert plain.experts.tolist() == [
        [0, 4, 1, 2],
        [2, 3, 4, 1],
        [1, 0, 3, 2],
        [3, 2, 0, 4],
        [2, 3, 0, 5],
    ]
    assert plain.gap.tolist() == [2.5, 0.0, 1.25, 0.875, 0.75]
    assert plain.near.tolist() == [[2, 2, 2], [3, 3, 5], [2, 2, 4], [2, 2, 5], [2, 2, 4]]
    assert (grouped.facts.units, grouped.facts.n_groups) == ("sigmoid", 3)
    assert grouped.scores[0].tolist() == [1.625, 1.25, 0.125, -0.375, -0.5]
    assert grouped.gap.tolist() == [0.125, 0.25, 0.0, 0.125, 0.25]
    assert torch.equal(grouped.bias, torch.arange(6) / 8)
    save_trace(trace, tmp_path / "again")
    assert _bytes(tmp_path / "again") == _bytes(FIXTURES / "v1-trace")


def test_a_summary_of_version_1_holds_the_numbers_that_were_saved(tmp_path):
    summary = load_summary(FIXTURES / "v1-summary")
    layer = summary.layers[0]
    assert folder_kind(FIXTURES / "v1-summary") == "summary"
    assert (summary.tokens, summary.sample_size, summary.sources) == (9, 4, (PROVENANCE,))
    assert layer.load.tolist() == [5, 0, 4, 0]
    assert (layer.nonfinite, layer.first_nonfinite) == (1, (0, 6))
    assert layer.gap_quantiles([0.5, 1.0]) == ((1.25, 1.25), (3.125, 3.125))
    assert layer.near.tolist() == [[0, 8, 0, 0, 0], [0, 6, 2, 0, 0], [0, 2, 1, 4, 1]]
    assert layer.orders.tolist() == [[8, 0, 0, 0], [6, 2, 0, 0], [2, 1, 4, 1]]
    assert layer.moments.mean().tolist() == [1.1875, -0.171875, -0.640625]
    assert layer.moments.variance().tolist() == [0.5234375, 0.687255859375, 0.197021484375]
    assert layer.coalitions.count() == (2, 2, 0.0)
    assert summary.sample.documents.tolist() == [-1, -1, 0, 0]
    assert summary.sample.layers[0].experts.tolist() == [[0, 1, 2], [2, 1, 3], [0, 2, 3], [2, 0, 3]]
    save_summary(summary, tmp_path / "again")
    assert _bytes(tmp_path / "again") == _bytes(FIXTURES / "v1-summary")
    assert identical_values(load_summary(tmp_path / "again"), summary)


def _bytes(folder):
    return {entry.name: entry.read_bytes() for entry in folder.iterdir()}
