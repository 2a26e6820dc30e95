"""Traces of Megatron-Core: records of layers, steps and ranks, and the logits beside them."""

import json

import numpy as np
import pytest
import torch

from tieline.core.errors import TraceError
from tieline.trace import import_trace
from tieline.trace.readers import recognise_format

EXPERTS, K, LAYERS = 8, 2, (2, 4)


def write_rank(folder, rank, steps=(5, 3), with_logits=True, change=lambda record: record):
    """Records as Megatron writes them: ids in ascending order, logits in bfloat16."""
    generator = torch.Generator().manual_seed(rank)
    data, lines, all_logits = b"", [], []
    for step, count in enumerate(steps):
        for layer in LAYERS:
            logits = torch.randn(count, EXPERTS, generator=generator).bfloat16()
            ids = logits.float().topk(K).indices.sort(dim=1).values
            record = {"step": step, "stage": "pre_dispatch", "block": "decoder", "layer": layer}
            record |= {"rank": rank, "num_tokens": count, "topk": K, "top_indices": ids.tolist()}
            if with_logits:
                part = logits.view(torch.int16).numpy().tobytes()
                record |= {"logit_offset": len(data), "logit_bytes": len(part)}
                record |= {"logit_shape": [count, EXPERTS]}
                data += part
            all_logits.append(logits.float())
            lines.append(json.dumps(change(record)))
    (folder / f"router_trace_rank{rank}.jsonl").write_text("\n".join(lines) + "\n")
    if with_logits:
        (folder / f"logits_rank{rank}.bin").write_bytes(data)
    return all_logits


def test_steps_of_all_ranks_are_joined_and_logits_give_gaps(tmp_path):
    logits = [*write_rank(tmp_path, 0), *write_rank(tmp_path, 1)]
    assert recognise_format(tmp_path) == "megatron-trace"
    trace = import_trace(tmp_path)
    assert [layer.name for layer in trace.layers] == ["layers.2", "layers.4"]
    assert trace.documents.tolist() == [0] * 5 + [1] * 3 + [2] * 5 + [3] * 3
    assert trace.tokens.tolist() == [-1] * 16
    layer = trace.layers[0]
    assert layer.facts.n_experts == EXPERTS
    top = torch.cat(logits[::2]).double().topk(K + 1).values
    assert torch.equal(layer.gap, top[:, K - 1] - top[:, K])


def test_one_file_without_logits_is_a_trace_of_ids(tmp_path):
    write_rank(tmp_path, 0, with_logits=False)
    trace = import_trace(tmp_path / "router_trace_rank0.jsonl")
    assert trace.layers[0].scores is None
    assert trace.n_tokens == 8


def test_logits_that_a_bias_overrules_are_left_out(tmp_path):
    def other(record):
        return record | {"top_indices": [[0, 1]] * record["num_tokens"]}

    write_rank(tmp_path, 0, change=other)
    trace = import_trace(tmp_path)
    assert trace.layers[0].scores is None
    assert any("correction bias" in note for note in trace.provenance["said"])


def test_heads_of_further_tokens_are_left_out(tmp_path):
    write_rank(tmp_path, 0)
    path = tmp_path / "router_trace_rank0.jsonl"
    first = json.loads(path.read_text().splitlines()[0])
    head = first | {"block": "mtp", "mtp_idx": 0, "num_tokens": 1, "top_indices": [[0, 1]]}
    path.write_text(path.read_text() + json.dumps(head) + "\n")
    trace = import_trace(tmp_path)
    assert trace.n_tokens == 8
    assert any("1 records of heads" in note for note in trace.provenance["said"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": 9}, r"top_indices must be \(9, 2\)"),
        ({"step": -1}, "step must be a whole number"),
        ({"layer": 2}, "layer 2 of step 0 came already"),
        ({"logit_shape": [5, 9]}, "does not fit"),
        ({"logit_shape": None}, "does not fit"),
        ({"logit_offset": 10**9}, "ends before byte"),
        ({"top_indices": "x"}, "top_indices: is not base64"),
        ({"rank": 7}, "logits_rank7.bin is missing"),
    ],
)
def test_records_that_do_not_fit_are_refused_by_line(tmp_path, change, message):
    write_rank(tmp_path, 0, change=lambda record: record | change)
    with pytest.raises(TraceError, match=message):
        import_trace(tmp_path)


def test_layers_that_miss_a_step_are_refused(tmp_path):
    write_rank(tmp_path, 0)
    path = tmp_path / "router_trace_rank0.jsonl"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))
    with pytest.raises(TraceError, match=r"step 1 of rank 0: layers \[4\] are missing"):
        import_trace(tmp_path)
    for line, message in (("[1]", "must hold a JSON object"), ("{}", "an object with top_indices")):
        path.write_text(line + "\n")
        with pytest.raises(TraceError, match=message):
            import_trace(path, format="megatron-trace")
    path.write_text(json.dumps({"block": "mtp", "top_indices": []}))
    with pytest.raises(TraceError, match="no records of a decoder"):
        import_trace(tmp_path)


def test_numbers_are_those_of_the_file(tmp_path):
    write_rank(tmp_path, 0)
    lines = (tmp_path / "router_trace_rank0.jsonl").read_text().splitlines()
    ids = np.array(json.loads(lines[0])["top_indices"])
    trace = import_trace(tmp_path)
    assert np.array_equal(np.sort(trace.layers[0].experts[:5, :K].numpy(), 1), np.sort(ids, 1))
