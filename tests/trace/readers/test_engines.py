"""Arrays that real engines returned, read as they come."""

from pathlib import Path

import numpy as np
import pytest

from tieline.core.errors import TraceError
from tieline.trace import import_trace, read_routes
from tieline.trace.readers import ReadOptions, read_tokens

ENGINES = Path(__file__).parents[1] / "fixtures" / "engines"


def test_one_request_has_a_row_for_every_token_but_the_last():
    trace = import_trace(ENGINES / "vllm-one-request.npz")
    assert trace.n_tokens == 263
    assert trace.positions.tolist() == list(range(263))
    assert trace.tokens[:4].tolist() == [33, 305, 461, 78]
    assert trace.tokens[255:].tolist()[1:] == [0] * 7
    assert "the last token of 1 of 1 requests has no row" in trace.provenance["said"]


def test_a_dense_layer_is_left_out_and_said():
    trace = import_trace(ENGINES / "vllm-dense-layer.npz")
    assert [layer.name for layer in trace.layers] == ["layers.1", "layers.2", "layers.3"]
    assert trace.provenance["layers_left_out"] == ["layers.0"]
    assert any("every token has 0 4 times" in note for note in trace.provenance["said"])


def test_sixteen_requests_need_their_tokens_to_be_told_apart():
    path, ids = ENGINES / "vllm-sixteen-requests.npy", ENGINES / "token-ids.npy"
    bare = import_trace(path)
    assert bare.n_tokens == 4096
    assert set(bare.documents.tolist()) == {0}
    trace = import_trace(path, tokens=ids)
    assert trace.documents.tolist() == np.repeat(np.arange(16), 256).tolist()
    assert trace.positions[255:258].tolist() == [255, 0, 1]
    assert trace.tokens.tolist() == np.load(ids).ravel().tolist()
    cut = np.concatenate([np.load(path)[256 * i : 256 * i + 255] for i in range(16)])
    assert import_trace(cut, tokens=ids).documents[254:256].tolist() == [0, 1]
    with pytest.raises(TraceError, match=r"4095 rows for 16 documents of 4096 tokens: 4080"):
        import_trace(np.load(path)[:-1], tokens=ids)


def test_rows_of_one_turn_say_what_to_pass():
    array, tokens = np.load(ENGINES / "vllm-sixteen-requests.npy")[100:255], np.arange(256)
    with pytest.raises(TraceError, match=r"155 rows for 256 tokens: 255 .* pass start=100"):
        import_trace(array, tokens=tokens)
    trace = import_trace(array, tokens=tokens, start=100)
    assert trace.positions[0] == trace.tokens[0] == 100
    with pytest.raises(TraceError, match="rows of several requests, or padding"):
        import_trace(array, tokens=tokens[:20])


def test_tokens_are_read_from_many_files(tmp_path):
    ids = np.array([[5, 6, 7], [8, 9, 0]])
    np.savez(tmp_path / "mask.npz", input_ids=ids, attention_mask=[[1, 1, 1], [1, 1, 0]])
    assert [x.tolist() for x in read_tokens(tmp_path / "mask.npz")] == [[5, 6, 7], [8, 9]]
    np.savez(tmp_path / "flat.npz", tokens=ids.ravel(), documents=[3, 3, 3, 1, 1, 1])
    assert [x.tolist() for x in read_tokens(tmp_path / "flat.npz")] == ids.tolist()
    (tmp_path / "a.json").write_text("[[5, 6], [7]]")
    assert [x.tolist() for x in read_tokens(tmp_path / "a.json")] == [[5, 6], [7]]
    (tmp_path / "b.jsonl").write_text("[5, 6]\n[7]\n")
    assert [x.tolist() for x in read_tokens(tmp_path / "b.jsonl")] == [[5, 6], [7]]
    (tmp_path / "c.json").write_text('{"a": 1}')
    with pytest.raises(TraceError, match="list of ids"):
        read_tokens(tmp_path / "c.json")
    np.savez(tmp_path / "d.npz", other=ids)
    with pytest.raises(TraceError, match="no array called tokens"):
        read_tokens(tmp_path / "d.npz")


def test_zeros_that_mean_nothing_are_told_from_expert_0():
    ids = np.array([[[0, 1], [2, 3]], [[0, 0], [0, 0]], [[1, 0], [3, 2]]])
    trace = import_trace(ids)
    assert trace.positions.tolist() == [0, 2]
    assert "1 rows of zeros are left out: nothing was written to them" in trace.provenance["said"]
    single = np.stack([np.arange(20) % 5, np.zeros(20, int)], 1)[..., None]
    trace = import_trace(single)
    assert [layer.name for layer in trace.layers] == ["layers.0"]
    assert trace.layers[0].experts.min() == 0
    assert len(import_trace(single[:10]).layers) == 2  # too few rows to tell
    assert len(import_trace(np.zeros((20, 2, 1), int)).layers) == 2  # nothing to compare with


def test_scores_and_weights_stand_beside_ids(tmp_path):
    generator = np.random.default_rng(0)
    scores = generator.standard_normal((30, 2, 8))
    ids = np.argsort(-scores, axis=2)[..., :3]
    weights = generator.random((30, 2, 3))
    shuffled = ids[..., ::-1]
    np.savez(tmp_path / "a.npz", routed_experts=shuffled, scores=scores, weights=weights)
    layer = import_trace(tmp_path / "a.npz").layers[1]
    assert layer.facts.n_experts == 8
    assert layer.has_gaps
    assert layer.experts[:, :3].tolist() == ids[:, 1].tolist()
    assert np.allclose(layer.weights.numpy(), weights[:, 1, ::-1])
    ordered = -np.sort(-scores[:, 1], axis=1)
    assert np.allclose(layer.gap.numpy(), ordered[:, 2] - ordered[:, 3], atol=1e-6)
    chosen = np.take_along_axis(scores, shuffled, axis=2)
    np.savez(tmp_path / "b.npz", routed_experts=shuffled, scores=chosen, weights=weights)
    layer = import_trace(tmp_path / "b.npz", 8).layers[1]
    assert not layer.has_gaps
    assert layer.experts.tolist() == ids[:, 1].tolist()
    np.savez(tmp_path / "c.npz", routed_experts=ids, scores=-scores)
    notes = import_trace(tmp_path / "c.npz").provenance["said"]
    assert any("correction bias" in note for note in notes)
    np.savez(tmp_path / "d.npz", routed_experts=ids, scores=scores[..., :5])
    with pytest.raises(TraceError, match="k=3 or E=8 columns, got 5"):
        import_trace(tmp_path / "d.npz", 8)
    np.savez(tmp_path / "e.npz", routed_experts=ids, weights=weights[:, :1])
    with pytest.raises(TraceError, match="weights must be real numbers of shape"):
        import_trace(tmp_path / "e.npz")


def test_an_unknown_format_and_a_wrong_source_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no format is called 'tgi'"):
        ReadOptions("tgi")
    with pytest.raises(TraceError, match="got object"):
        read_routes(object())
    with pytest.raises(TraceError, match="a folder without router_trace_rank"):
        read_routes(tmp_path)
