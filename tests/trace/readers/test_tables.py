"""CSV and JSONL tables, well written and not."""

import json
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline.core.errors import TraceError
from tieline.trace import import_table, import_trace, questions_without_data

pytestmark = pytest.mark.usefixtures("axes_unchecked")
CSV = """layer,token,experts,scores
1,0,3 1 0,2.5 1.5 1.25
0,0,0 1 2,3 2 1
0,5,2 1 0,1e1 0 -1
1,5,0 2 3,1 1 1
"""
ROWS = [
    {"layer": "b", "token": 1, "experts": [2, 0], "document": 4, "position": 9, "id": 17},
    {"layer": "a", "token": 1, "experts": [1, 0], "document": 4, "position": 9, "id": 17},
]


def table(tmp_path, text, suffix="csv"):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def jsonl(*rows):
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def test_a_csv_table_with_scores(tmp_path):
    trace = import_table(table(tmp_path, CSV), n_experts=6, k=2, units="sigmoid")
    assert [layer.name for layer in trace.layers] == ["0", "1"]
    assert trace.layers[0].experts.tolist() == [[0, 1, 2], [2, 1, 0]]
    assert trace.layers[0].gap.tolist() == [1.0, 1.0]
    assert trace.layers[1].gap.tolist() == [0.25, 0.0]
    assert trace.layers[1].facts.units == "sigmoid"
    assert not trace.layers[1].facts.affine
    assert trace.positions.tolist() == [0, 5]
    assert trace.provenance["file"] == "a.csv"
    assert not any("flip rates" in text for text in questions_without_data(trace.layers))


def test_the_same_table_as_jsonl(tmp_path):
    rows = [
        {"layer": 1, "token": 0, "experts": [3, 1, 0], "scores": [2.5, 1.5, 1.25]},
        {"layer": 0, "token": 0, "experts": [0, 1, 2], "scores": [3, 2, 1]},
        {"layer": 0, "token": 5, "experts": [2, 1, 0], "scores": [10, 0, -1]},
        {"layer": 1, "token": 5, "experts": [0, 2, 3], "scores": [1, 1, 1]},
    ]
    from_csv = import_table(table(tmp_path, CSV), k=2)
    from_jsonl = import_trace(table(tmp_path, jsonl(*rows), "jsonl"), k=2)
    for first, second in zip(from_csv.layers, from_jsonl.layers, strict=True):
        assert first.experts.tolist() == second.experts.tolist()
        assert first.scores.tolist() == second.scores.tolist()


def test_all_experts_of_a_line_are_chosen_by_default(tmp_path):
    trace = import_table(table(tmp_path, CSV))
    assert trace.layers[0].facts.k == 3
    assert any("chosen ranks only" in text for text in trace.provenance["cannot_answer"])


def test_tokens_are_ordered_by_number(tmp_path):
    trace = import_table(table(tmp_path, "layer,token,experts\n0,9,1\n0,2,0\n"))
    assert trace.positions.tolist() == [2, 9]
    assert trace.layers[0].experts.tolist() == [[0], [1]]


def test_names_keep_their_order_and_ids_are_read(tmp_path):
    trace = import_table(table(tmp_path, "\n" + jsonl(*ROWS), "jsonl"))
    assert [layer.name for layer in trace.layers] == ["b", "a"]
    ids = trace.documents, trace.positions, trace.tokens
    assert [x.tolist() for x in ids] == [[4], [9], [17]]
    assert trace.layers[0].scores is None
    assert trace.layers[0].facts.n_experts == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: columns .* missing"),
        ("layer,token\n", r"\['experts'\] missing"),
        ("layer,token,experts\n", "has no rows"),
        ("layer,token,experts,colour\n", r"\['colour'\] unknown"),
        ("layer,token,experts,layer\n", "a column comes twice"),
        ("layer,token,experts\n0,0\n", "line 2: 2 cells, the header has 3"),
        ("layer,token,experts\n0,0,1,2\n", "line 2: 4 cells"),
        ("layer,token,experts\n0,x,1\n", "line 2: token must be integers, got 'x'"),
        ("layer,token,experts\n0,-1,1\n", "token must be integers >= 0"),
        ("layer,token,experts\n0,1.5,1\n", "token must be integers"),
        ("layer,token,experts\n0,1_0,1\n", "token must be integers"),
        ("layer,token,experts\n0,٣,1\n", "token must be integers"),
        ("layer,token,experts\n0,99999999999999999999,1\n", "token must be integers"),
        ("layer,token,experts\n,0,1\n", "layer must be a number or a name"),
        ("layer,token,experts\n0,0,\n", "experts must be a list of at least one"),
        ("layer,token,experts\n0,0,-1\n", "experts must be integers >= 0"),
        ("layer,token,experts\n0,0,1|2\n", "experts must be integers"),
        ("layer,token,experts\n0,0,99999999\n", "0 ... 65535, got 99999999"),
        ("layer,token,experts\n0,0,1 1\n", "an expert twice"),
        ("layer,token,experts\n0,0,1\n0,0,2\n", "line 3: .* were on line 2"),
        ("layer,token,experts\n0,0,1\n0,1,2 3\n", "line 3: 2 experts, other lines have 1"),
        ("layer,token,experts\n0,0,1\n1,1,2\n", "every layer must have the same tokens"),
        ("layer,token,experts,scores\n0,0,1,nan\n", "finite numbers, got nan"),
        ("layer,token,experts,scores\n0,0,1,inf\n", "finite numbers, got inf"),
        ("layer,token,experts,scores\n0,0,1,x\n", "scores must be numbers"),
        ("layer,token,experts,scores\n0,0,1,\n", "scores must be a list"),
        ("layer,token,experts,scores\n0,0,1 2,1 2\n", "scores must descend"),
        ("layer,token,experts,scores\n0,0,1 2,1\n", "1 scores for 2 experts"),
        ("layer,token,experts,document\n0,0,1,2\n1,0,1,3\n", "line 3: token 0 has"),
        ('layer,token,experts\n0,0,"1\n', "cannot be read"),
        ("layer,token,experts\n0,0,1\0\n", "a.csv"),
        (b"layer,token,experts\n\xff,0,1\n", "cannot be read"),
        (b"layer,token,experts\n0,0," + b"1 " * 100_000, "field larger"),
    ],
)
def test_csv_that_says_nothing_sensible_is_refused_with_the_line(tmp_path, text, message):
    with pytest.raises(TraceError, match=message):
        import_table(table(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ("[]\n", "line 1: must hold a JSON object"),
        ("{\n", "line 1: not valid JSON"),
        ("[" * 50_000, "line 1: not valid JSON"),
        ('{"layer": 0, "token": 0}', r"\['experts'\] missing"),
        ('{"layer": 0, "token": 0, "experts": [1], "x": 1}', r"\['x'\] unknown"),
        ('{"layer": true, "token": 0, "experts": [1]}', "layer must be"),
        ('{"layer": null, "token": 0, "experts": [1]}', "layer must be"),
        ('{"layer": "", "token": 0, "experts": [1]}', "layer must be"),
        ('{"layer": 0, "token": 0.5, "experts": [1]}', "token must be integers"),
        ('{"layer": 0, "token": true, "experts": [1]}', "token must be integers"),
        ('{"layer": 0, "token": 0, "experts": 1}', "experts must be a list"),
        ('{"layer": 0, "token": 0, "experts": []}', "at least one"),
        ('{"layer": 0, "token": 0, "experts": [[1]]}', "experts must be integers"),
        ('{"layer": 0, "token": 0, "experts": [1], "scores": [NaN]}', "not valid JSON"),
        ('{"layer": 0, "token": 0, "experts": [1], "scores": [true]}', "finite numbers"),
        ('{"layer": 0, "token": 0, "experts": [1], "scores": ["1"]}', "finite numbers"),
        ('{"layer": 0, "token": 0, "experts": [1], "document": "a"}', "document must be"),
        (jsonl(ROWS[0], {**ROWS[1], "scores": [2, 1]}), "line 2: 2 scores, other lines have 0"),
        (jsonl(*ROWS, ROWS[0]), "line 3: .* were on line 1"),
    ],
)
def test_jsonl_that_says_nothing_sensible_is_refused_with_the_line(tmp_path, text, message):
    with pytest.raises(TraceError, match=message):
        import_table(table(tmp_path, text, "jsonl"))


def test_too_many_layers_and_wrong_options_are_refused(tmp_path):
    many = jsonl(*({"layer": n, "token": 0, "experts": [0]} for n in range(4097)))
    with pytest.raises(TraceError, match="more than 4096 layers"):
        import_table(table(tmp_path, many, "jsonl"))
    with pytest.raises(TraceError, match="k <= ranks"):
        import_table(table(tmp_path, CSV), k=4, n_experts=6)
    with pytest.raises(TraceError, match=r"0 ... 2, got 3"):
        import_table(table(tmp_path, CSV), n_experts=3)
    with pytest.raises(TraceError, match=r"must end in \.csv, \.tsv, \.jsonl"):
        import_table(table(tmp_path, CSV, "txt"))
    with pytest.raises(TraceError, match="no such file"):
        import_table(tmp_path / "missing.csv")


def test_large_numbers_take_no_memory(tmp_path):
    text = jsonl({"layer": 0, "token": (1 << 53) - 1, "experts": [0]})
    tracemalloc.start()
    try:
        assert import_table(table(tmp_path, text, "jsonl")).n_tokens == 1
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


cells = st.sampled_from(
    ["0", "1", "2 1", "-1", "nan", "", "1e999", "x", '"', "0 0", "7" * 30, "\0"]
)
lines = st.lists(st.lists(cells, max_size=5).map(",".join), max_size=6).map("\n".join)


@settings(max_examples=100)
@given(st.one_of(lines.map(lambda x: "layer,token,experts,scores\n" + x), st.text(max_size=60)))
def test_any_csv_is_read_or_refused(tmp_path_factory, text):
    path = table(tmp_path_factory.mktemp("any"), text.encode(errors="replace"))
    try:
        trace = import_table(path)
    except TraceError:
        return
    assert trace.n_tokens > 0


values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 3) | st.floats() | st.none(), max_size=3),
)
objects = st.dictionaries(
    st.sampled_from(["layer", "token", "experts", "scores", "document", "id", "other"]), values
)


@settings(max_examples=100)
@given(st.lists(objects, max_size=4), st.integers(0, 400), st.booleans())
def test_any_jsonl_is_read_or_refused(tmp_path_factory, rows, cut, good):
    text = jsonl(*(ROWS if good else []), *rows).encode()
    path = table(tmp_path_factory.mktemp("any"), text[: max(len(text) - cut, 1)], "jsonl")
    try:
        trace = import_table(path)
    except TraceError:
        return
    assert trace.n_tokens > 0


def test_the_tables_of_the_documentation_are_tables(tmp_path):
    page = (Path(__file__).parents[3] / "docs" / "trace-format.md").read_text()
    blocks = [block.strip() + "\n" for block in page.split("```")[1::2]]
    (csv,) = (block for block in blocks if block.startswith("layer,"))
    (lines,) = (block for block in blocks if block.startswith('{"layer"'))
    trace = import_table(table(tmp_path, csv), k=2)
    assert trace.layers[0].gap.tolist() == [1.5 - 1.4375, 0.25]
    assert import_table(table(tmp_path, lines, "jsonl")).layers[0].facts.k == 3
