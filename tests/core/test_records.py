"""Records to JSON and back, and JSON from elsewhere."""

import contextlib
import dataclasses
import json
import math
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.core import records
from tieline.core.errors import ParameterError, TraceError
from tieline.core.plugins import ResultFormat, result_formats
from tieline.core.records import (
    DEEPEST,
    LONGEST,
    Result,
    canonical_json,
    entry_named,
    from_plain,
    parse_json,
    read_result,
    result_class,
    short_repr,
    to_plain,
)

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(values)
def test_values_survive_and_have_one_text(value):
    text = canonical_json(value)
    assert parse_json(text.encode(), "x") == value
    assert canonical_json(json.loads(text)) == text


@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(TraceError):
        parse_json(data, "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"[" * 100_000, "not valid JSON"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), "deeper than 32"),
        (b'{"a":1,"a":2}', "repeated"),
        (b"NaN", "NaN"),
        (b"[-Infinity]", "Infinity"),
        (b"1e999", "no JSON value: inf"),
        (b"9223372036854775808", "no JSON value"),
        (b"1" * 10_000, "not valid JSON"),
        (b'"\\ud800"', "no JSON value"),
        (b'{"\\ud800":1}', "no JSON value"),
        (b"\xff", "not valid JSON"),
        (b"", "not valid JSON"),
        (b" " * (LONGEST + 1), "at most"),
    ],
)
def test_what_json_does_not_define_is_refused(data, message):
    with pytest.raises(TraceError, match=message):
        parse_json(data, "x")


@pytest.mark.parametrize("value", [{1: 2}, {"a": object()}, float("nan"), 1 << 63, "\ud800"])
def test_values_that_are_not_json_are_not_written(value):
    with pytest.raises(TraceError, match="provenance"):
        canonical_json(value)


Value = TypeVar("Value")


class Kind(StrEnum):
    ONE = "one"
    TWO = "two"


class Pair(NamedTuple):
    left: float
    right: int | None = None


@dataclass(frozen=True)
class Section(Generic[Value]):
    value: Value | None
    status: str = "ok"


@dataclass(frozen=True)
class Leaf:
    number: float
    count: int
    flag: bool
    text: str
    kind: Kind
    severity: Literal["warning", "info"]
    level: str | float


@dataclass(frozen=True, repr=False)
class Tree(Result):
    format = "tieline-tree"
    version = 2
    leaves: tuple[Leaf, ...]
    metrics: dict[str, float]
    by_layer: dict[int, float | None]
    best: Leaf | None
    section: Section[tuple[Pair, ...]]
    triple: tuple[int, str, float]
    rows: list[tuple[float | None, ...]]
    folder: Path
    provenance: dict[str, object]
    maybe: tuple[float | None, ...] | None = None
    trace: object = field(default=None, metadata={"json": False})


numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
leaves = st.builds(Leaf, numbers, st.integers(-9, 9), level=texts | numbers)
pairs = st.builds(Pair, numbers, st.none() | st.integers(-9, 9))
trees = st.builds(
    Tree,
    leaves=st.lists(leaves, max_size=2).map(tuple),
    metrics=st.dictionaries(texts, numbers, max_size=3),
    by_layer=st.dictionaries(st.integers(-9, 9), st.none() | numbers, max_size=3),
    best=st.none() | leaves,
    section=st.builds(Section, st.none() | st.lists(pairs, max_size=2).map(tuple)),
    triple=st.tuples(st.integers(-9, 9), texts, numbers),
    rows=st.lists(st.lists(st.none() | numbers, max_size=2).map(tuple), max_size=2),
    folder=st.sampled_from([Path("a"), Path("/b/c")]),
    provenance=st.dictionaries(texts, st.none() | texts | numbers | st.lists(numbers), max_size=3),
    maybe=st.none() | st.just((1.0, None)),
    trace=st.none(),
)
LEAF = Leaf(1.0, 2, True, "x", Kind.ONE, "info", "bf16")
TREE = Tree(
    (LEAF,), {"flip": 0.5}, {3: None}, None, Section(None), (1, "a", 2.0), [], Path("a"), {}
)


def equal(a, b):
    return dataclasses.asdict(a) == dataclasses.asdict(b)


@given(trees)
def test_records_survive_json(tree):
    text = json.dumps(to_plain(tree), allow_nan=False)
    assert equal(from_plain(Tree, json.loads(text)), tree)


TREE_FORMATS = {**result_formats(), "tieline-tree": ResultFormat(f"{__name__}:Tree", "")}


@given(trees)
def test_results_survive_their_files(tmp_path_factory, tree):
    path = tmp_path_factory.mktemp("results") / "r.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "result_formats", lambda: TREE_FORMATS)
        text = tree.to_json(path)
        assert path.read_text() == text
        assert equal(read_result(path), tree)


@given(st.recursive(values, lambda inner: st.tuples(inner, inner), max_leaves=4))
def test_plain_values_are_plain_already(value):
    once = to_plain(value)
    assert to_plain(once) == once
    assert json.loads(json.dumps(once)) == once


def test_head_and_order_of_the_file():
    names = [f.name for f in dataclasses.fields(Tree) if f.name != "trace"]
    assert list(TREE.to_dict()) == ["format", "version", *names]
    assert TREE.to_dict() == {"format": "tieline-tree", "version": 2, **to_plain(TREE)}
    assert TREE.to_json() == json.dumps(TREE.to_dict(), indent=1) + "\n"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(number):
    record = {"a": (number, [number]), "b": Pair(number)}
    assert to_plain(record) == {"a": [None, [None]], "b": {"left": None, "right": None}}
    name = str(number)
    as_text = to_plain(record, nonfinite_as_text=True)
    assert as_text == {"a": [name, [name]], "b": {"left": name, "right": None}}
    assert math.isnan(from_plain(Pair, {"left": None}).left)
    assert str(from_plain(Pair, {"left": name}).left) == name


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1.0, np.inf]]), [[1.0, None]]),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor(math.nan), None),
        ({1: Kind.TWO}, {"1": "two"}),
        (Path("/a/b"), "/a/b"),
        (True, True),
    ],
)
def test_arrays_enums_and_paths_are_plain(value, plain):
    converted = to_plain(value)
    assert converted == plain
    assert type(converted) is type(plain)


def test_fields_outside_json_are_left_out_and_default():
    tree = dataclasses.replace(TREE, trace=object())
    assert "trace" not in tree.to_dict()
    assert from_plain(Tree, to_plain(tree)).trace is None
    assert from_plain(Tree, {**to_plain(tree), "trace": 3}).trace is None


def test_new_keys_are_ignored_and_absent_fields_default():
    values = {**to_plain(TREE), "later": 1}
    del values["maybe"]
    assert equal(from_plain(Tree, values), TREE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"leaves": 3}, "Tree.leaves: expected tuple, got 3"),
        ({"leaves": [{"number": 1}]}, r"Tree.leaves\[0\]: without count, flag"),
        ({"leaves": "text"}, "Tree.leaves"),
        ({"metrics": {"flip": "much"}}, r"Tree.metrics\['flip'\]: expected float, got 'much'"),
        ({"metrics": {"flip": True}}, "expected float, got True"),
        ({"metrics": []}, "Tree.metrics: expected dict"),
        ({"by_layer": {"x": 1.0}}, "Tree.by_layer"),
        ({"best": 3}, "Tree.best: expected Leaf, got 3"),
        ({"best": {**to_plain(LEAF), "count": 1.5}}, "Tree.best.count: expected int, got 1.5"),
        ({"best": {**to_plain(LEAF), "count": True}}, "expected int, got True"),
        ({"best": {**to_plain(LEAF), "flag": 1}}, "expected bool, got 1"),
        ({"best": {**to_plain(LEAF), "text": None}}, "expected str, got None"),
        ({"best": {**to_plain(LEAF), "kind": "three"}}, "expected Kind, got 'three'"),
        ({"best": {**to_plain(LEAF), "severity": "note"}}, "Tree.best.severity"),
        ({"triple": [1, "a"]}, "Tree.triple: 2 entries, 3 are needed"),
        ({"folder": 7}, "Tree.folder: expected Path"),
        ({"section": {"value": [{"left": "x"}]}}, r"Tree.section.value\[0\].left"),
    ],
)
def test_values_that_do_not_fit_are_refused_with_their_place(change, message):
    with pytest.raises(TraceError, match=message):
        from_plain(Tree, {**to_plain(TREE), **change})


def test_errors_of_a_constructor_name_the_place():
    @dataclass(frozen=True)
    class Positive:
        n: int

        def __post_init__(self):
            if self.n < 1:
                raise ValueError("n must be positive")

    with pytest.raises(TraceError, match="Positive: n must be positive"):
        from_plain(Positive, {"n": 0})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "a result is a JSON object"),
        ("{}", "unknown format None; known are tieline-inspection"),
        ('{"format": ["tieline-tree"]}', "unknown format"),
        ('{"format": "tieline-trees"}', "unknown format 'tieline-trees'"),
        ('{"format": "tieline-tree"}', "version None of tieline-tree"),
        ('{"format": "tieline-tree", "version": 3}', "version 3 of tieline-tree; versions 1 to 2"),
        ('{"format": "tieline-tree", "version": true}', "version True"),
        ('{"format": "tieline-tree", "version": 2}', "r.json: Tree: without leaves"),
        ("{", "not valid JSON"),
    ],
)
def test_other_files_are_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(records, "result_formats", lambda: TREE_FORMATS)
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_result(path)


def test_absent_and_long_files_are_refused(tmp_path, monkeypatch):
    with pytest.raises(TraceError, match=r"cannot read .*absent.json: No such file"):
        read_result(tmp_path / "absent.json")
    monkeypatch.setattr(records, "LONGEST_RESULT", 8)
    (tmp_path / "long.json").write_text(" " * 9)
    with pytest.raises(TraceError, match="9 bytes of JSON, at most 8 are read"):
        read_result(tmp_path / "long.json")


def test_every_format_names_a_class_of_that_format():
    for name in result_formats():
        assert result_class(name).format == name


class _Report:
    @staticmethod
    def page(result):
        return f"<html>{result.metrics}</html>"

    @staticmethod
    def figures(result):
        return {"gaps": lambda: "a figure of gaps", "load": lambda: "a figure of load"}

    @staticmethod
    def summary(result):
        return "Tree: fine"

    @staticmethod
    def notebook(result):
        return "<table></table>"


def test_results_show_themselves_by_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_report_room", lambda: _Report)
    shown: Any = TREE
    assert repr(shown) == "Tree: fine"
    assert shown._repr_html_() == "<table></table>"
    assert shown.plot() == "a figure of gaps"
    assert shown.plot("load") == "a figure of load"
    with pytest.raises(ParameterError, match="no figure 'jumps'; the figures are: gaps, load"):
        shown.plot("jumps")
    assert shown.to_html(tmp_path / "p.html") == (tmp_path / "p.html").read_text()


@dataclass(frozen=True)
class Wide:
    name: str
    column: Any
    rows: tuple[Any, ...]
    facts: dict[str, Any]

    __repr__ = short_repr


def test_a_record_that_holds_much_is_shown_in_a_few_lines():
    rows = tuple(Wide("x", None, (), {}) for _ in range(2000))
    wide = Wide("n" * 10_000, torch.zeros(300, 4), rows, {"model": "demo", "text": "t" * 10_000})
    assert len(repr(wide)) < 400
    assert "column=Tensor(300, 4), rows=<2000 Wide>" in repr(wide)
    assert "('model', 'demo') and 1 more" in repr(wide)
    assert repr(Wide("x", 1.5, (1, 2), {})) == "Wide(name='x', column=1.5, rows=(1, 2), facts={})"


def test_a_record_that_is_not_there_names_those_that_are():
    entries = [SimpleNamespace(name="router bf16"), SimpleNamespace(name="model bf16")]
    assert entry_named(entries, "model bf16") is entries[1]
    with pytest.raises(ParameterError, match="'bf16': there are router bf16, model bf16"):
        entry_named(entries, "bf16")
