"""Two models on the same tokens: expert implementations, emulated bf16, predictions."""

import copy
import dataclasses

import pytest
import torch

from tests.analysis import zoo
from tests.analysis.zoo import Letters, random_text
from tests.models.tiny import batch, lively, tiny_model
from tests.tiers import pair_tiers, tiers
from tieline.analysis.compared_sides import ModelSide, trace_model
from tieline.analysis.diff import diff, diff_models
from tieline.analysis.served_precision import recommend
from tieline.analysis.token_distances import before_flips, token_distances
from tieline.core.errors import ParameterError, TielineError, TraceError, UnsupportedModelError
from tieline.models.experts import use_experts
from tieline.models.model import Model
from tieline.report.words.served_precision import serving_advice
from tieline.trace import select_tokens
from tieline.trace.record import identical_values
from tieline.trace.selection import token_sequences

FAMILIES = tiers(zoo.FAMILIES, always=("mixtral", "gpt_oss", "deepseek_v3"))
"""One of each kind of scoring always; the others take the softmax of all scores as Mixtral does."""


def two(family):
    model = lively(tiny_model(family))
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_and_grouped_mm_differ_by_rounding_alone(family):
    a, b = two(family)
    use_experts(a, "eager")
    use_experts(b, "grouped_mm")
    comparison = diff_models(ModelSide(a), ModelSide(b), list(batch(6, 32)), batch_size=4)
    sides = [comparison.provenance[side]["experts_implementation"] for side in "ab"]
    assert sides == ["eager", "grouped_mm"]
    assert comparison.metrics["unexplained:count"] == 0
    assert (comparison.causes.alarm, comparison.causes.expected) == (False, "fp32")
    assert comparison.metrics["flip"] <= 0.01
    assert comparison.logits.kl < 1e-10
    assert all(layer.attribution.noise < 1e-5 for layer in comparison.layers)


@pytest.mark.parametrize("family", FAMILIES)
def test_emulated_bf16_flips_near_ties(family):
    a, b = two(family)
    comparison = diff_models(ModelSide(a), ModelSide(b, "bf16"), list(batch(6, 32)), batch_size=4)
    assert comparison.alignment.differences == ()
    assert comparison.alignment.tokens == comparison.alignment.ids_checked == 192
    assert all(1e-5 < layer.attribution.noise < 0.1 for layer in comparison.layers)
    assert comparison.metrics["flip"] < 0.2
    assert 0 < comparison.logits.kl < 0.01
    assert comparison.provenance["b"]["emulated"] == "bf16"
    assert not comparison.causes.alarm
    assert comparison.causes.expected == "bf16"
    first = comparison.layers[0]
    assert first.attribution.explained + first.attribution.unexplained == first.flip.count


def test_distances_match_their_definitions():
    torch.manual_seed(0)
    a, b = torch.randn(2, 2, 5, 7).unbind(0)
    ids = torch.randint(0, 7, (2, 5))
    distances = token_distances(a, b, ids)
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    kl = (p * (p / q).log()).sum(-1)
    ratio = (q / p)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    kl, ratio = kl.cpu(), ratio.cpu()
    kept = ~distances.kl.isnan()
    assert kept.reshape(2, 5).tolist() == [[True] * 4 + [False]] * 2
    torch.testing.assert_close(distances.kl[kept], kl[:, :-1].flatten())
    torch.testing.assert_close(distances.k3[kept], (ratio - 1 - ratio.log()).flatten())
    loss = torch.nn.functional.cross_entropy(a[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten())
    torch.testing.assert_close(distances.loss_a[kept].mean(), loss.cpu())


def test_the_k3_of_tokens_drawn_from_a_averages_to_the_divergence():
    torch.manual_seed(1)
    a, b = torch.randn(2, 1, 1, 6).expand(2, 1, 4001, 6).unbind(0)
    ids = torch.multinomial(a[0, 0].softmax(0), 4001, replacement=True)[None]
    distances = token_distances(a, b, ids)
    assert distances.k3.nanmean().item() == pytest.approx(distances.kl[0].item(), rel=0.1)


def test_the_traces_of_a_comparison_are_those_of_each_model_alone():
    a, b = two("olmoe")
    sequences = list(batch(5, 16))
    comparison = diff_models(ModelSide(a), ModelSide(b, "bf16"), sequences, batch_size=2)
    for side, trace in (
        (ModelSide(a), comparison.traces[0]),
        (ModelSide(b, "bf16"), comparison.traces[1]),
    ):
        alone = trace_model(side, sequences, batch_size=2)
        assert identical_values(trace.layers[1].experts, alone.layers[1].experts)
        assert trace.documents.unique().tolist() == [0, 1, 2, 3, 4]
    assert (
        diff(comparison.traces[0], comparison.traces[1]).metrics["flip"]
        == comparison.metrics["flip"]
    )


def test_a_trace_gives_its_sequences_back_and_its_numbers_to_the_model():
    a, _ = two("olmoe")
    sequences = list(batch(3, 10))
    trace = trace_model(ModelSide(a), sequences, documents=[7, 4, 9])
    back, numbers = token_sequences(trace)
    assert numbers == [4, 7, 9]
    assert [x.tolist() for x in back] == [sequences[i].tolist() for i in (1, 0, 2)]
    again = trace_model(ModelSide(a), back, documents=numbers)
    assert diff(trace, again).tokens.anywhere.count == 0
    rows = torch.arange(trace.n_tokens, device=trace.tokens.device)
    with pytest.raises(TraceError, match="document 7 of the trace has no token at position 3"):
        token_sequences(select_tokens(trace, rows != 3))


def test_a_token_id_beyond_the_vocabulary_is_named():
    a, _ = two("olmoe")
    trace = trace_model(ModelSide(a), list(batch(2, 10)))
    other = dataclasses.replace(trace, tokens=trace.tokens + 1000)
    with pytest.raises(TraceError, match=r"is not one of the model's .* another tokenizer"):
        diff((a, None), other)


SMALL_TEXT = {"text": random_text(192), "sequence_length": 48, "batch_size": 2}


@pytest.mark.parametrize("family", FAMILIES)
def test_one_object_on_both_sides_is_as_good_as_a_copy(family):
    model, copied = two(family)
    run = {**SMALL_TEXT, "dtype_b": "bf16-emulated", "replay": True}
    alone = diff((model, Letters()), (model, Letters()), **run)
    beside = diff((model, Letters()), (copied, Letters()), **run)
    assert alone.metrics == beside.metrics
    assert alone.metrics["kl"] > 0
    assert alone.verdict == beside.verdict


def test_one_object_computes_with_two_implementations_of_its_experts():
    source = (lively(tiny_model("olmoe")), Letters())
    result = diff(source, source, experts_impl_a="eager", experts_impl_b="grouped_mm", **SMALL_TEXT)
    sides = [result.provenance[side]["experts_implementation"] for side in "ab"]
    assert sides == ["eager", "grouped_mm"]


def test_one_streamed_model_cannot_be_both_sides():
    model = Model.open("demo", stream=True, dtype="fp32")  # as every CPU computes
    with pytest.raises(ParameterError, match="A and B are one model that is streamed"):
        diff(model, model, tokens=64)


def test_unknown_experts_are_refused():
    a, _ = two("olmoe")
    with pytest.raises(ParameterError, match="experts implementation 'magic'"):
        use_experts(a, "magic")
    with pytest.raises(UnsupportedModelError, match="cannot be set"):
        use_experts(torch.nn.Linear(2, 2), "eager")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_emulation_has_the_noise_of_native_bf16(family):
    """The record's own arithmetic stays out of the emulated format."""
    a, b = two(family)
    sequences, native = list(batch(6, 32)), copy.deepcopy(a).bfloat16()
    emulated = diff_models(ModelSide(a), ModelSide(b, "bf16"), sequences)
    real = diff_models(ModelSide(a), ModelSide(native), sequences)
    for layer, other in zip(emulated.layers, real.layers, strict=True):
        assert layer.attribution.noise == pytest.approx(other.attribution.noise, rel=0.15)
    assert emulated.logits.kl == pytest.approx(real.logits.kl, rel=0.5)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_a_served_precision_beside_float32_is_what_inspect_reports(family):
    a, b = two(family)
    result = diff_models(ModelSide(a), ModelSide(b, "bf16"), list(batch(6, 32)), batch_size=4)
    serving = result.serving
    assert (serving.precision, serving.tokens, serving.sequences) == ("bf16", 192, 6)
    assert serving.changed.value == result.tokens.anywhere.value
    assert serving.kl.value == result.logits.kl
    assert serving.loss.value == result.logits.loss_b - result.logits.loss_a
    assert serving.replayed.value is None
    assert result.recommendation == recommend(serving)
    assert result.verdict.endswith(serving_advice(serving, result.recommendation))
    reverse = diff_models(
        ModelSide(b, "bf16"), ModelSide(a), list(batch(6, 32)), batch_size=4
    ).serving
    assert reverse.loss.value == pytest.approx(serving.loss.value)
    assert reverse.changed == serving.changed


def test_nothing_is_served_where_no_side_or_both_are_float32_or_a_part_is_rounded():
    a, b = two("mixtral")
    for sides in ((ModelSide(a), ModelSide(b)), (ModelSide(a, "bf16"), ModelSide(b, "bf16"))):
        assert diff_models(*sides, list(batch(2, 16))).serving is None
    result = diff_models(ModelSide(a), ModelSide(b, "bf16", "router"), list(batch(2, 16)))
    assert (result.serving, result.recommendation) == (None, None)


OUTPUT_FAULTS = {
    "head": lambda model: model.lm_head.weight.mul_(3),
    "final norm": lambda model: model.model.norm.weight.mul_(2),
    "last experts": lambda model: model.model.layers[-1].mlp.experts.down_proj.mul_(-3),
}


OUTPUT_FAMILIES = ("mixtral", "deepseek_v3", "qwen2_moe")
FAULTS_AND_FORMATS = [(fault, name) for fault in OUTPUT_FAULTS for name in (None, "bf16", "int8")]


@pytest.mark.parametrize(
    ("family", "planted"),
    pair_tiers(
        OUTPUT_FAMILIES,
        FAULTS_AND_FORMATS,
        # every fault in every format once, and every family with each fault and each format
        always={
            (OUTPUT_FAMILIES[(number + number // 3) % 3], planted)
            for number, planted in enumerate(FAULTS_AND_FORMATS)
        },
    ),
)
def test_equal_routes_with_other_outputs_are_an_alarm(family, planted):
    fault, name = planted
    a, b = two(family)
    with torch.no_grad():
        OUTPUT_FAULTS[fault](b)
    result = diff_models(ModelSide(a), ModelSide(b, name), list(batch(6, 32)), batch_size=4)
    assert result.causes.conclusion == "outputs differ"
    assert result.causes.alarm
    assert "look at experts, norms or the head" in result.verdict
    assert any(x.kind == "outputs" for x in result.observations)


@pytest.mark.parametrize(
    ("family", "name"),
    pair_tiers(
        OUTPUT_FAMILIES,
        (None, "bf16", "int8", "int4_group", "fp8_e4m3"),
        always={
            *(("mixtral", None), ("mixtral", "int4_group"), ("deepseek_v3", "bf16")),
            *(("deepseek_v3", "int8"), ("qwen2_moe", "fp8_e4m3"), ("qwen2_moe", "bf16")),
        },
    ),
)
def test_outputs_of_sound_formats_are_no_alarm(family, name):
    a, b = two(family)
    use_experts(b, "grouped_mm")
    result = diff_models(ModelSide(a), ModelSide(b, name), list(batch(6, 32)), batch_size=4)
    assert result.causes.outputs.answer == "yes"
    assert not result.causes.alarm


def test_logits_that_are_not_finite_name_the_side_and_the_weight():
    a, b = two("mixtral")
    with torch.no_grad():
        b.model.layers[1].mlp.experts.down_proj[0] = torch.nan
    with pytest.raises(TielineError, match=r"logits of B .*'model.layers.1.mlp.experts.down_proj'"):
        diff_models(ModelSide(a), ModelSide(b), list(batch(6, 32)), batch_size=4)
    a, b = two("mixtral")
    with torch.no_grad():
        a.lm_head.weight[5, 3] = torch.inf
    with pytest.raises(TielineError, match=r"logits of A are NaN or infinite .*'lm_head.weight'"):
        diff_models(ModelSide(a), ModelSide(b), list(batch(6, 32)), batch_size=4)


def test_a_token_that_both_exclude_from_the_vocabulary_costs_nothing():
    torch.manual_seed(0)
    a, b = torch.randn(2, 2, 5, 7).unbind(0)
    ids = torch.randint(0, 6, (2, 5))
    plain = token_distances(a[..., :6], b[..., :6], ids)
    a[..., 6] = b[..., 6] = -torch.inf
    torch.testing.assert_close(token_distances(a, b, ids), plain, equal_nan=True)


def test_tokens_before_the_first_flip_of_their_document():
    documents = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    flipped = torch.tensor([0, 1, 0, 0, 0, 1, 0, 0], dtype=torch.bool)
    assert before_flips(flipped, documents).tolist() == [1, 0, 0, 1, 1, 0, 0, 0]
