"""Every form that a trace can be written in is read back by its reader."""

import base64
import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline.core.errors import TielineError, TraceError
from tieline.trace import LayerFacts, LayerTrace, RoutingTrace, export, import_trace, load_trace
from tieline.trace.readers import recognise_format
from tieline.trace.record import identical_values
from tieline.trace.writers import FORMS, padded_batch, replay_list

SUFFIX = {"vllm": ".jsonl", "sglang": ".jsonl", "trace": ""}
FILES = [form for form in FORMS if form != "trace"]


def weighted_trace(lengths=(5, 3), layers=(0, 1), experts=9, k=2, seed=0, tokens=True):
    """A trace of documents of these lengths, with weights."""
    generator, count = torch.Generator().manual_seed(seed), sum(lengths)
    facts = LayerFacts(experts, k, affine=False)
    layers_with_weights = [
        LayerTrace(
            f"model.layers.{layer}.mlp.gate",
            facts,
            torch.rand(count, experts, generator=generator).argsort(1)[:, :k].int(),
            weights=torch.rand(count, k, generator=generator),
        )
        for layer in layers
    ]
    ids = torch.arange(count) + 7 if tokens else torch.full((count,), -1)
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    positions = torch.cat([torch.arange(length) for length in lengths])
    return RoutingTrace(layers_with_weights, ids, documents, positions)


def same(read, trace):
    assert [x.experts.tolist() for x in read.layers] == [x.experts.tolist() for x in trace.layers]
    for key in ("tokens", "documents", "positions"):
        assert getattr(read, key).tolist() == getattr(trace, key).tolist(), key


@settings(max_examples=25)
@given(
    st.sampled_from(FILES),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([(4, 1), (9, 2), (300, 3), (1000, 2)]),
    st.booleans(),
    st.integers(0, 99),
)
def test_what_is_written_is_read(tmp_path_factory, form, lengths, layers, size, tokens, seed):
    experts, k = size
    trace = weighted_trace(lengths, range(layers), experts, k, seed, tokens)
    folder = tmp_path_factory.mktemp("round")
    path = export(trace, folder / f"a{SUFFIX.get(form, '.safetensors')}", form)
    read = import_trace(path, experts)
    if k == 1:  # the reader may drop a layer of zeros, or zeros at the end
        assert all(layer.facts.k == 1 for layer in read.layers)
        if len(read.layers) < layers or read.n_tokens < trace.n_tokens:
            return
    same(read, trace)
    if form in ("vllm", "sglang"):
        assert recognise_format(path) == form


def test_a_folder_keeps_everything(tmp_path):
    trace = weighted_trace()
    trace.export(tmp_path / "t")
    assert identical_values(load_trace(tmp_path / "t"), trace)
    with pytest.raises(TielineError, match="exists"):
        export(trace, tmp_path / "t")
    export(trace, tmp_path / "t", overwrite=True)
    trace.save(tmp_path / "u")
    assert identical_values(load_trace(tmp_path / "u"), trace)


def test_weights_go_with_the_ids(tmp_path):
    trace = weighted_trace()
    read = import_trace(trace.export(tmp_path / "a.npz"))
    assert torch.equal(read.layers[1].weights, trace.layers[1].weights)
    assert read.layers[0].facts.n_experts == 9


def test_dense_layers_take_their_place_where_all_layers_count(tmp_path):
    trace = weighted_trace(layers=(1, 3))
    for form, fill in (("verl", 0), ("nemo", -1)):
        path = trace.export(tmp_path / f"{form}.npz", form, layers=6)
        array = np.load(path)["routed_experts"]
        assert array.shape == (2, 5, 6, 2)
        assert (array[:, :, [0, 2, 4, 5]] == fill).all()
        read = import_trace(path)
        assert [layer.name for layer in read.layers] == ["layers.1", "layers.3"]
        same(read, trace)
    for form in ("vllm", "sglang"):
        read = import_trace(trace.export(tmp_path / f"{form}.jsonl", form))
        assert [layer.name for layer in read.layers] == ["layers.1", "layers.3"]
    with pytest.raises(TraceError, match="no place among 2 layers"):
        trace.export(tmp_path / "a.npz", "verl", layers=2)
    assert len(replay_list(trace)) == 2
    assert replay_list(trace)[1].dtype == torch.int64


def test_bytes_are_those_that_the_engines_write(tmp_path):
    trace = weighted_trace((4,))
    line = json.loads(trace.export(tmp_path / "a.jsonl", "vllm").read_text())
    assert base64.b64decode(line["choices"][0]["routed_experts"])[:6] == b"\x93NUMPY"
    line = json.loads(trace.export(tmp_path / "b.jsonl", "sglang").read_text())
    raw = np.frombuffer(base64.b64decode(line["meta_info"]["routed_experts"]), np.int32)
    assert raw.reshape(4, 2, 2).tolist() == [
        [trace.layers[0].experts[t].tolist(), trace.layers[1].experts[t].tolist()] for t in range(4)
    ]


def test_positions_without_a_record(tmp_path):
    full_trace = weighted_trace((6,))
    rows = torch.tensor([0, 1, 3, 5])
    from tieline.trace import select_tokens

    trace = select_tokens(full_trace, rows)
    for form in ("verl", "nemo", "npz", "megatron"):
        same(import_trace(trace.export(tmp_path / f"{form}.npz", form)), trace)
    with pytest.raises(TraceError, match=r"4 rows for positions 0 \.\.\. 5"):
        trace.export(tmp_path / "a.jsonl", "vllm")
    single = select_tokens(weighted_trace((6,), k=1), rows)
    with pytest.raises(TraceError, match="use the form nemo"):
        single.export(tmp_path / "a.npz", "verl")
    assert padded_batch(single, -1)["attention_mask"].tolist() == [[1] * 6]


def test_other_names_are_refused_and_nothing_is_written(tmp_path):
    trace = weighted_trace()
    with pytest.raises(TielineError, match="no form is called 'tgi'"):
        trace.export(tmp_path / "a", "tgi")
    with pytest.raises(TraceError, match=r"must end in \.npz or \.safetensors"):
        trace.export(tmp_path / "a.bin", "verl")
    mixed = RoutingTrace(
        [weighted_trace(k=2).layers[0], weighted_trace(k=3, layers=(1,)).layers[0]],
        *[weighted_trace().tokens] * 3,
    )
    with pytest.raises(TraceError, match=r"layers choose \[2, 3\] experts"):
        mixed.export(tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []
