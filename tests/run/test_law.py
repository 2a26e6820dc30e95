"""The law of the runner: however passes are scheduled, every number is the same, bit for bit.

in memory    pass by pass, in windows of batches
streamed     unit by unit, weights read from disk
data         batches shared by two processes
"""

import pytest
import torch

from tests.models.model_stream.test_passes import in_groups, saved, some_batches
from tests.ranks import Ranks as Processes
from tests.run.on_ranks import audited, repaired
from tests.run.test_observers import SMALL, TOKENS
from tieline.analysis.audit import audit
from tieline.analysis.diff import diff
from tieline.analysis.inspect import inspect
from tieline.analysis.smooth import smooth
from tieline.core.records import to_plain
from tieline.engines.engine_capture import capture_engine
from tieline.models.experts import use_experts
from tieline.models.model import Model
from tieline.run import schedule
from tieline.run.condition import Perturbation
from tieline.run.forward import forward, only_running

pytestmark = pytest.mark.usefixtures("single_thread")

TEXT = "def area(width, height):\n    return width * height  # <script>\n" * 12
CHOSEN = (
    Perturbation("rounding", "int4"),
    Perturbation("score noise", 0.1),
    Perturbation("state noise", 0.01),
    Perturbation("rounding", "bf16", "model"),
    Perturbation("rounding", "int4_group", "model"),
    Perturbation("state noise", 0.01, "model"),
)
AUDIT = {
    "text": TEXT,
    "tokens": 52,
    "batch_size": 2,
    "sequence_length": 16,
    "flips": 10,
    "recover": 0.5,
    "perturbations": CHOSEN,
}
SMOOTH = {
    "text": TEXT,
    "tokens": 64,
    "calibration": 64,
    "batch_size": 2,
    "rounds": 2,
    "noise": "router int8",
}
CLOCKS = ("timings", "time", "latency")
"""What depends on the clock."""


def numbers(result):
    """All fields as JSON values, without times."""
    return without_clocks(to_plain(result))


def without_clocks(plain):
    if isinstance(plain, dict):
        return {key: without_clocks(value) for key, value in plain.items() if key not in CLOCKS}
    if isinstance(plain, list | tuple):
        return [without_clocks(value) for value in plain]
    return plain


def compared(folder, **options):
    """The comparison of a model with a second copy of itself."""
    return diff(folder, folder, **options)


ANALYSES = {
    "audit": (audit, AUDIT),
    "smooth": (smooth, SMOOTH),
    "inspect": (inspect, SMALL | {"dtype": "fp32"}),
    "diff": (compared, TOKENS | {"dtype_a": "fp32", "dtype_b": "fp32"}),
    "capture": (capture_engine, {"text": TEXT, "tokens": 100, "sequence_length": 16}),
}
QUICK = {
    "audit": ("deepseek_v3",),
    "smooth": ("deepseek_v3",),
    "inspect": ("gpt_oss",),
    "diff": ("deepseek_v3",),
    "capture": ("jetmoe",),
}
FAMILIES = {
    "inspect": ("olmoe", "qwen3_next", "mixtral", "granitemoe", "llama4", "zaya"),
    "diff": ("olmoe", "qwen3_next", "jetmoe", "mixtral", "granitemoe", "llama4", "zaya"),
    "capture": ("olmoe", "qwen3_next", "mixtral", "granitemoe", "llama4", "zaya"),
    "audit": (
        "olmoe",
        "gpt_oss",
        "qwen3_next",
        "jetmoe",
        "mixtral",
        "granitemoe",
        "llama4",
        "zaya",
    ),
    "smooth": ("olmoe", "gpt_oss", "qwen3_next", "jetmoe", "mixtral"),
}
CASES = [(name, family) for name, families in QUICK.items() for family in families]
CASES += [
    pytest.param(name, family, marks=pytest.mark.slow)
    for name, families in FAMILIES.items()
    for family in families
]


def model_in(folder, family):
    return saved(folder, family, vocab_size=512, max_position_embeddings=16)


@pytest.mark.parametrize(("analysis", "family"), CASES)
def test_streamed_is_in_memory(analysis, family, tmp_path):
    run, options = ANALYSES[analysis]
    folder, stages = model_in(tmp_path / "model", family), set()
    plain = run(folder, stream=False, **options)
    streamed = run(folder, stream=True, progress=lambda stage, *_: stages.add(stage), **options)
    assert numbers(plain) == numbers(streamed)
    assert stages == {"streaming"}


@pytest.mark.parametrize("analysis", list(ANALYSES))
def test_windows_of_one_batch_are_those_of_many(analysis, tmp_path, monkeypatch):
    run, options = ANALYSES[analysis]
    folder = model_in(tmp_path / "model", "olmoe")
    wide = run(folder, stream=False, **options)
    monkeypatch.setattr(schedule, "WINDOW", 1)
    assert numbers(run(folder, stream=False, **options)) == numbers(wide)


@pytest.mark.parametrize(
    ("analysis", "extra"),
    [
        ("audit", {"perturbations": (CHOSEN[0], CHOSEN[3])}),
        pytest.param("smooth", {"noise": "bf16"}, marks=pytest.mark.slow),
    ],
)
def test_experts_read_in_groups_give_the_same_numbers(analysis, extra, tmp_path):
    run, options = ANALYSES[analysis]
    folder = model_in(tmp_path / "model", "olmoe")
    eager = Model.open(folder, dtype="fp32")
    use_experts(eager.module, "eager")
    plain = run(eager, **options | extra)
    grouped = run(in_groups(folder, "olmoe", 3), **options | extra)
    assert numbers(plain) == numbers(grouped)


@pytest.mark.slow
@pytest.mark.parametrize(
    "extra",
    [{"budget": 2.4, "gate": "ramp", "noise": None}, {"factor": 2.0, "noise": "router int4"}],
)
def test_other_widths_are_chosen_alike(extra, tmp_path):
    folder, options = model_in(tmp_path / "model", "olmoe"), SMOOTH | extra
    assert numbers(smooth(folder, stream=False, **options)) == numbers(
        smooth(folder, stream=True, **options)
    )


ON_RANKS = [("smooth", 2), pytest.param("audit", 2, marks=pytest.mark.slow)]
ON_RANKS += [pytest.param("audit", 3, marks=pytest.mark.slow)]
TASKS = {"audit": audited, "smooth": repaired}


@pytest.mark.parametrize(("analysis", "count"), ON_RANKS)
def test_processes_that_share_batches_are_one(analysis, count):
    alone, ranks = TASKS[analysis](None, 3), Processes(count)
    try:
        everywhere = ranks.run(TASKS[analysis], "data", 3)
    finally:
        ranks.close()
    assert all(result == alone for result in everywhere)


def logits(folder):
    model = Model.open(folder, dtype="fp32").module
    with only_running(model):
        return forward(model, some_batches()[0]).logits


def test_a_streamed_audit_reads_the_files_once_per_phase(tmp_path):
    loaded = Model.open(model_in(tmp_path / "model", "deepseek_v3"), dtype="fp32", stream=True)
    audit(loaded, **AUDIT | {"remedies": (), "recover": 1.0, "perturbations": CHOSEN[1:4]})
    weights = loaded.stream.weights
    assert not weights.tied
    assert weights.shards.bytes_read == weights.shards.size


def test_a_streamed_smoothing_is_saved_as_the_one_in_memory(tmp_path):
    folder = model_in(tmp_path / "model", "olmoe")
    for stream in (False, True):
        smooth(folder, stream=stream, **SMOOTH).save(tmp_path / str(stream))
    assert torch.equal(logits(tmp_path / "False"), logits(tmp_path / "True"))
    assert not torch.equal(logits(folder), logits(tmp_path / "True"))


def test_the_model_in_the_box_can_be_streamed():
    options = {"tokens": 256, "batch_size": 1, "sequence_length": 128, "formats": ["bf16"]}
    options |= {"flips": 10, "remedies": ()}
    assert numbers(audit("demo", **options)) == numbers(audit("demo", stream=True, **options))
