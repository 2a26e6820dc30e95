"""`tieline merge` from end to end: shards of a run are joined, or nothing is written."""

import json

import pytest

from tests.trace.zoo import make_trace
from tieline.trace import (
    concatenate,
    load_summary,
    load_trace,
    merge_summaries,
    save_summary,
    save_trace,
    select_tokens,
    summarise,
)
from tieline.trace.record import identical_values

TRACE = make_trace(tokens=24)


@pytest.fixture
def halves(tmp_path):
    """A trace cut in two, each half kept as a trace and as a summary."""
    traces = [select_tokens(TRACE, slice(0, 9)), select_tokens(TRACE, slice(9, None))]
    for number, half in enumerate(traces):
        save_trace(half, tmp_path / f"trace{number}")
        save_summary(summarise(half), tmp_path / f"part{number}")
    return traces


def test_merged_summaries_are_the_summary_of_the_whole(tieline, halves, tmp_path):
    arguments = ["merge", tmp_path / "part0", tmp_path / "part1", "-o", tmp_path / "whole"]
    code, out, err = tieline(*arguments)
    assert code == 0, err
    assert "24 tokens of 2 summaries, 4 layers" in " ".join(out.split())
    assert identical_values(load_summary(tmp_path / "whole"), summarise(TRACE))
    code, out, err = tieline(*arguments)
    assert code == 2
    assert "exists: choose another place or add --overwrite" in err
    code, out, err = tieline(*arguments, "--overwrite", "--json")
    assert code == 0, err
    read = json.loads(out)
    assert (read["format"], read["kind"], read["tokens"]) == ("tieline-merge", "summary", 24)


def test_merged_traces_are_the_trace_of_the_whole(tieline, halves, tmp_path):
    arguments = ["merge", tmp_path / "trace0", tmp_path / "trace1", "-o", tmp_path / "whole"]
    code, out, err = tieline(*arguments)
    assert code == 0, err
    assert "24 tokens of 2 traces, 4 layers" in " ".join(out.split())
    assert identical_values(load_trace(tmp_path / "whole"), TRACE)
    code, _, err = tieline(*arguments)
    assert code == 2
    assert "exists" in err


def test_an_output_is_never_one_of_the_parts(tieline, halves, tmp_path):
    both = [tmp_path / "trace0", tmp_path / "trace1"]
    code, out, err = tieline("merge", *both, "-o", both[0], "--overwrite")
    assert (code, out) == (2, "")
    assert "an output never replaces an input" in err
    assert identical_values(load_trace(both[0]), halves[0])


def test_documents_of_separate_runs_are_told_apart_on_request(tieline, halves, tmp_path):
    arguments = ["merge", tmp_path / "trace0", tmp_path / "trace0", "-o", tmp_path / "twice"]
    code, out, err = tieline(*arguments)
    assert (code, out) == (2, "")
    assert "occurs twice" in err
    assert "need --renumber" in err
    assert not (tmp_path / "twice").exists()
    code, out, err = tieline(*arguments, "--renumber")
    assert code == 0, err
    twice = concatenate([halves[0]] * 2, documents="renumber")
    assert identical_values(load_trace(tmp_path / "twice"), twice)
    code, _, err = tieline("merge", tmp_path / "part0", "-o", tmp_path / "c", "--renumber")
    assert code == 2
    assert "summaries keep the numbers" in err


def test_the_report_can_be_a_file(tieline, halves, tmp_path):
    target = tmp_path / "m.json"
    code, _, err = tieline("merge", tmp_path / "part0", "-o", tmp_path / "one", "--json", target)
    assert code == 0, err
    assert f"wrote {target}" in err
    assert json.loads(target.read_text())["output"] == str(tmp_path / "one")
    assert identical_values(load_summary(tmp_path / "one"), merge_summaries([summarise(halves[0])]))


def test_what_cannot_be_merged_is_refused(tieline, halves, tmp_path):
    (tmp_path / "part1" / "tieline.json").write_text("{")
    refused = {"part1": "part1", "missing": "missing", "trace0": "different kinds"}
    for other, message in refused.items():
        code, out, err = tieline(
            "merge", tmp_path / "part0", tmp_path / other, "-o", tmp_path / "c"
        )
        assert (code, out) == (2, ""), err
        assert message in err
        assert not (tmp_path / "c").exists()
    code, _, err = tieline("merge", "-o", tmp_path / "c")
    assert code == 2
    assert "Missing argument" in err
