"""Merging folders of one kind."""

import json

import pytest

from tests.trace.zoo import make_trace
from tieline.core.errors import TraceError
from tieline.trace import (
    concatenate,
    folder_kind,
    load_summary,
    load_trace,
    merge_folders,
    save_summary,
    save_trace,
    select_tokens,
    summarise,
)
from tieline.trace.record import identical_values
from tieline.trace.store import INDEX

pytestmark = pytest.mark.usefixtures("axes_unchecked")
TRACE = make_trace()
PARTS = [select_tokens(TRACE, slice(0, 9)), select_tokens(TRACE, slice(9, None))]


def test_merged_summaries_of_shards_are_the_summary_of_the_whole(tmp_path):
    for index, part in enumerate(PARTS):
        save_summary(summarise(part), tmp_path / str(index))
    merged = merge_folders([tmp_path / "0", tmp_path / "1"], tmp_path / "all")
    assert identical_values(merged, summarise(TRACE))
    assert identical_values(load_summary(tmp_path / "all"), merged)
    assert folder_kind(tmp_path / "all") == "summary"


def test_merged_traces_are_joined(tmp_path):
    for index, part in enumerate(PARTS):
        save_trace(part, tmp_path / str(index))
    merge_folders([tmp_path / "0", tmp_path / "1"], tmp_path / "all")
    assert folder_kind(tmp_path / "all") == "trace"
    assert identical_values(load_trace(tmp_path / "all"), TRACE)
    with pytest.raises(TraceError, match="renumber"):
        merge_folders([tmp_path / "0"] * 2, tmp_path / "twice")
    merge_folders([tmp_path / "0"] * 2, tmp_path / "twice", documents="renumber")
    twice = concatenate([PARTS[0]] * 2, documents="renumber")
    assert identical_values(load_trace(tmp_path / "twice"), twice)


def test_the_output_may_replace_an_input_on_request(tmp_path):
    for index, part in enumerate(PARTS):
        save_trace(part, tmp_path / str(index))
    both = [tmp_path / "0", tmp_path / "1"]
    with pytest.raises(TraceError, match="exists"):
        merge_folders(both, tmp_path / "0")
    merge_folders(both, tmp_path / "0", overwrite=True)
    assert identical_values(load_trace(tmp_path / "0"), TRACE)


def test_what_cannot_be_merged_is_refused(tmp_path):
    save_trace(TRACE, tmp_path / "trace")
    save_summary(summarise(TRACE), tmp_path / "summary")
    with pytest.raises(TraceError, match="different kinds"):
        merge_folders([tmp_path / "trace", tmp_path / "summary"], tmp_path / "all")
    with pytest.raises(TraceError, match="no folders"):
        merge_folders([], tmp_path / "all")
    with pytest.raises(TraceError, match="is no folder"):
        merge_folders([tmp_path / "nowhere"], tmp_path / "all")
    (tmp_path / "trace" / INDEX).write_text(json.dumps({"format": ["x"]}))
    with pytest.raises(TraceError, match="neither a trace nor a summary"):
        folder_kind(tmp_path / "trace")
    assert not (tmp_path / "all").exists()
