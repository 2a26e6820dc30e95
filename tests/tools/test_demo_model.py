"""The program that makes the demo model: its text, its schedule, and runs that were cut off."""

import hashlib
import json
import math
import platform

import pytest
import torch

from tieline.core.errors import ParameterError
from tieline.models.demo import DEMO_FOLDER, demo_text
from tools.demo_model import training
from tools.demo_model.corpus import HELD_OUT, held_out_text, training_documents
from tools.demo_model.recipe import FAMILIES, Recipe, build_model, train_tokenizer

pytestmark = pytest.mark.usefixtures("single_thread")

TINY = Recipe(
    steps=6, vocabulary=300, width=16, layers=2, heads=2, experts=4, expert_width=8, context=8,
    batch=2, warmup=2, evaluations=2,
)  # fmt: skip


LOG = json.loads((DEMO_FOLDER / "training.json").read_bytes())


def same_python():
    return platform.python_version() == LOG["versions"]["python"]


needs_same_python = pytest.mark.skipif(
    not same_python(), reason="the text of another Python differs from the one trained on"
)


@pytest.fixture(scope="module")
def documents():
    return training_documents()


@needs_same_python
def test_held_out_text_of_the_same_python_is_the_demo_one():
    assert held_out_text() == demo_text()


@pytest.mark.slow
@needs_same_python
def test_training_text_of_the_same_python_is_that_of_the_log(documents):
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    assert digest == LOG["sha256"]["training"]


@pytest.mark.slow
@needs_same_python
def test_no_paragraph_is_both_trained_on_and_held_out(documents):
    paragraphs = [
        {" ".join(p.split()) for p in text.split("\n\n")}
        for text in (demo_text(), "\n\n".join(documents))
    ]
    assert paragraphs[0].isdisjoint(paragraphs[1])
    assert len(set(HELD_OUT)) == 26


def test_rate_warms_up_to_its_peak_and_falls_to_zero():
    recipe = Recipe()
    rates = [recipe.rate(step) for step in range(recipe.steps + 1)]
    assert rates[recipe.warmup - 1] == rates[recipe.warmup] == recipe.peak_rate == max(rates)
    assert rates[: recipe.warmup] == sorted(rates[: recipe.warmup])
    assert rates[recipe.warmup :] == sorted(rates[recipe.warmup :], reverse=True)
    assert rates[-1] == 0


def streams():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(300, (200,), generator=generator), torch.randint(300, (40,))


def trained(path, recipe=TINY):
    model = build_model(recipe)
    stream, held_out = streams()
    return model, training.train(model, stream, held_out, recipe, path / "checkpoint.safetensors")


def test_interrupted_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path, monkeypatch):
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    uninterrupted, state = trained(tmp_path / "whole")
    update = training._update

    def cut_off_at_step_4(model, optimizer, stream, recipe, step):
        if step == 4:
            raise KeyboardInterrupt
        return update(model, optimizer, stream, recipe, step)

    monkeypatch.setattr(training, "_update", cut_off_at_step_4)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "cut")
    monkeypatch.undo()
    resumed, resumed_state = trained(tmp_path / "cut")
    for a, b in zip(uninterrupted.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    losses = [[p["training_loss"] for p in s["curve"]] for s in (state, resumed_state)]
    assert losses[0] == losses[1]
    assert [point["step"] for point in resumed_state["curve"]] == [3, 6]


def test_checkpoint_of_another_recipe_is_refused(tmp_path):
    trained(tmp_path)
    with pytest.raises(ParameterError, match="continues the recipe"):
        trained(tmp_path, Recipe(**{**vars(TINY), "seed": 1}))


def test_validation_counts_every_choice_of_the_whole_windows():
    load = training.validate(build_model(TINY), torch.arange(40), TINY)[1]
    assert load.sum(dim=-1).tolist() == [4 * 8 * 2] * 2  # 4 windows of 8 predictions, top-2


@pytest.mark.parametrize("family", list(FAMILIES))
def test_every_family_trains_and_tells_what_its_routers_chose(family):
    recipe = Recipe(**{**vars(TINY), "family": family})
    model = build_model(recipe)
    assert model.config.model_type == family
    before = [p.detach().clone() for p in model.parameters()]
    training._update(model, training._optimizer(model, recipe), streams()[0], recipe, 0)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    load = training.validate(model, torch.arange(40), recipe)[1]
    assert load.sum(dim=-1).tolist() == [4 * 8 * 2] * 2


def test_an_unknown_family_is_refused_with_the_known_ones():
    with pytest.raises(ParameterError, match="no family 'bert' here; known: olmoe, mixtral"):
        build_model(Recipe(family="bert"))


def test_untrained_loss_is_near_that_of_a_uniform_guess():
    losses, _ = training.validate(build_model(TINY), torch.arange(40), TINY)
    assert losses.tolist() == pytest.approx([math.log(300)] * 4, rel=0.05)


def test_tokenizer_covers_bytes_it_never_saw():
    tokenizer = train_tokenizer(["plain words " * 9], 300)
    text = "é\x00\U0001f600 <|endoftext|>  two  spaces ."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
