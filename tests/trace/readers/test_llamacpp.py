"""Routes and loads of llama.cpp."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline.core.errors import TraceError
from tieline.trace import imatrix_load, import_trace
from tieline.trace.readers import recognise_format


def test_choices_are_joined_to_tokens(tmp_path):
    path = tmp_path / "moe_trace.csv"
    batches = [{0: [[1, 2], [3, 4]], 5: [[5, 6], [7, 0]]}, {0: [[2, 1]], 5: [[0, 7]]}]
    lines = [
        f"{layer},{expert}"
        for batch in batches
        for layer, rows in batch.items()
        for row in rows
        for expert in row
    ]
    for header in ([], ["layer,expert"]):
        path.write_text("\n".join([*header, *lines]) + "\n")
        assert recognise_format(path) == "moe-trace"
        trace = import_trace(path, k=2)
        assert [layer.name for layer in trace.layers] == ["layers.0", "layers.5"]
        assert trace.layers[1].experts.tolist() == [[5, 6], [7, 0], [0, 7]]
        assert trace.documents.tolist() == [0, 0, 1]
    with pytest.raises(TraceError, match="give k"):
        import_trace(path)
    with pytest.raises(TraceError, match="4 choices in a row, which k=3 does not divide"):
        import_trace(path, k=3)
    path.write_text("0,1\n0,2\n0,3\n0,4\n1,1\n1,2\n")
    with pytest.raises(TraceError, match="the last token alone"):
        import_trace(path, k=2)
    path.write_text("0,1\n0,x\n")
    with pytest.raises(TraceError, match="line 2: needs layer,expert"):
        import_trace(path, k=1, format="moe-trace")


def text(string):
    return struct.pack("<Q", len(string)) + string.encode()


def gguf(tensors, alignment=32):
    values = text("general.type") + struct.pack("<I", 8) + text("imatrix")
    values += text("imatrix.datasets") + struct.pack("<IIQ", 9, 8, 1) + text("a.txt")
    values += text("imatrix.chunk_count") + struct.pack("<II", 4, 7)
    values += text("sizes") + struct.pack("<IIQ", 9, 5, 2) + b"\0" * 8
    values += text("general.alignment") + struct.pack("<II", 4, alignment)
    head, data = b"", b""
    for name, counts in tensors.items():
        head += text(name) + struct.pack("<I", 2) + struct.pack("<QQ", 1, len(counts))
        head += struct.pack("<IQ", 0, len(data))
        data += np.asarray(counts, "<f4").tobytes()
        data += b"\0" * (-len(data) % alignment)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 5) + values + head
    return header + b"\0" * (-len(header) % alignment) + data


COUNTS = {
    "blk.1.ffn_gate_exps.weight.counts": [3, 0, 5, 8],
    "blk.1.ffn_up_exps.weight.counts": [3, 0, 5, 8],
    "blk.0.ffn_down_exps.weight.counts": [4, 4, 4, 4],
    "blk.0.attn_q.weight.counts": [16],
}


@pytest.mark.parametrize("alignment", [32, 64])
def test_counts_of_experts_are_read(tmp_path, alignment):
    path = tmp_path / "imatrix.gguf"
    path.write_bytes(gguf(COUNTS, alignment))
    assert recognise_format(path) == "imatrix"
    load = imatrix_load(path)
    assert {name: x.tolist() for name, x in load.layers.items()} == {
        "layers.0": [4, 4, 4, 4],
        "layers.1": [3, 0, 5, 8],
    }
    assert load.dead == {"layers.0": [], "layers.1": [1]}
    with pytest.raises(TraceError, match="the load of experts alone"):
        import_trace(path)


def test_files_without_experts_are_refused(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(gguf({"blk.0.attn_q.weight.counts": [16]}))
    with pytest.raises(TraceError, match="no importance matrix of a Mixture"):
        imatrix_load(path)
    path.write_bytes(gguf(COUNTS)[:-70])
    with pytest.raises(TraceError, match=r"a\.gguf"):
        imatrix_load(path)
    path.write_bytes(gguf({"blk.0.ffn_down_exps.weight.counts": [np.nan, 1]}))
    with pytest.raises(TraceError, match="holds no counts"):
        imatrix_load(path)


@settings(max_examples=60)
@given(st.integers(0, 400), st.binary(min_size=1, max_size=8))
def test_damaged_files_are_read_or_refused(tmp_path_factory, offset, data):
    path = tmp_path_factory.mktemp("damaged") / "a.gguf"
    content = bytearray(gguf(COUNTS))
    content[offset : offset + len(data)] = data
    path.write_bytes(content)
    try:
        load = imatrix_load(path)
    except TraceError:
        return
    assert all((counts >= 0).all() for counts in load.layers.values())
