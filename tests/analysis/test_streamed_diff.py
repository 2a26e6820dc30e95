"""Two streamed models compare as the same models in memory do, with one pass over each."""

import pytest

from tests.models.test_streaming import saved
from tieline.analysis.diff import diff
from tieline.core.errors import ParameterError
from tieline.models.loading import load_model

pytestmark = pytest.mark.usefixtures("single_thread")

TEXT = "def area(width, height):\n    return width * height  # <script>\n" * 12
SMALL = {"text": TEXT, "tokens": 100, "batch_size": 2, "sequence_length": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    names = ("olmoe", "qwen3_moe")
    return [saved(root / name, name, vocab_size=512) for name in names]


def test_the_result_is_that_of_models_in_memory_and_each_byte_is_read_once(folders):
    wanted = diff(*folders, dtype_a="fp32", dtype_b="fp32", **SMALL)
    loaded = [load_model(folder, dtype="fp32", stream=True) for folder in folders]
    told = []
    found = diff(*loaded, progress=lambda *words: told.append(words), **SMALL)
    assert found.metrics == wanted.metrics
    assert found.logits == wanted.logits
    assert [one.stream.weights.shards.bytes_read for one in loaded] == [
        one.stream.weights.shards.size for one in loaded
    ]
    assert told == sorted(told)


def test_what_needs_the_models_in_memory_is_refused(folders):
    with pytest.raises(ParameterError, match="need the models in memory"):
        diff(*folders, stream=True, dtype_b="bf16-emulated", **SMALL)
