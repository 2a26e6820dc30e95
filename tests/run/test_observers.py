"""Inspections, captures and comparisons of streamed models are those of the models in memory."""

import pytest

from tests.models.model_stream.test_passes import in_groups, saved
from tieline.analysis.diff import diff
from tieline.analysis.inspect import inspect
from tieline.analysis.jumps import JumpSettings
from tieline.core.errors import ParameterError
from tieline.core.records import to_plain
from tieline.engines.engine_capture import capture_engine
from tieline.measure.measure_settings import MeasureSettings
from tieline.models.experts import use_experts
from tieline.models.model import Model
from tieline.trace.record import identical_values

pytestmark = pytest.mark.usefixtures("single_thread")

TEXT = "def area(width, height):\n    return width * height  # <script>\n" * 12
TOKENS = {"text": TEXT, "tokens": 100, "batch_size": 2, "sequence_length": 16}
SMALL = {
    **TOKENS,
    "serve": "none",
    "measure_settings": MeasureSettings(sigmas=(1e-2,), precisions=("bf16",)),
    "jump_settings": JumpSettings(near=8, random=8),
}


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3", "mistral4"])
@pytest.mark.parametrize("jumps", [True, False])
def test_metrics_traces_and_jumps_are_equal(family, jumps, tmp_path):
    folder, progress_calls = saved(tmp_path / "model", family, vocab_size=512), []
    plain = inspect(folder, stream=False, jumps=jumps, dtype="fp32", **SMALL)
    progress = lambda *arguments: progress_calls.append(arguments)  # noqa: E731
    streamed = inspect(folder, stream=True, jumps=jumps, dtype="fp32", progress=progress, **SMALL)
    assert identical_values(plain.trace, streamed.trace)
    assert to_plain(plain.measures) == to_plain(streamed.measures)
    assert plain.jumps == streamed.jumps
    assert (plain.metrics, plain.verdict) == (streamed.metrics, streamed.verdict)
    assert {stage for stage, *_ in progress_calls} == {"streaming"}
    assert streamed.provenance["threads"] == 1


def test_experts_in_groups_give_the_same_jumps(tmp_path):
    folder = saved(tmp_path / "model", "olmoe", vocab_size=512)
    eager = Model.open(folder, dtype="fp32")
    use_experts(eager.module, "eager")
    plain, grouped = inspect(eager, **SMALL), inspect(in_groups(folder, "olmoe", 3), **SMALL)
    assert identical_values(plain.trace, grouped.trace)
    assert plain.jumps == grouped.jumps
    assert plain.metrics == grouped.metrics


@pytest.mark.parametrize("family", ["olmoe", "gpt_oss", "qwen3_next"])
def test_a_streamed_capture_is_the_trace_of_the_model_in_memory(family, tmp_path):
    folder, progress_calls = saved(tmp_path / "model", family, vocab_size=512), []
    options = {"text": TEXT, "tokens": 170, "sequence_length": 16}
    plain = capture_engine(folder, stream=False, **options)
    streamed = capture_engine(
        folder, stream=True, progress=lambda *arguments: progress_calls.append(arguments), **options
    )
    assert identical_values(plain.trace, streamed.trace)
    assert plain.trace.provenance == streamed.trace.provenance
    assert plain.metrics == streamed.metrics
    assert {stage for stage, *_ in progress_calls} == {"streaming"}


def test_only_transformers_streams(tmp_path):
    with pytest.raises(ParameterError, match="stream is for transformers"):
        capture_engine(tmp_path, engine="vllm", stream=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    names = ("olmoe", "qwen3_moe")
    return [saved(root / name, name, vocab_size=512) for name in names]


def test_the_result_is_that_of_models_in_memory_and_each_byte_is_read_once(folders):
    expected = diff(*folders, dtype_a="fp32", dtype_b="fp32", **TOKENS)
    loaded = [Model.open(folder, dtype="fp32", stream=True) for folder in folders]
    progress_calls = []
    comparison = diff(
        *loaded, progress=lambda *arguments: progress_calls.append(arguments), **TOKENS
    )
    assert comparison.metrics == expected.metrics
    assert comparison.logits == expected.logits
    assert [model.stream.weights.shards.bytes_read for model in loaded] == [
        model.stream.weights.shards.size for model in loaded
    ]
    assert progress_calls == sorted(progress_calls)


def test_what_needs_the_models_in_memory_is_refused(folders):
    with pytest.raises(ParameterError, match="need the models in memory"):
        diff(*folders, stream=True, dtype_b="bf16-emulated", **TOKENS)
