"""Names, refusals, and noise that is the same whenever a place is visited."""

import pytest
import torch

from tieline.analysis.perturbations import Perturbation, noise_generator, standard_perturbations
from tieline.core.errors import ParameterError
from tieline.models.emulate import FORMATS, OF_ROUTERS


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
    one, two = Perturbation("rounding", "int8"), Perturbation("rounding", "int8", "model")
    assert one.at_router == two.at_router == one != two


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("rounding", "int3"), "unknown format 'int3'"),
        (("score noise", -0.1), "level > 0"),
        (("state noise", "bf16"), "level > 0"),
        (("score noise", float("inf")), "level > 0"),
        (("score noise", 0.1, "model"), "routers alone"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, words):
    with pytest.raises(ParameterError, match=words):
        Perturbation(*arguments)


def test_noise_depends_on_seed_and_place_alone():
    def drawn(*places):
        return torch.randn(3, generator=noise_generator(*places)).tolist()

    assert drawn(0, 1, 2) == drawn(0, 1, 2)
    assert len({tuple(drawn(*p)) for p in [(0, 1, 2), (0, 2, 1), (1, 1, 2), (0, 1)]}) == 4
