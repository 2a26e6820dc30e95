"""A streamed smoothing is, number for number, that of the model in memory, and is saved as well."""

import pytest
import torch

from tests.models.test_streaming import in_groups, saved, some_batches
from tieline.analysis.smooth import smooth
from tieline.core.errors import ParameterError
from tieline.models.loading import load_model, use_experts
from tieline.models.running import forward, only_running

pytestmark = pytest.mark.usefixtures("single_thread")

TEXT = "def area(width, height):\n    return width * height  # <script>\n" * 12
SMALL = {"text": TEXT, "tokens": 64, "calibration": 64, "batch_size": 2, "rounds": 2}
QUICK = ("deepseek_v3",)
FAMILIES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in (*QUICK, "olmoe", "gpt_oss", "qwen3_next", "jetmoe", "mixtral")
]


def made(folder, family):
    return saved(folder, family, vocab_size=512, max_position_embeddings=16)


def same(plain, found):
    assert plain.smoothing == found.smoothing
    assert plain.repair == found.repair
    assert plain.provenance == found.provenance
    assert found.latency == ()


def logits(folder):
    model = load_model(folder, dtype="fp32").model
    with only_running(model):
        return forward(model, some_batches()[0]).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_that_of_the_model_in_memory(family, tmp_path):
    folder = made(tmp_path / "model", family)
    asked = SMALL | {"noise": "router int8"}
    plain, loaded = smooth(folder, stream=False, **asked), load_model(folder, stream=True)
    found = smooth(loaded, **asked)
    same(plain, found)
    shards = loaded.stream.weights.shards
    head = loaded.stream.weights.stored(loaded.stream.head)
    again = (
        2 * head if loaded.stream.weights.tied else 0
    )  # a tied head is read with its embedding too
    # one pass without the head, one with it
    assert shards.bytes_read == 2 * shards.size - head + again
    plain.save(tmp_path / "plain")
    found.save(tmp_path / "streamed")
    assert torch.equal(logits(tmp_path / "plain"), logits(tmp_path / "streamed"))
    assert not torch.equal(logits(folder), logits(tmp_path / "streamed"))


def test_experts_in_groups_and_a_noise_of_the_whole_model(tmp_path):
    folder = made(tmp_path / "model", "olmoe")
    eager, asked = load_model(folder, dtype="fp32"), SMALL | {"noise": "bf16"}
    use_experts(eager.model, "eager")
    plain, found = smooth(eager, **asked), smooth(in_groups(folder, "olmoe", 3), **asked)
    same(plain, found)


def test_a_budget_and_a_ramp(tmp_path):
    folder = made(tmp_path / "model", "olmoe")
    asked = SMALL | {"budget": 2.4, "gate": "ramp"}
    same(smooth(folder, stream=False, **asked), smooth(folder, stream=True, **asked))


def test_what_a_streamed_smoothing_cannot_do_is_refused(tmp_path):
    folder = made(tmp_path / "model", "olmoe")
    with pytest.raises(ParameterError, match="factor needs the whole model"):
        smooth(folder, stream=True, factor=2.0, **SMALL)
