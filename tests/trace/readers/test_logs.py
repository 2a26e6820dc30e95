"""Logs with columns under any usual name: how they are read, and which are refused."""

import gzip
import json

import numpy as np
import pytest

import tieline as tl
from tieline.core.errors import TraceError
from tieline.trace import import_trace
from tieline.trace.readers import ReadOptions, read_routes, recognise_format
from tieline.trace.readers.routes import split_packed_weights

RNG = np.random.default_rng(3)
IDS = RNG.random((40, 2, 16)).argsort(axis=2)[..., :4]
WEIGHTS = np.sort(RNG.random((40, 2, 4)), axis=2)[..., ::-1]


def route(token, layer, **more):
    return {
        "type": "route",
        "req_id": f"r{token // 20}",
        "token_idx": token % 20,
        "layer": layer,
        "topk_ids": IDS[token, layer].tolist(),
        "topk_weights": WEIGHTS[token, layer].tolist(),
        **more,
    }


META = {"type": "meta", "model_id": "m", "top_k": 4, "num_experts": 16}
ROUTES = [route(token, layer) for layer in range(2) for token in range(40)]


def written(path, lines):
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.log.gz"])
def test_a_log_of_a_hook_in_vllm_is_read_plain_and_packed(tmp_path, name):
    file = written(tmp_path / name, [META, *ROUTES])
    assert recognise_format(file) == "log"
    routes = read_routes(file)
    assert np.array_equal(routes.experts, IDS)
    assert np.allclose(routes.weights, WEIGHTS)
    assert routes.n_experts == 16
    assert routes.documents.tolist() == [0] * 20 + [1] * 20
    assert routes.positions.tolist() == [*range(20)] * 2
    assert routes.layer_names == ("layers.0", "layers.1")
    assert "took topk_ids for the chosen experts" in routes.notes[0]
    assert "req_id for the document" in routes.notes[0]
    assert any("'meta'" in note for note in routes.notes)
    assert import_trace(file).n_tokens == 40
    assert "took topk_ids" in tl.check(file).files[0].said[0]


def test_numbers_that_begin_anew_begin_a_document(tmp_path):
    lines = [route(token, 0) | {"req_id": "r", "token_idx": token % 8} for token in range(40)]
    routes = read_routes(written(tmp_path / "a.jsonl", lines))
    assert routes.documents.tolist() == np.repeat(range(5), 8).tolist()
    assert any("begin anew 4 times" in note for note in routes.notes)


def csv_text(head, cells):
    rows = [cells(t, la) for la in range(2) for t in range(40)]
    return head + "\n" + "\n".join(rows) + "\n"


@pytest.mark.parametrize(
    ("head", "cells"),
    [
        (
            "layer_id,token_id,expert_0,expert_1,expert_2,expert_3",
            lambda t, la: f"{la},{t}," + ",".join(map(str, IDS[t, la])),
        ),
        ("step,pos,Layer,TopK_IDs", lambda t, la: f'9,{t},{la},"{IDS[t, la].tolist()}"'),
        (
            "layer_idx,token_idx,experts",
            lambda t, la: f"{la},{t}," + "|".join(map(str, IDS[t, la])),
        ),
        (
            "token,layer,expert_id,prob",
            lambda t, la: "\n".join(f"{t},{la},{e},0.5" for e in IDS[t, la]),
        ),
    ],
)
def test_tables_of_simulators_are_recognised_by_their_columns(tmp_path, head, cells):
    file = tmp_path / "a.csv"
    file.write_text(csv_text(head, cells))
    routes = read_routes(file)
    assert routes.producer == "log"
    assert np.array_equal(routes.experts, IDS)
    packed = tmp_path / "a.csv.gz"
    packed.write_bytes(gzip.compress(file.read_bytes()))
    assert np.array_equal(read_routes(packed).experts, IDS)


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.txt", "a.csv.gz"])
@pytest.mark.parametrize(
    ("before", "names", "cells"),
    [
        ("", "layer;token_idx;experts", lambda t, la: f"{la};{t};{spaced(IDS[t, la])}"),
        ("", "layer\ttoken_idx\texperts", lambda t, la: f"{la}\t{t}\t{spaced(IDS[t, la])}"),
        ("", "layer;token_idx;topk_ids", lambda t, la: f"{la};{t};{spaced(IDS[t, la], ',')}"),
        ("", "layer, token_idx, experts", lambda t, la: f"{la}, {t}, {spaced(IDS[t, la])}"),
        ("\ufeff", "layer,token_idx,experts", lambda t, la: f"{la},{t},{spaced(IDS[t, la])}"),
        ("# a hook\n", "layer,token_idx,experts", lambda t, la: f"{la},{t},{spaced(IDS[t, la])}"),
        (
            "",
            ",layer,token_idx,expert_0,expert_1,expert_2,expert_3",
            lambda t, la: f"9,{la},{t}.0,{spaced(IDS[t, la], '.0,')}.0",
        ),
        (
            "",
            "layer,token_idx," + ",".join(f"top{n}_expert,top{n}_weight" for n in range(1, 5)),
            lambda t, la: f"{la},{t}," + ",".join(f"{expert},0.25" for expert in IDS[t, la]),
        ),
    ],
)
def test_tables_of_spreadsheets_and_pandas_are_read(tmp_path, name, before, names, cells):
    text = (before + csv_text(names, cells)).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    routes = read_routes(tmp_path / name)
    assert np.array_equal(routes.experts, IDS)
    assert routes.documents.tolist() == [0] * 40
    assert not any("left out" in note for note in routes.notes)


def test_an_error_of_a_table_names_its_line_below_comments(tmp_path):
    file = tmp_path / "a.csv"
    file.write_text("# one\n# two\nlayer;token_idx;experts\n0;0;1 2\n0;1\n")
    with pytest.raises(TraceError, match="line 5: 2 cells, the header has 3"):
        read_routes(file)


LINES = [(t, la) for t in range(40) for la in range(2)]


@pytest.mark.parametrize(
    ("lines", "weighted"),
    [
        ([{"layer": la, "token": t, "experts": IDS[t, la], "note": 1} for t, la in LINES], False),
        (
            [
                {
                    "layerIdx": la,
                    "tokenIdx": t,
                    "expertIds": IDS[t, la],
                    "gate-weights": WEIGHTS[t, la],
                }
                for t, la in LINES
            ],
            True,
        ),
        (
            [{"layer_name": f"m.{la}", "pos": t, "top_k_index": IDS[t, la]} for t, la in LINES],
            False,
        ),
        (
            [
                {
                    "layer": la,
                    "pos": t,
                    "experts": dict(zip(map(str, IDS[t, la]), WEIGHTS[t, la], strict=True)),
                }
                for t, la in LINES
            ],
            True,
        ),
        ([{"token_idx": t, "experts": IDS[t]} for t in range(40)], False),
        (
            [
                {
                    "step": n,
                    "layer": la,
                    "topk_ids": IDS[rows, la],
                    "topk_weights": WEIGHTS[rows, la],
                }
                for n, rows in enumerate((slice(0, 30), slice(30, 40)))
                for la in range(2)
            ],
            True,
        ),
    ],
)
@pytest.mark.parametrize("listed", [False, True])
def test_logs_of_other_hooks_are_read_as_lines_or_as_a_list(tmp_path, lines, weighted, listed):
    plain = json.loads(json.dumps(lines, default=lambda array: array.tolist()))
    file = tmp_path / ("a.json" if listed else "a.jsonl")
    file.write_text(json.dumps(plain, indent=1)) if listed else written(file, plain)
    routes = read_routes(file)
    assert np.array_equal(routes.experts, IDS)
    assert weighted == (routes.weights is not None)
    assert not weighted or np.allclose(routes.weights, WEIGHTS)


def test_fields_that_were_not_understood_are_listed(tmp_path):
    lines = [route(t, 0, latency_ms=1.5) for t in range(20)]
    (_, note) = read_routes(written(tmp_path / "a.jsonl", lines)).notes
    assert note == "left out the fields latency_ms"


def spaced(numbers, by=" "):
    return by.join(map(str, numbers))


def atlas(document, indices):
    activations = [
        {
            "layer": la,
            "token_idx": n,
            "expert_idx": int(IDS[t, la, j]),
            "gate_weight": WEIGHTS[t, la, j],
        }
        for n, t in enumerate(indices)
        for j in (2, 0, 3, 1)
        for la in range(2)
    ]
    return {
        "model_id": "m",
        "num_experts": 16,
        "text": f"text {document}",
        "activations": activations,
    }


@pytest.mark.parametrize("lines", [True, False])
def test_texts_of_moe_atlas(tmp_path, lines):
    texts = [atlas(0, range(25)), atlas(1, range(25, 40))]
    file = tmp_path / ("a.jsonl" if lines else "a.json")
    file.write_text("\n".join(map(json.dumps, texts)) if lines else json.dumps(texts, indent=1))
    routes = read_routes(file)
    assert routes.producer == "moe-atlas"
    assert np.array_equal(routes.experts, IDS)
    assert np.allclose(routes.weights, WEIGHTS)
    assert routes.documents.tolist() == [0] * 25 + [1] * 15
    assert routes.n_experts == 16


def test_packed_ids_and_weight_bits_of_prime_rl(tmp_path):
    weights = WEIGHTS.astype(np.float32)
    packed = np.concatenate([IDS.astype(np.int32), weights.view(np.int32)], 2)
    ids, unpacked = split_packed_weights(packed)
    assert np.array_equal(ids, IDS)
    assert np.array_equal(unpacked, weights)
    plain, none = split_packed_weights(IDS)
    assert plain is IDS
    assert none is None
    np.save(tmp_path / "a.npy", packed)
    routes = read_routes(tmp_path / "a.npy")
    assert np.array_equal(routes.experts, IDS)
    assert np.array_equal(routes.weights, weights)
    batch = read_routes({"routed_experts": packed.reshape(2, 20, 2, 8)}, ReadOptions())
    assert np.array_equal(batch.weights, weights)


LACKING = {key: value for key, value in route(3, 0).items() if key != "topk_ids"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([META, route(0, 0), LACKING], "line 3: field topk_ids is missing"),
        ([route(0, 0), route(1, 0) | {"layer": None}], "line 2: field layer is missing"),
        (
            [route(0, 0), route(1, 0) | {"token_idx": "x"}],
            "line 2: field token_idx must be a whole",
        ),
        ([route(0, 0), route(1, 0, topk_ids=[1, 2])], "line 2: 4 topk_weights for 2 experts"),
        ([route(0, 0), route(1, 0, topk_ids=[1, 2, 3, "a"])], "line 2: field topk_ids must hold"),
        (
            [route(0, 0), route(1, 0, topk_ids=[1], topk_weights=[1.0])],
            "line 2: 1 experts in layer '0', the first line has 4",
        ),
        ([*ROUTES[:40], *ROUTES[41:]], "line 1: token 0 of document 'r0' is missing in layer '1'"),
        (
            [*ROUTES[:39], *ROUTES[40:]],
            "line 79: token 19 of document 'r1' is missing in layer '0'",
        ),
        (
            [*ROUTES[:4], route(0, 0), *ROUTES[40:43], route(5, 1), route(0, 1)],
            "line 9: layer '1' has token 5 where layer '0' has token 3: layers are mixed",
        ),
        (
            [{"where": x, "token_idx": t, "topk_ids": [1, 2]} for t in range(3) for x in "ab"],
            "line 2: token 0 comes 2 times in a row and no field names its layer",
        ),
        ([route(0, 0, topk_ids=[[1, 2], [3, 4]])], "line 1: field topk_ids holds lists"),
        ([{"token": 0, "experts": {"0": [1, 2]}}], "line 1: field experts must map experts to"),
        (
            [{"layer": 0, "experts": [[1, 2], [3, 4]], "weights": [[0.5, 0.5]]}],
            "line 1: field weights must hold 2 lists",
        ),
        ([META, {"a": 1}], "no field of routes was found"),
        ([META, META], "no field of routes was found"),
        ([route(0, 0), "x"], "line 2: must hold a JSON object"),
    ],
)
def test_bad_lines_are_refused_by_line_and_field(tmp_path, lines, message):
    with pytest.raises(TraceError) as caught:
        import_trace(written(tmp_path / "a.jsonl", lines))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.json"])
def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path, name):
    file = tmp_path / name
    if name == "a.csv":
        cells = lambda t, la: f"{la},{t},{spaced(IDS[t, la])}"  # noqa: E731
        file.write_text(csv_text("layer,token_idx,experts", cells))
    elif name == "a.json":
        file.write_text(json.dumps(ROUTES))
    else:
        written(file, [META, *ROUTES])
    text = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    marked = b"\xef\xbb\xbf" + text
    file.write_bytes(gzip.compress(marked) if file.suffix == ".gz" else marked)
    assert np.array_equal(read_routes(file).experts, IDS)


def test_gzip_bombs_are_refused(tmp_path, monkeypatch):
    from tieline.core import untrusted_input

    monkeypatch.setattr(untrusted_input, "GZIP_FREE", 1 << 20)
    bomb = tmp_path / "bomb.jsonl.gz"
    line = (json.dumps(route(0, 0)) + "\n").encode()
    bomb.write_bytes(gzip.compress(line + b"\n" * (40 << 20)))
    with pytest.raises(TraceError, match="unpacks to more than"):
        import_trace(bomb)
    long = tmp_path / "long.jsonl.gz"
    long.write_bytes(gzip.compress(line + b"[" * (1 << 25)))
    with pytest.raises(TraceError, match=r"unpacks to more|longer than"):
        import_trace(long)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(line * 50)[:-20])
    with pytest.raises(TraceError, match="cannot be read"):
        import_trace(cut)


def test_a_carriage_return_in_a_line_of_csv_is_refused_and_does_not_escape(tmp_path):
    file = tmp_path / "log.csv"
    file.write_bytes(b"layer_id,token_id\rexpert_0\n0,1,2\n")
    with pytest.raises(TraceError):
        import_trace(file)
