"""Arrays of vLLM and SGLang, and files that only look like them."""

import dataclasses
import io
import itertools
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from tieline.core.errors import TraceError
from tieline.trace import import_trace, load_trace, questions_without_data, save_trace
from tieline.trace.readers import Routes, array_files, read_routes, trace_of
from tieline.trace.record import identical_values

pytestmark = pytest.mark.usefixtures("axes_unchecked")
IDS = np.array(
    [
        [[0, 1], [-1, -1], [4, 2]],
        [[3, 0], [-1, -1], [1, 0]],
        [[-1, -1], [-1, -1], [-1, -1]],
        [[2, 1], [-1, -1], [0, 3]],
    ],
    dtype=np.int32,
)


def routed_experts_trace(ids, n_experts=None, layer_names=None):
    return trace_of(Routes(ids, "array", "routed_experts"), n_experts, layer_names)


def written(path, array, **others):
    if path.suffix == ".npy":
        np.save(path, array)
    elif path.suffix == ".npz":
        np.savez_compressed(path, routed_experts=array, **others)
    else:
        save_file({"routed_experts": np.ascontiguousarray(array), **others}, path)
    return path


@pytest.mark.parametrize(
    ("suffix", "dtype"),
    [
        *itertools.product(("npy", "npz", "safetensors"), (np.int8, np.int16, np.int32, np.int64)),
        ("npy", ">i4"),
        ("npz", ">i4"),
    ],
)
def test_ids_layers_and_padding_are_read(tmp_path, suffix, dtype):
    trace = import_trace(written(tmp_path / f"a.{suffix}", IDS.astype(dtype)), 6)
    assert [layer.name for layer in trace.layers] == ["layers.0", "layers.2"]
    assert trace.layers[0].experts.tolist() == [[0, 1], [3, 0], [2, 1]]
    assert trace.layers[1].experts.tolist() == [[4, 2], [1, 0], [0, 3]]
    assert trace.layers[0].facts.n_experts == 6
    assert trace.layers[0].facts.k == 2
    assert trace.layers[0].scores is None
    assert trace.positions.tolist() == [0, 1, 3]
    assert trace.documents.tolist() == [0, 0, 0]
    assert trace.tokens.tolist() == [-1, -1, -1]
    assert trace.provenance["tokens_left_out"] == 1
    assert trace.provenance["layers_left_out"] == ["layers.1"]
    assert trace.provenance["n_experts"] == "given"


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_a_fortran_array_is_the_same_array(tmp_path, name):
    path = written(tmp_path / name, np.asfortranarray(IDS))
    assert identical_values(import_trace(path).layers[1], routed_experts_trace(IDS).layers[1])


def test_an_ids_only_trace_says_what_it_cannot_answer_and_can_be_saved(tmp_path):
    trace = import_trace(written(tmp_path / "a.npy", IDS))
    limits = questions_without_data(trace.layers)
    assert any("flip rates" in text for text in limits)
    assert trace.provenance["cannot_answer"] == limits
    assert not any("load" in text for text in limits)
    with pytest.raises(TraceError, match="ids only"):
        _ = trace.layers[0].gap
    save_trace(trace, tmp_path / "trace")
    assert identical_values(load_trace(tmp_path / "trace"), trace)


def test_what_one_layer_can_answer_is_answered():
    layer = routed_experts_trace(IDS, 5).layers[0]
    scored = dataclasses.replace(layer, weights=torch.ones(3, 2))
    assert any("weights" in text for text in questions_without_data([layer]))
    assert not any("weights" in text for text in questions_without_data([layer, scored]))


def test_ids_of_tokens_are_read_and_cut_alike(tmp_path):
    ids = {
        "tokens": np.arange(4),
        "documents": np.array([7, 7, 8, 8]),
        "positions": np.arange(4) % 2,
    }
    for suffix in ("npz", "safetensors"):
        trace = import_trace(written(tmp_path / f"a.{suffix}", IDS, **ids))
        assert trace.tokens.tolist() == [0, 1, 3]
        assert trace.documents.tolist() == [7, 7, 8]
        assert trace.positions.tolist() == [0, 1, 1]


def test_rows_of_documents_without_positions_are_counted_in_each_document(tmp_path):
    path = written(tmp_path / "a.npz", IDS[[0, 1, 3, 3]], documents=np.array([7, 8, 7, 8]))
    assert import_trace(path).positions.tolist() == [0, 0, 1, 1]


def test_the_number_of_experts_is_inferred_and_says_so():
    trace = routed_experts_trace(IDS)
    assert trace.layers[0].facts.n_experts == 5
    assert trace.provenance["n_experts"] == "inferred from the largest id"
    assert routed_experts_trace(np.zeros((1, 1, 1), dtype=int)).layers[0].facts.n_experts == 1


def test_padding_of_unsigned_arrays_is_the_largest_value():
    trace = routed_experts_trace(IDS.astype(np.uint8), 6)
    assert identical_values(trace, routed_experts_trace(IDS, 6))
    single = np.array([[[255]], [[3]]], dtype=np.uint8)
    assert routed_experts_trace(single, 256).n_tokens == 2
    assert routed_experts_trace(single).n_tokens == 2
    assert routed_experts_trace(single, 8).n_tokens == 1


def test_dense_layers_left_at_zero_are_left_out():
    ids = IDS.copy()
    ids[:, 1] = 0
    assert [layer.name for layer in routed_experts_trace(ids).layers] == ["layers.0", "layers.2"]
    ids[0, 1] = [0, 1]  # one token was routed there, so that the others chose an expert twice
    with pytest.raises(TraceError, match="an expert twice"):
        routed_experts_trace(ids[[0, 1, 3]])


def test_tokens_that_missed_a_layer_are_left_out():
    ids = IDS.copy()
    ids[0, 2] = -1
    trace = routed_experts_trace(ids)
    assert trace.positions.tolist() == [1, 3]
    assert trace.provenance["tokens_left_out"] == 2


def test_layers_can_be_named():
    trace = routed_experts_trace(IDS, layer_names=["a", "b", "c"])
    assert [layer.name for layer in trace.layers] == ["a", "c"]
    with pytest.raises(TraceError, match="2 names of layers"):
        routed_experts_trace(IDS, layer_names=["a", "b"])


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (IDS[0], "integers of shape"),
        (IDS.astype(float), "integers of shape"),
        (IDS[:0], "none of them zero"),
        (IDS[:, :0], "none of them zero"),
        (IDS[:, :, :0], "none of them zero"),
        (np.full((2, 1, 2), -1), "no token was routed in any layer"),
        (np.array([[[0, 1], [-1, -1]], [[-1, -1], [0, 1]]]), "in all layers"),
        (np.array([[[0, -1]]]), r"got -1 at \(token, layer, rank\) \(0, 0, 1\)"),
        (np.array([[[0, -7]]]), "got -7"),
        (np.array([[[0, 6]]]), r"0 ... 5, .*got 6"),
        (np.array([[[0, 1 << 40]]]), "got 1099511627776"),
        (np.array([[[1, 2]], [[3, 3]]]), "an expert twice"),
    ],
)
def test_arrays_that_are_no_routing_are_refused(array, message):
    with pytest.raises(TraceError, match=message):
        routed_experts_trace(array, 6)


@pytest.mark.parametrize("experts", [0, -1, 1, 1 << 20])
def test_impossible_numbers_of_experts_are_refused(experts):
    with pytest.raises(TraceError):
        routed_experts_trace(np.array([[[0, 1]]]), experts)
    with pytest.raises(TraceError):
        routed_experts_trace(np.array([[[0, 1 << 30]]]))


def npy(shape, dtype="<i4", data=b"", version=(1, 0), order=False):
    text = f"{{'descr': {dtype!r}, 'fortran_order': {order}, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + length + text + data


def zipped(data, declared=None):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("routed_experts.npy", data)
    content = bytearray(buffer.getvalue())
    if declared is not None:
        offset = content.rindex(b"PK\x01\x02") + 24
        content[offset : offset + 4] = struct.pack("<I", declared)
    return bytes(content)


def tensors(header, data=b""):
    return struct.pack("<Q", len(header)) + header + data


HUGE = 1 << 50


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.npy", npy((HUGE, 3, 2))),
        ("a.npy", npy((1 << 32, 1 << 32, 2))),
        ("a.npy", npy((-1, 3, 2), data=b"\0" * 24)),
        ("a.npy", npy((2, 3, 2), data=b"\0" * 47)),
        ("a.npy", npy((2, 3, 2), data=b"\0" * 49)),
        ("a.npy", npy((1, 1, 1), dtype="|O", data=b"\0" * 8)),
        ("a.npy", npy((1, 1, 1), dtype="<c8", data=b"\0" * 8)),
        ("a.npy", npy((1, 1, 1), dtype="<U2", data=b"\0" * 8)),
        ("a.npy", npy((1, 1, 1), dtype=[("a", "<i4")], data=b"\0" * 4)),
        ("a.npy", npy((1, 1, 1), data=b"\0" * 4, version=(3, 0))),
        ("a.npy", npy("__import__('os')")),
        ("a.npy", b"\x93NUMPY\x01\x00\xff\xff"),
        ("a.npy", b""),
        ("a.npy", b"\x80\x04K\x01."),
        ("a.npz", zipped(npy((HUGE, 3, 2)))),
        ("a.npz", zipped(npy((1 << 28, 1, 1)), declared=0xF0000000)),
        ("a.npz", zipped(npy((1 << 26, 1, 1), data=b"\0" * 99))),
        ("a.npz", zipped(b"nothing")),
        ("a.npz", b"PK\x05\x06" + b"\0" * 18),
        ("a.npz", b"PK\x03\x04"),
        ("a.safetensors", struct.pack("<Q", HUGE)),
        (
            "a.safetensors",
            tensors(
                b'{"a":{"dtype":"I32","shape":[%d,3,2],"data_offsets":[0,%d]}}' % (HUGE, HUGE * 24)
            ),
        ),
        (
            "a.safetensors",
            tensors(b'{"a":{"dtype":"BOOL","shape":[1,1,1],"data_offsets":[0,1]}}', b"\0"),
        ),
        (
            "a.safetensors",
            tensors(b'{"a":{"dtype":"BF16","shape":[1,1,1],"data_offsets":[0,2]}}', b"\0\0"),
        ),
        (
            "a.safetensors",
            tensors(b'{"a":{"dtype":"X","shape":[1],"data_offsets":[0,4]}}', b"\0" * 4),
        ),
        ("a.safetensors", tensors(b"{}")),
        ("a.safetensors", tensors(b"[" * 1000)),
        ("a.safetensors", b"\0"),
    ],
)
def test_files_that_lie_are_refused_without_taking_memory(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match=name):
            import_trace(path)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("names", ["layer_{}", "model.layers.{}.mlp.gate", "arr_{}", "{}_ids"])
def test_an_archive_with_an_array_per_layer_is_read(tmp_path, names):
    experts = np.random.default_rng(0).integers(0, 9, (5, 11, 2))
    weights = np.random.default_rng(1).random((5, 11, 2))
    layers = {names.format(n): experts[:, n] for n in reversed(range(11))}
    np.savez(tmp_path / "a.npz", tokens=np.arange(5) + 40, **layers)
    plain = read_routes(tmp_path / "a.npz")
    assert np.array_equal(plain.experts, experts)
    assert plain.tokens.tolist() == [40, 41, 42, 43, 44]
    assert plain.weights is None
    of_weights = {f"weights_{n}": weights[:, n] for n in range(11)}
    np.savez(tmp_path / "b.npz", **layers, **of_weights)
    assert np.array_equal(read_routes(tmp_path / "b.npz").weights, weights)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"layer_0": IDS[:, 0], "layer_1": IDS[1:, 2]}, r"layer_1: \(tokens, k\) is \(3, 2\)"),
        ({"a_1": IDS[:, 0], "b_1": IDS[:, 2]}, "several arrays have the same number of a layer"),
        ({"layer_0": IDS[:, 0] + 0.5}, "integers \\(tokens, k\\) of each layer"),
    ],
)
def test_arrays_of_layers_that_do_not_fit_are_refused(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(TraceError, match=message):
        read_routes(tmp_path / "a.npz")


def test_other_arrays_in_a_file_are_told_apart(tmp_path):
    np.savez(tmp_path / "a.npz", anything=IDS, other=np.zeros(4))
    assert import_trace(tmp_path / "a.npz").n_tokens == 3
    np.savez(tmp_path / "b.npz", one=IDS, two=IDS)
    with pytest.raises(TraceError, match="one called routed_experts"):
        import_trace(tmp_path / "b.npz")
    np.savez(tmp_path / "c.npz", routed_experts=IDS, tokens=np.zeros(3, dtype=int))
    with pytest.raises(TraceError, match="tokens must be 4 integers"):
        import_trace(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", **{str(index): IDS for index in range(1025)})
    with pytest.raises(TraceError, match="has 1,025 arrays"):
        import_trace(tmp_path / "d.npz")


def test_missing_files_and_unknown_suffixes(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        import_trace(tmp_path / "a.npy")
    (tmp_path / "a.txt").write_text("once upon a time")
    with pytest.raises(TraceError, match="none of the formats"):
        import_trace(tmp_path / "a.txt")
    with pytest.raises(TraceError, match="k=3 cannot be given"):
        import_trace(written(tmp_path / "a.npy", IDS), k=3)


@settings(max_examples=150)
@given(st.data())
def test_damaged_files_are_read_or_refused_with_one_kind_of_error(tmp_path_factory, data):
    suffix = data.draw(st.sampled_from(["npy", "npz", "safetensors"]))
    path = written(tmp_path_factory.mktemp("damaged") / f"a.{suffix}", IDS)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        offset = data.draw(st.integers(0, len(content) - 1))
        match data.draw(st.sampled_from(["flip", "byte", "cut", "insert"])):
            case "flip":
                content[offset] ^= 1 << data.draw(st.integers(0, 7))
            case "byte":
                content[offset] = data.draw(st.integers(0, 255))
            case "cut":
                del content[max(offset, 1) :]
            case "insert":
                content[offset:offset] = data.draw(st.binary(max_size=8))
    path.write_bytes(content)
    try:
        trace = import_trace(path)
    except TraceError:
        return
    assert all(0 <= int(x.experts.min()) <= int(x.experts.max()) < 1 << 16 for x in trace.layers)
    assert torch.equal(trace.documents, trace.documents)


def test_an_archive_that_unpacks_to_far_more_than_it_holds_is_refused_unread(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "bomb.npz", np.zeros((1 << 14, 1 << 11, 4), np.uint8))
    unread = AttributeError("a member of the archive was opened")
    monkeypatch.setattr("zipfile.ZipFile.open", lambda *_: (_ for _ in ()).throw(unread))
    with pytest.raises(TraceError, match=r"bytes that unpack to 134,2.*more than the"):
        import_trace(tmp_path / "bomb.npz")


def test_an_archive_is_refused_by_its_header_before_it_is_unpacked(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "flat.npz", routed_experts=np.zeros(1 << 20, np.uint8))
    monkeypatch.setattr(array_files, "_read_npz_member", None)  # nothing is unpacked
    with pytest.raises(TraceError, match="routed_experts: needs the axes"):
        import_trace(tmp_path / "flat.npz")
