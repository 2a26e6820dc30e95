"""The size of noise: formats by name, what is expected, and how it is judged."""

import pytest
import torch

from tieline.analysis.attribution import _excess_patterns
from tieline.analysis.excess_over_sound_runs import Excess
from tieline.analysis.noise_shapes import LoudDocument, NoiseShape, find_noise_patterns
from tieline.analysis.noise_size import (
    PRODUCT_ERRORS,
    ExpectedFormat,
    allowed_noise,
    canonical_format,
    expected_format,
    formats_with_noise,
    judge_noise_size,
    loud_document_patterns,
)
from tieline.core.errors import ParameterError
from tieline.models.number_formats import FORMATS


def test_the_table_of_rounding_errors_is_that_of_the_formats():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 2048, 128, generator=generator)
    for name, format_rule in FORMATS.items():
        square = _error(format_rule.weights, w)
        square += _error(format_rule.activations, x) if format_rule.activations else 0.0
        square *= 2 if format_rule.plain else 1
        assert PRODUCT_ERRORS[name] == pytest.approx(square**0.5, rel=0.05), name
    assert PRODUCT_ERRORS["fp32"] == pytest.approx(PRODUCT_ERRORS["bf16"] / 2**16, rel=0.05)
    assert list(PRODUCT_ERRORS.values()) == sorted(PRODUCT_ERRORS.values())


def _error(rounding, values):
    return float((rounding(values) - values).square().mean() / values.square().mean())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"model": "m", "dtype": "float32"}, {"model": "m", "dtype": "bfloat16"}, "bf16"),
        (
            {"model": "m", "dtype": "float32", "emulated": "int4 router"},
            {"model": "m", "dtype": "float32"},
            "int4",
        ),
        ({"model": "m", "dtype": "float32"}, {"model": "m", "dtype": "float32"}, "fp32"),
        ({"model": "m", "dtype": "float32"}, {"model": "n", "dtype": "float32"}, None),
        ({"dtype": "float32"}, {"dtype": "float32"}, None),
        ({"model": "m", "dtype": "float32"}, {"model": "m"}, None),
        ({"model": "m", "dtype": "float32"}, {"model": "m", "emulated": "state noise"}, None),
    ],
)
def test_what_is_expected_is_what_both_sides_recorded(a, b, expected):
    recorded_format = expected_format(None, a, b)
    assert (recorded_format and recorded_format.name) == expected
    assert expected_format("fp8", a, b) == ExpectedFormat("fp8_e4m3", "as asked")


def test_unknown_formats_are_refused_by_name():
    assert canonical_format("bf16-emulated") == canonical_format("bfloat16") == "bf16"
    assert canonical_format(torch.bfloat16) == canonical_format("BF16") == "bf16"
    with pytest.raises(ParameterError, match="expect: no format 'int3'"):
        canonical_format("int3")


def test_noise_within_the_format_is_expected_and_noise_beyond_it_names_the_first_layer():
    sound = [NoiseShape("x", 0.005, 900), NoiseShape("y", 0.02, 900)]
    loud = [NoiseShape("x", 0.005, 900), NoiseShape("y", 0.3, 900), NoiseShape("z", 0.9, 900)]
    bf16 = ExpectedFormat("bf16", "as asked")
    assert judge_noise_size(sound, bf16).answer == "yes"
    judgement = judge_noise_size(loud, bf16)
    assert judgement.answer == "no"
    assert (judgement.judged, judgement.noise) == ("y", 0.3)
    assert judgement.allowed == pytest.approx(5 * 0.005)
    assert judge_noise_size(sound, ExpectedFormat("fp32", "as asked")).answer == "no"
    unknown = judge_noise_size(loud, None)
    assert unknown.answer == "cannot tell"
    assert unknown.kind == "not stated"


def test_a_reference_run_decides_where_there_is_one():
    shapes = [
        NoiseShape("x", 0.5, 900, reference_ratio=1.1),
        NoiseShape("y", 0.001, 900, reference_ratio=1.9),
    ]
    judgement = judge_noise_size(shapes, ExpectedFormat("bf16", "as asked"))
    assert judgement.answer == "no"
    assert (judgement.kind, judgement.judged, judgement.ratio) == ("reference", "y", 1.9)
    assert judge_noise_size(shapes[:1], ExpectedFormat("bf16", "as asked")).answer == "yes"


@pytest.mark.parametrize(("ratio", "answer"), [(1.2, "yes"), (3.0, "no")])
def test_a_late_layer_without_excess_is_judged_by_format_and_references_together(ratio, answer):
    first = NoiseShape("x", 0.004, 900, reference_ratio=0.9)
    shapes = [first, NoiseShape("y", 0.5, 30, reference_ratio=ratio)]
    size = judge_noise_size(shapes, ExpectedFormat("bf16", "as asked"), excess=())
    assert (size.answer, size.kind) == (answer, "reference")
    assert size.judged == ("y" if answer == "no" else "")
    quieter = [first, NoiseShape("y", 0.015, 30, reference_ratio=ratio)]
    assert judge_noise_size(quieter, ExpectedFormat("bf16", "as asked"), excess=()).answer == "yes"


@pytest.mark.parametrize(("rise", "kinds"), [((7.0, 0.3), ["positions"]), ((2.0, 0.3), [])])
def test_an_excess_of_all_tokens_is_named_where_it_grows_along_positions(rise, kinds):
    shapes = [NoiseShape("x", 0.05, 900, rise=rise), NoiseShape("y", 0.1, 900)]
    patterns = _excess_patterns(shapes, [Excess(0, "all", None, 20.0, 90.0, 6.0)])
    assert [pattern.kind for pattern in patterns] == kinds


def test_what_is_missing_or_silent_is_said():
    bf16 = ExpectedFormat("bf16", "as asked")
    assert judge_noise_size([NoiseShape("x", None, 0)], bf16).answer == "cannot tell"
    assert judge_noise_size([NoiseShape("x", 0.0, 900)], bf16).answer == "yes"
    assert formats_with_noise(1e-8) == ("fp32",)
    assert formats_with_noise(0.005) == ("bf16", "int8")
    assert formats_with_noise(5.0) == ("more",)
    assert formats_with_noise(5e-5) == ("less",)
    assert allowed_noise("bf16", 9) == 16 * allowed_noise("bf16", 0)


def test_a_layer_after_others_that_were_not_compared_is_judged_as_a_later_one():
    bf16, shapes = ExpectedFormat("bf16", "as asked"), [NoiseShape("x", 0.06, 900)]
    assert judge_noise_size(shapes, bf16).answer == "no"
    assert judge_noise_size(shapes, bf16, layers_before=1).answer == "yes"
    ids = [NoiseShape("x", None, 0, flips=0.5, total=900)]
    assert judge_noise_size(ids, bf16).answer == "no"
    assert judge_noise_size(ids, bf16, layers_before=1).answer == "cannot tell"
    grown = [NoiseShape("x", 0.06, 900, rise=(7.0, 0.3))]
    assert [x.kind for x in find_noise_patterns(grown)] == ["positions"]
    assert find_noise_patterns(grown, layers_before=1) == ()


@pytest.mark.parametrize(("later", "answer"), [(0.012, "yes"), (0.03, "no")])
def test_noise_in_16_bits_grows_at_most_five_fold_over_the_layers_before(later, answer):
    shapes = [NoiseShape(name, noise, 500) for name, noise in (("a", 0.003), ("b", later))]
    size = judge_noise_size(shapes, ExpectedFormat("bf16", "as asked"))
    assert size.answer == answer
    assert (
        judge_noise_size(shapes, ExpectedFormat("int8", "as asked")).answer == "yes"
    )  # a layer may be apart


def test_few_loud_tokens_of_a_layer_may_make_all_of_the_next_loud():
    expected = ExpectedFormat("bf16", "as asked")
    for mean, answer in ((0.006, "no"), (0.02, "yes")):
        first = NoiseShape("0", 0.005, 500, total=500, mean=mean)
        later = NoiseShape("1", 0.06, 500, total=500, mean=0.07)
        assert judge_noise_size([first, later], expected).answer == answer


@pytest.mark.parametrize(
    ("document", "kinds"),
    [((3, 0.05, 8.0), ["document"]), ((3, 0.05, 3.0), []), ((3, 0.015, 8.0), [])],
)
def test_documents_louder_than_the_format_are_a_pattern_though_most_are_not(document, kinds):
    shape = NoiseShape("0", 0.005, 900, total=900, loud_document=LoudDocument(*document))
    bf16, int8 = (ExpectedFormat(name, "as asked") for name in ("bf16", "int8"))
    assert [x.kind for x in loud_document_patterns([shape], bf16)] == kinds
    for expected, before in ((int8, 0), (None, 0), (bf16, 1)):
        assert loud_document_patterns([shape], expected, before) == ()
