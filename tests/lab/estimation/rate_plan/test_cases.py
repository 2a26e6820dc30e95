"""Settings as plans."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.estimation.fit import lift_truth
from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.rate_plan import (
    SETTINGS,
    case_from,
    case_of,
    describe_settings,
    named_case,
)


def test_every_published_setting_is_described():
    descriptions = describe_settings()
    assert set(SETTINGS) < set(descriptions)
    assert len(SETTINGS) == 16
    assert (
        "cosine softmax, relu experts, 9 for 8, over, slope -0.05" in descriptions["p2-1b-cosine"]
    )


@pytest.mark.parametrize("name", ["p2-1a-cosine", "p2-1b-perturbed", "p4-2a-relu"])
def test_a_published_setting_has_the_paper_s_grid_and_truth(name):
    case = named_case(name, seed=3)
    plan, setting = case.plan, SETTINGS[name]
    assert (plan.sizes[0], plan.sizes[-1], len(plan.sizes)) == (1000, 100_000, 7)
    assert (plan.repetitions, plan.noise, plan.loss) == (20, 0.1, setting.loss)
    assert case.paper_slope == setting.published_slope
    assert plan.reference is plan.truth
    torch.testing.assert_close(plan.truth.flatten(), setting.draw_truth(3).flatten())
    assert plan.centre.n_experts == setting.fitted.n_experts
    assert named_case(name, repetitions=4, sizes=(10, 20)).plan.repetitions == 4


def test_small_designs_are_named_by_their_parts():
    case = named_case("small-partial-sigmoid-relu", repetitions=5, draws=40)
    model = case.plan.model
    assert (model.gate, model.link, model.expert, model.d) == ("partial", "sigmoid", "relu", 2)
    assert (case.plan.loss, case.plan.paper, case.plan.noise) == ("L5", 4, 0.01)
    assert case.paper_slope is None


def test_a_free_combination_may_have_more_experts_than_the_truth():
    case = case_of(gate="quadratic", link="sigmoid", d=1, n_experts=2, fitted=3, draws=20)
    assert (case.plan.model.n_experts, case.plan.truth.n_experts) == (3, 2)
    assert (case.plan.loss, case.plan.paper) == ("L1", 4)
    same = lift_truth(case.plan.model, case.plan.truth)
    torch.testing.assert_close(case.plan.centre.flatten(), same.flatten())
    with pytest.raises(TielineError, match="at least the 2 true experts: 1"):
        case_of(d=1, n_experts=2, fitted=1)


def test_plans_settings_models_and_names_all_name_a_study():
    plan = named_case("p2-1a-cosine").plan
    assert case_from(plan, repetitions=7).plan.repetitions == 7
    assert case_from(SETTINGS["p2-1a-cosine"], seed=2).plan.seed == 2
    assert case_from("p2-1a-cosine").plan.key == plan.key
    model = MoEModel("linear", "softmax", "polynomial", d=1, n_experts=2, power=3)
    model_plan = case_from(model, draws=5, fitted=3).plan
    assert (model_plan.source, model_plan.model) == (model, model.with_experts(3))


@pytest.mark.parametrize(
    "name", ["p9-1a", "small-linear", "small-linear-softmax-magic", "tiny-a-b-c"]
)
@pytest.mark.usefixtures("no_axis_checks")
def test_unknown_names_are_refused(name):
    with pytest.raises(TielineError, match=r"unknown setting|must be one of"):
        named_case(name)


@pytest.mark.slow
def test_a_misspecified_setting_is_compared_with_its_population_minimiser():
    case = named_case("p2-2a-perturbed", sizes=(1000,), repetitions=2)
    assert case.plan.reference is not case.plan.truth
    assert case.misfit > 0
