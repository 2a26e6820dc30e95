"""Sources that users pass: models, texts, traces and results, accepted or refused."""

import pytest

from tests.analysis.planted import all_scores, trace_of
from tieline.analysis.route_files import load, source_kind
from tieline.core.errors import ParameterError, TraceError
from tieline.models.demo import demo_text
from tieline.run.corpus import text_and_origin
from tieline.trace import save_summary, save_trace, summarise
from tieline.trace.record import identical_values


def test_a_text_is_read_with_the_name_of_its_file(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffGrüße\r\n".encode())
    assert text_and_origin(tmp_path / "a.txt") == ("Grüße\r\n", "a.txt")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"PK\x03\x04\0\0", "is a binary file"),
        (b"caf\xe9", "is not UTF-8 text: byte 0xe9 at offset 3"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, data, message):
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(ParameterError, match=message):
        text_and_origin(tmp_path / "a.txt")


def test_a_text_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ParameterError, match="no such file"):
        text_and_origin(tmp_path / "a.txt")
    with pytest.raises(ParameterError, match="is a folder, where a file is needed"):
        text_and_origin(tmp_path)


def test_a_text_is_itself_or_the_one_in_the_box():
    assert text_and_origin("words") == ("words", "")
    assert text_and_origin(None) == (demo_text(), "demo")


def test_what_was_saved_is_loaded_by_its_kind(tmp_path):
    trace = trace_of(all_scores(0))
    save_trace(trace, tmp_path / "trace")
    save_summary(summarise(trace), tmp_path / "summary")
    assert identical_values(load(tmp_path / "trace"), trace)
    assert load(str(tmp_path / "summary")).tokens == trace.n_tokens
    assert source_kind(tmp_path / "trace") == source_kind(tmp_path / "summary") == "trace"
    assert [source_kind(name) for name in ("org/model", "none.npz", "demo")] == [
        "model",
        "file",
        "model",
    ]


def test_what_holds_nothing_of_ours_is_refused(tmp_path):
    (tmp_path / "r.json").write_text('{"format": "other", "version": 1}')
    for name, message in (("none", "no such file"), ("", "no trace"), ("r.json", "unknown format")):
        with pytest.raises(TraceError, match=message):
            load(tmp_path / name)
