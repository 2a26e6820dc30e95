"""The published settings have the papers' constants; the small designs are well conditioned."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.estimation.identifiability import information, null_dimension
from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.rate_plan import (
    GOOD_CONDITION,
    SETTINGS,
    _draw_truth,
    setting,
    small_design,
    truth_has_kinks_inside,
    well_conditioned,
)


def test_there_are_sixteen_settings_with_the_printed_slopes():
    slopes = [study_setting.published_slope for study_setting in SETTINGS.values()]
    paper2 = [-0.11, -0.5, -0.05, -0.47, -0.1, -0.45, -0.13, -0.47]
    assert slopes == [*paper2, -0.24, -0.51, -0.07, -0.46, -0.54, -0.07, -0.53, -0.44]
    assert all(name == study_setting.name for name, study_setting in SETTINGS.items())


@pytest.mark.parametrize("name", SETTINGS)
def test_truths_have_the_laws_of_the_appendices(name):
    study_setting = setting(name)
    truth = study_setting.draw_truth(seed=1)
    study_setting.truth.check(truth)
    d = study_setting.truth.d
    assert (d, study_setting.truth.n_experts) == ((32, 8) if study_setting.paper == 2 else (8, 8))
    live = 8 - study_setting.zero_rows
    assert not truth.router[live:].any()
    assert not truth.bias[live:].any()
    variance = 0.01 / d if study_setting.paper == 2 else 1 / d
    assert truth.router[:live].square().mean().item() == pytest.approx(variance, rel=0.35)
    assert truth.experts.square().mean().item() == pytest.approx(1 / d, rel=0.45)
    assert torch.equal(truth.flatten(), study_setting.draw_truth(seed=1).flatten())
    assert study_setting.noise**2 == pytest.approx(0.01)


def test_regimes_follow_from_truth_and_fit():
    regimes = {name: study_setting.regime for name, study_setting in SETTINGS.items()}
    assert regimes["p2-1a-cosine"] == regimes["p2-2b-linear"] == "exact"
    assert regimes["p2-1b-perturbed"] == regimes["p4-2a-relu"] == regimes["p4-1a-softmax"] == "over"
    assert regimes["p2-2a-cosine"] == regimes["p4-1b-sigmoid"] == "misspecified"
    assert regimes["p4-2b-linear"] == "misspecified"
    assert setting("p2-1b-cosine").fitted.n_experts == 9


def test_an_unknown_setting_is_refused_with_the_known_ones():
    with pytest.raises(TielineError, match="p2-1a-cosine"):
        setting("p3-1a")


@pytest.mark.parametrize(
    ("paper", "gate", "link"),
    [(2, "perturbed", None), (2, "cosine", None), (4, "quadratic", "sigmoid")],
)
def test_small_designs_are_well_conditioned_and_cut_the_cube(paper, gate, link):
    design = small_design(paper, gate, link=link, draws=30)
    fisher_information = information(design.model, design.truth, n=4000, seed=5)
    assert fisher_information.nullity == null_dimension(design.model)
    assert design.condition == pytest.approx(fisher_information.condition, rel=0.6)
    assert truth_has_kinks_inside(design.model, design.truth).all()
    first = small_design(paper, gate, link=link, draws=5)
    assert design.condition <= max(first.condition, GOOD_CONDITION)
    assert 28 <= design.model.n_parameters <= 32


def test_a_truth_is_walked_until_its_condition_is_enough_and_no_further():
    model = MoEModel("perturbed", "sigmoid", "relu", 2, 2)
    design = well_conditioned(model, seed=0, draws=3)
    drawn = information(model, _draw_truth(model, 0, design.draw), n=1000)
    assert design.steps > 0
    assert design.condition <= GOOD_CONDITION < drawn.condition
    assert design.condition == information(model, design.truth, n=1000).condition
    assert truth_has_kinks_inside(model, design.truth).all()


def test_a_truth_that_is_well_conditioned_stays_as_it_was_drawn():
    model = MoEModel("linear", "softmax", "tanh", 2, 2)
    design = well_conditioned(model, draws=3)
    assert design.steps == 0
    assert torch.equal(design.truth.flatten(), _draw_truth(model, 0, design.draw).flatten())
