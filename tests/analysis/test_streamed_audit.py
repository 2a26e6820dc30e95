"""A streamed audit is, number for number, that of the model in memory, in one read of its files."""

from dataclasses import replace

import pytest

from tests.models.test_streaming import in_groups, saved
from tieline.analysis.perturbations import Perturbation
from tieline.analysis.precision import audit
from tieline.analysis.streamed_audit import check_room
from tieline.core.errors import ParameterError
from tieline.models.loading import load_model, use_experts

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
SMALL = {
    "text": TEXT,
    "tokens": 52,
    "batch_size": 2,
    "sequence_length": 16,
    "flips": 10,
    "perturbations": CHOSEN,
}


def without_kept_runs(result):
    """The rows without the KL of runs that a streamed audit leaves out."""
    keeps = [row.keep and replace(row.keep, kl=None, recovered_kl=None) for row in result.effects]
    return [replace(row, keep=keep) for row, keep in zip(result.effects, keeps, strict=True)]


def same(plain, found):
    assert without_kept_runs(plain) == without_kept_runs(found)
    fields = ("verdict", "layers", "tokens", "sequences", "loss", "one_percent", "never_hit")
    fields += ("impossible", "experts", "ignore", "provenance")
    for name in fields:
        assert getattr(plain, name) == getattr(found, name), name


QUICK = ("gpt_oss", "deepseek_v3")
FAMILIES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in (*QUICK, "olmoe", "qwen3_next", "jetmoe", "mixtral", "granitemoe", "llama4", "zaya")
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_is_that_of_the_model_in_memory(family, tmp_path):
    folder = saved(tmp_path / "model", family, vocab_size=512)
    plain = audit(folder, stream=False, remedies=(), **SMALL)
    loaded, told = load_model(folder, dtype="fp32", stream=True), []
    found = audit(loaded, progress=lambda *words: told.append(words), **SMALL)
    same(plain, found)
    assert {stage for stage, *_ in told} == {"streaming"}
    weights = loaded.stream.weights
    # a tied head is read with its embedding and again at the end
    again = weights.stored(loaded.stream.head) if weights.tied else 0
    assert weights.shards.bytes_read == weights.shards.size + again


def test_experts_in_groups_give_the_same_numbers(tmp_path):
    folder = saved(tmp_path / "model", "olmoe", vocab_size=512)
    eager = load_model(folder, dtype="fp32")
    use_experts(eager.model, "eager")
    few = SMALL | {"perturbations": (CHOSEN[0], CHOSEN[3])}
    same(audit(eager, remedies=(), **few), audit(in_groups(folder, "olmoe", 3), **few))


def test_what_begins_after_the_other_runs_is_left_out_by_name(tmp_path):
    folder = saved(tmp_path / "model", "olmoe", vocab_size=512)
    few = SMALL | {"perturbations": CHOSEN[:1], "recover": 0.1}
    found = audit(folder, stream=True, **few)
    assert found.effects[0].keep.layers
    assert found.effects[0].keep.kl is None
    assert found.remedies is None
    assert found.left_out == ("runs with the kept layers in float32", "remedies")


def test_what_a_streamed_audit_cannot_do_is_refused(tmp_path):
    folder = saved(tmp_path / "model", "olmoe", vocab_size=512)
    with pytest.raises(ParameterError, match="leave out budget_minutes"):
        audit(folder, stream=True, budget_minutes=5.0, **SMALL)
    with pytest.raises(ParameterError, match="remedies need the whole model"):
        audit(folder, stream=True, remedies=["router int4"], **SMALL)


def test_hidden_states_that_do_not_fit_are_refused_before_any_work(tmp_path):
    loaded = load_model(saved(tmp_path / "model", "olmoe", vocab_size=512), stream=True)
    check_room(loaded.stream, tokens=100, passes=17, memory=None)
    with pytest.raises(ParameterError, match=r"take fewer --tokens, or perturbations"):
        check_room(loaded.stream, tokens=10**9, passes=17, memory=None)
    with pytest.raises(ParameterError, match=r"4.35 GB beside 0.00 GB of weights"):
        check_room(loaded.stream, tokens=10**6, passes=17, memory=4 * 10**9)
