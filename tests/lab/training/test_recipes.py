"""The registry of recipes, and records that do not change."""

import dataclasses
import json

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.training.config import GATE_NAMES, GateConfig, OptimConfig, gate_config
from tieline.lab.training.recipes import RECIPES, recipe_config, recipe_list
from tieline.lab.training.training_run import TASKS, task_of


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_a_whole_config_under_its_own_name(name):
    config = recipe_config(name, seed=3)
    assert config.recipe == name
    assert config.seed == 3
    assert config.task in TASKS
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_the_papers_form_is_that_of_the_paper():
    config = recipe_config("wikitext-paper-smooth50")
    assert (config.model.layers, config.model.d_model, config.model.context) == (6, 352, 1024)
    assert (config.optim.batch, config.optim.rate, config.optim.warmup) == (48, 7e-4, 4000)
    assert config.losses.balance == 0.01
    assert config.gate.gate_options == {"b": 50.0}
    larger = recipe_config("enwik8-paper-smoe").model
    assert (larger.layers, larger.d_model, larger.context) == (8, 352, 2048)


def test_the_small_setup_of_paper_two_has_its_sizes():
    config = recipe_config("enwik8-paper2-small-perturbed")
    shape = config.model
    experts = shape.layers * shape.n_experts * 3 * shape.d_model * shape.d_hidden
    attention = shape.layers * 4 * shape.d_model**2
    total = experts + attention + shape.vocabulary * shape.d_model
    assert total == pytest.approx(15e6, rel=0.01)
    assert (shape.layers, shape.n_experts, config.gate.k) == (6, 16, 2)
    assert (config.optim.steps, config.gate.router_options["d_proj"]) == (60_000, 8)


def test_the_model_of_the_small_setup_of_paper_two_runs():
    config = recipe_config("text8-paper2-small-perturbed").replace(model__layers=1)
    model = task_of(config).model(config)
    ids = torch.randint(config.model.vocabulary, (1, 8), generator=torch.Generator().manual_seed(0))
    assert model(input_ids=ids).logits.shape == (1, 8, config.model.vocabulary)


def test_heads_of_an_odd_width_are_refused():
    with pytest.raises(TielineError, match="8 heads of a width of 216 have no even width"):
        recipe_config("enwik8-paper2-small-smoe").replace(model__heads=8)


def test_eleven_gates_are_compared():
    assert len(GATE_NAMES) == 11
    assert gate_config("top3").k == 3
    assert gate_config("smooth1", k=4).k == 4
    with pytest.raises(TielineError, match="'hard' is not one of"):
        gate_config("hard")


def test_no_name_is_taken_twice():
    language, images, sentences = (
        11 * (2 + 3 + 3 + 1 + 1 + 3) + 3 + 4 + 4 + 3 * 3,
        2 * 3 + 3 * 7 * 4,
        3 * 3 * 3,
    )
    assert len(RECIPES) == language + images + sentences


def test_every_recipe_says_what_it_is():
    listed = recipe_list().recipes
    assert list(listed) == list(RECIPES)
    assert all(listed.values())


def test_unknown_names_get_a_hint():
    with pytest.raises(TielineError, match="did you mean enwik8-small-smoe"):
        recipe_config("enwik8-small-smo")
    with pytest.raises(TielineError, match="--list` shows all"):
        recipe_config("zzzz")
    with pytest.raises(TielineError, match="'nothing' is not one of"):
        task_of(recipe_config("enwik8-small-smoe").replace(task="nothing"))


def test_a_config_changes_only_by_replacement():
    config = recipe_config("enwik8-small-smoe")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 4
    changed = config.replace(seed=5, optim__steps=7, model__layers=3)
    assert (changed.seed, changed.optim.steps, changed.model.layers) == (5, 7, 3)
    assert config.optim.steps != 7


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimConfig(steps=0, batch=1), "one step"),
        (lambda: OptimConfig(steps=1, batch=3, accumulate=2), "does not divide into 2"),
        (lambda: GateConfig(name="x", k=0), "k >= 1"),
        (lambda: GateConfig(name="x", anneal=(0.8, 0.5)), "hold <= until"),
        (lambda: GateConfig(name="x", dense_share=1.0), "dense_share"),
    ],
)
def test_fields_out_of_range_are_refused(make, message):
    with pytest.raises(TielineError, match=message):
        make()
