"""GLUE from files written by the test, and the real ones if they are available."""

import pytest

from tests.lab.training.real_data import shared
from tieline.core.errors import ParameterError
from tieline.lab.training.data_files import DataError
from tieline.lab.training.sentence_tasks import GLUE, load_glue

LINES = {
    "CoLA": "gj04\t1\t\tA sentence.\ngj04\t0\t*\tSentence a.\n",
    "MRPC": '﻿Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n1\t7\t8\tOne " .\tTwo .\r\n',
    "RTE": "index\tsentence1\tsentence2\tlabel\n0\tIt rains.\tIt is wet.\tnot_entailment\n",
}
READ = {
    "CoLA": ((("A sentence.",), ("Sentence a.",)), (1, 0)),
    "MRPC": ((('One " .', "Two ."),), (1,)),
    "RTE": ((("It rains.", "It is wet."),), (1,)),
}


def put(folder, task, text):
    (folder / task).mkdir(exist_ok=True)
    (folder / task / "dev.tsv").write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.mark.parametrize("task", GLUE)
def test_lines_become_sentences_and_labels(tmp_path, task):
    sentences = load_glue(task, "dev", put(tmp_path, task, LINES[task]), check_hash=False)
    assert (sentences.texts, sentences.labels) == READ[task]
    assert sentences.source == f"{task} dev"
    assert sentences.majority == (0.5 if task == "CoLA" else 1.0)


@pytest.mark.parametrize(
    ("task", "text", "message"),
    [
        ("CoLA", "gj04\t2\t\tA sentence.\n", "line 1"),
        ("CoLA", "gj04\t1\tA sentence.\n", "line 1"),
        ("RTE", LINES["RTE"] + "1\tA\tB\tmaybe\n", "line 3"),
        ("RTE", "index\tsentence1\tsentence2\tlabel\n", "no example"),
    ],
)
def test_other_lines_are_refused_with_their_number(tmp_path, task, text, message):
    with pytest.raises(DataError, match=message):
        load_glue(task, "dev", put(tmp_path, task, text), check_hash=False)


def test_unknown_tasks_splits_files_and_bytes_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ParameterError, match="'SST'"):
        load_glue("SST", "dev")
    with pytest.raises(ParameterError, match="'test'"):
        load_glue("RTE", "test")
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    (tmp_path / "glue").mkdir()
    with pytest.raises(DataError, match=r"GLUE is not at .*glue/RTE/dev\.tsv.*gluebenchmark"):
        load_glue("RTE", "dev")
    with pytest.raises(DataError, match="bytes, expected"):
        load_glue("RTE", "dev", put(tmp_path, "RTE", LINES["RTE"]))
    (tmp_path / "RTE" / "dev.tsv").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="no UTF-8"):
        load_glue("RTE", "dev", tmp_path, check_hash=False)


@pytest.mark.parametrize(
    ("task", "train", "dev"), [("CoLA", 8_551, 1_043), ("MRPC", 3_667, 408), ("RTE", 2_490, 277)]
)
def test_the_real_tasks_have_their_sizes(task, train, dev):
    folder = shared("glue")
    assert len(load_glue(task, "train", folder)) == train
    assert len(load_glue(task, "dev", folder)) == dev
