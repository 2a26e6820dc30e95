"""Writers of scalars."""

import importlib.util
import json

import pytest

from tieline.analysis.monitor import JsonlWriter, TensorBoardWriter, Writer
from tieline.core.errors import ParameterError


class Recorder:
    def __init__(self):
        self.points, self.closed = [], False

    def add_scalar(self, name, value, step):
        self.points.append((name, value, step))

    def close(self):
        self.closed = True


def test_tensorboard_gets_a_point_per_scalar_and_its_owner_closes_it():
    target = Recorder()
    writer = TensorBoardWriter(target)
    writer.write(7, {"a": 1.0, "b": 2.0})
    writer.close()
    assert target.points == [("a", 1.0, 7), ("b", 2.0, 7)]
    assert not target.closed
    assert isinstance(writer, Writer)


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is not None, reason="TensorBoard is installed"
)
def test_a_folder_needs_tensorboard(tmp_path):
    with pytest.raises(ParameterError, match="pip install tensorboard"):
        TensorBoardWriter(tmp_path)


def test_a_folder_is_a_log_of_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    writer = TensorBoardWriter(tmp_path)
    writer.write(0, {"routing/ties": 0.5})
    writer.close()
    assert list(tmp_path.iterdir())


def test_json_holds_no_infinity_and_appends(tmp_path):
    path = tmp_path / "a.jsonl"
    JsonlWriter(path).write(1, {"gap": float("inf"), "ties": 0.0})
    JsonlWriter(path).write(2, {"gap": 1.5})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines == [{"step": 1, "gap": None, "ties": 0.0}, {"step": 2, "gap": 1.5}]
