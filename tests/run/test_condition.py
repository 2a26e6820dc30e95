"""Names, refusals, and noise that depends on seed and coordinates alone."""

from dataclasses import replace

import pytest
import torch

from tests.models.tiny import batch, lively, tiny_model
from tieline.core.errors import ParameterError
from tieline.models import smooth_
from tieline.models.emulate import modular_routers
from tieline.models.number_formats import FORMATS, OF_ROUTERS
from tieline.run.condition import (
    Condition,
    Perturbation,
    applied,
    noise_generator,
    rounding_noise,
    standard_perturbations,
)
from tieline.run.forward import forward, only_running


def test_the_standard_ones_are_every_format_and_noise_of_routers_and_model():
    rows = standard_perturbations()
    names = [row.name for row in rows]
    assert len(set(names)) == len(names) == 2 * len(FORMATS) - len(OF_ROUTERS) + 3 + 2 + 2
    assert {f"{part} {name}" for part in ("router", "model") for name in FORMATS} - {
        f"model {name}" for name in OF_ROUTERS
    } <= set(names)
    assert "score noise 0.01" in names
    assert "model state noise 0.01" in names
    assert [row.name for row in standard_perturbations(["bf16"], [], [])] == [
        "router bf16",
        "model bf16",
    ]


def test_what_a_router_does_by_itself_is_the_same_for_both_parts():
    of_routers, of_model = (
        Perturbation("rounding", "int8"),
        Perturbation("rounding", "int8", "model"),
    )
    assert of_routers.at_router == of_model.at_router == of_routers != of_model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rounding", "int3"), "unknown format 'int3'"),
        (("score noise", -0.1), "level > 0"),
        (("state noise", "bf16"), "level > 0"),
        (("score noise", float("inf")), "level > 0"),
        (("score noise", 0.1, "model"), "routers alone"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ParameterError, match=message):
        Perturbation(*arguments)


def test_noise_depends_on_seed_and_place_alone():
    def drawn(*coordinates):
        return torch.randn(3, generator=noise_generator(*coordinates), device="cpu").tolist()

    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    assert len({tuple(drawn(*p)) for p in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1)]}) == 4


def test_a_second_run_differs_and_spares_what_is_kept():
    model, ids = lively(tiny_model("olmoe")), batch()
    condition = Condition(Perturbation("rounding", "int4"))
    with only_running(model):
        with applied(model, condition):
            first = forward(model, ids).logits
        with applied(model, condition.again()):
            second = forward(model, ids).logits
        with applied(model, replace(condition.again(), kept=tuple(modular_routers(model)))):
            kept = forward(model, ids).logits
        clean = forward(model, ids).logits
    assert not torch.equal(first, second)
    assert torch.equal(kept, clean)


@pytest.mark.parametrize(("name", "mantissa"), [("bf16", 8), ("fp16", 11)])
def test_noise_of_a_rounding_has_the_size_of_its_errors(name, mantissa):
    """Errors are uniform within a step of 2^(e+1-mantissa) for numbers from 2^e to 2^(e+1)."""
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(1)).double()
    steps = 2.0 ** (x.abs().log2().floor() + 1 - mantissa)
    expected = (steps.square() / 12).mean().sqrt().item()
    assert rounding_noise(name) == pytest.approx(expected, rel=0.03)


def test_conditions_are_equal_by_what_they_do():
    model = lively(tiny_model("olmoe"))
    record, wider = (smoothed(model, epsilon) for epsilon in (0.1, 0.2))
    assert Condition(smoothing=record) == Condition(smoothing=smoothed(model, 0.1))
    assert len({Condition(smoothing=record), Condition(smoothing=wider), Condition()}) == 3
    noise = Condition(Perturbation("score noise", 0.1), seed=(0, 2))
    assert noise.taking("forced").generator(3).get_state().equal(noise.generator(3).get_state())
    assert not noise.again().generator(3).get_state().equal(noise.generator(3).get_state())
    assert noise.rounded is None
    bf16 = Condition(Perturbation("rounding", "bf16", "model"), kept=("a",))
    assert bf16.rounded == ("bf16", "all", ("a",))


def smoothed(model, epsilon):
    record = smooth_(model, epsilon=epsilon)
    record.undo()
    return record
