"""The tasks on images: splits, models, scores, and a whole run through the engine."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_outputs import ImageClassifierOutput

from tests.lab.training.real_data import shared
from tieline.core.errors import TielineError
from tieline.lab.training import image_tasks as task_images
from tieline.lab.training.config import (
    DecoderConfig,
    MixtureConfig,
    PatchConfig,
    VisionTransformerConfig,
)
from tieline.lab.training.data_files import DataError
from tieline.lab.training.image_data import DomainImages, Images
from tieline.lab.training.image_tasks import (
    DomainTask,
    MixtureClassifier,
    collect_experts_per_token,
    image_model,
    leave_out_domain,
    score_images,
)
from tieline.lab.training.recipes import (
    DOMAIN_GATES,
    DOMAINS,
    cifar10_paper,
    cifar10_small,
    domain_gate,
    pacs_paper,
    pacs_selected,
    pacs_small,
    recipe_config,
)
from tieline.lab.training.training_run import run_training
from tieline.routing import MoE
from tieline.routing.gates import expert_capacity


def domains(n=40, side=8):
    """Images of every domain; the first pixel identifies each image."""
    pixels = torch.zeros(n, side, side, 3, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.arange(n, dtype=torch.uint8)
    images = Images(pixels, torch.arange(n) % 7, tuple("abcdefg"), "made")
    return DomainImages(images, torch.arange(n) % 4, DOMAINS)


def image_numbers(images):
    return set(images.pixels[:, 0, 0, 0].tolist())


@pytest.mark.parametrize("out", DOMAINS)
def test_a_domain_is_left_out_and_the_others_are_split_without_overlap(out):
    every = domains()
    train, held, test = leave_out_domain(every, out, 0.2, seed=0)
    number = DOMAINS.index(out)
    assert image_numbers(test) == {index for index in range(40) if index % 4 == number}
    assert len(held) == 6  # a fifth of ten, three times
    assert not image_numbers(train) & image_numbers(held)
    assert image_numbers(train) | image_numbers(held) == set(range(40)) - image_numbers(test)
    assert image_numbers(leave_out_domain(every, out, 0.2, seed=0)[1]) == image_numbers(held)
    assert image_numbers(leave_out_domain(every, out, 0.2, seed=1)[1]) != image_numbers(held)


def test_unknown_domains_shares_gates_data_and_shapes_are_refused():
    with pytest.raises(TielineError, match="'attic' is not one of"):
        leave_out_domain(domains(), "attic", 0.2, 0)
    with pytest.raises(TielineError, match=r"in \(0, 1\), got 1"):
        leave_out_domain(domains(), "photo", 1.0, 0)
    with pytest.raises(TielineError, match="'softer' is not one of"):
        domain_gate("softer", TINY)
    with pytest.raises(TielineError, match="'attic'"):
        pacs_small("cosine", "attic")
    config = pacs_small("cosine", "photo")
    with pytest.raises(TielineError, match="no domains are called 'office'"):
        DomainTask().data(config.replace(data__name="office"))
    text = DecoderConfig(layers=1, d_model=8, d_hidden=8, heads=1, vocabulary=9, context=4)
    with pytest.raises(TielineError, match="DecoderConfig is no shape for images"):
        image_model(config.replace(model=text))


def test_recipes_state_the_papers_sizes():
    config = cifar10_paper("smooth50")
    assert isinstance(config.model, MixtureConfig)
    assert (config.gate.k, config.gate.gate_options["b"]) == (4, 50.0)
    assert config.optim.steps * config.optim.batch == pytest.approx(50 * 50_000, rel=1e-3)
    assert cifar10_small("smoe").model == config.model
    perturbed = pacs_small("perturbed", "sketch")
    assert perturbed.gate.router_options["tau"] == (0.1, 0.1)
    assert perturbed.gate.k == 2
    assert isinstance(perturbed.model, PatchConfig)
    assert perturbed.model.n_experts == 6


def test_soft_slots_and_expert_choice_do_the_work_of_two_experts_per_patch():
    for config, tokens in ((pacs_small, 16), (pacs_paper, 197)):
        soft, choice = config("soft", "sketch").gate, config("expert-choice", "sketch").gate
        assert soft.gate_options == {"slots": expert_capacity(tokens, 6, 2)}
        assert (choice.gate, choice.k, choice.gate_options) == ("expert_choice", 2, {})
        assert choice.router_options == config("cosine", "sketch").gate.router_options
    pixels = torch.randint(0, 256, (6, 32, 32, 3), dtype=torch.uint8)
    work = {}
    for gate in ("soft", "expert-choice", "cosine"):
        model = image_model(pacs_small(gate, "sketch"))
        with collect_experts_per_token(model) as experts:
            model(pixels)
        work[gate] = experts
    assert work == {"soft": [2.25, 2.25], "expert-choice": [2.0, 2.0], "cosine": [2.0, 2.0]}


def test_soft_slots_never_mix_images_and_expert_choice_does():
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8)
    alone = {}
    for gate in ("soft", "expert-choice"):
        model = image_model(pacs_small(gate, "sketch")).eval()
        with torch.no_grad():
            first, all_of_them = model(pixels[:1]).logits, model(pixels).logits[:1]
        alone[gate] = torch.allclose(first, all_of_them, atol=1e-5)
    assert alone == {"soft": True, "expert-choice": False}


class Batches(torch.nn.Module):
    """Keeps the labels of the batches that it scores."""

    def __init__(self):
        super().__init__()
        self.labels = []

    def forward(self, pixels, labels):
        self.labels.append(labels)
        return ImageClassifierOutput(
            loss=torch.zeros(()), logits=torch.nn.functional.one_hot(pixels[:, 0, 0, 0].long())
        )


def test_scored_batches_hold_all_classes_though_files_are_sorted_by_class(monkeypatch):
    monkeypatch.setattr(task_images, "SCORED_ROWS", 20)
    labels = torch.arange(7).repeat_interleave(20)
    pixels = torch.zeros(140, 8, 8, 3, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = labels
    model = Batches()
    scores = score_images(model, Images(pixels, labels, tuple("abcdefg"), "made"))
    assert scores["accuracy"] == 1  # labels move with their images
    assert len(model.labels) == 7
    assert min(len(batch.unique()) for batch in model.labels) >= 5


TINY = PatchConfig(layers=1, routed=1, d_model=8, heads=2, d_hidden=8, side=8)


@pytest.mark.parametrize("gate", DOMAIN_GATES)
def test_a_run_trains_scores_and_saves(gate, tmp_path, monkeypatch):
    monkeypatch.setattr(task_images, "load_pacs", lambda *_, **__: domains())
    config = pacs_small(gate, "photo").replace(model=TINY, optim__steps=3, optim__batch=8)
    result = run_training(config, tmp_path / "run")
    assert result.scores["out"]["images"] == 10
    assert result.scores["validation"]["images"] == 6
    assert 0 <= result.scores["out"]["accuracy"] <= 1
    assert result.scores["out"]["chance"] == pytest.approx(1 / 7)
    record = json.loads((tmp_path / "run" / "result.json").read_text())
    assert record["scores"] == result.scores
    again = image_model(config)
    again.load_state_dict(load_file(tmp_path / "run" / "model" / "model.safetensors"))


def test_the_order_of_the_gates_and_the_split_depend_on_the_seed_alone(monkeypatch):
    monkeypatch.setattr(task_images, "load_pacs", lambda *_, **__: domains())
    small = {"model": TINY, "optim__steps": 3, "optim__batch": 8}
    first, second = (
        DomainTask().data(pacs_small(gate, "photo").replace(seed=5, **small)).train
        for gate in ("linear", "smooth")
    )
    assert torch.equal(first.order, second.order)  # gates are compared on the same batches
    assert torch.equal(first.images.pixels, second.images.pixels)


def test_the_real_domains_have_the_sizes_of_the_paper():
    shared("pacs")
    data = DomainTask().data(pacs_small("cosine", "sketch"))
    assert len(data.scored_on["out"]) == 3_929
    assert len(data.scored_on["validation"]) == pytest.approx(0.2 * 6_062, abs=2)
    assert data.train[0]["pixels"].shape == (32, 32, 3)


def test_cifar10_is_cut_to_the_number_of_images_that_is_asked_for(monkeypatch):
    splits = []

    def load(split):
        splits.append(split)
        return domains().images

    monkeypatch.setattr(task_images, "load_cifar10", load)
    config = cifar10_small("smoe").replace(data__options={"images": 12, "scored": 9})
    data = task_images.ImageTask().data(config)
    assert splits == ["train", "test"]
    assert len(data.train.images) == 12
    assert len(data.scored_on["test"]) == 9
    assert len(data.train) == config.optim.steps * config.optim.batch
    small = config.replace(
        model=MixtureConfig(layers=1, n_experts=8, d_hidden=2, side=8, classes=7)
    )
    assert isinstance(task_images.ImageTask().model(small), MixtureClassifier)


VIT = VisionTransformerConfig(
    layers=2, routed=1, d_model=16, d_hidden=16, heads=2, side=8, patch=4, pretrained=None
)


def test_the_papers_form_routes_the_last_networks_and_names_what_is_missing(tmp_path, monkeypatch):
    config = pacs_paper("perturbed", "sketch")
    assert config.model == VisionTransformerConfig()
    assert (config.model.layers, config.model.n_experts, config.gate.k) == (12, 6, 2)
    monkeypatch.setenv("TIELINE_DATA", str(tmp_path))
    (tmp_path / "pacs").mkdir()
    with pytest.raises(DataError, match=r"PACS is not at .*pacs224\.npz"):
        DomainTask().data(config)
    model = image_model(config.replace(model=VIT))
    layers = [name for name, module in model.named_modules() if isinstance(module, MoE)]
    assert len(layers) == 1
    assert ".1." in layers[0]
    pixels = torch.randint(0, 256, (3, 8, 8, 3), dtype=torch.uint8)
    output = model(pixels=pixels, labels=torch.tensor([0, 1, 6]))
    assert output.logits.shape == (3, 7)
    output.loss.backward()


def test_images_of_another_size_than_the_models_are_refused(monkeypatch):
    monkeypatch.setattr(task_images, "load_pacs", lambda *_, **__: domains(side=16))
    with pytest.raises(DataError, match=r"takes 8² pixels, got \(16, 16\)"):
        DomainTask().data(pacs_small("cosine", "photo").replace(model=TINY))


RUNS = ("whole", "cut")


def test_the_best_model_on_the_training_domains_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(task_images, "load_pacs", lambda *_, **__: domains())
    scores = iter([0.2, 0.9, 0.4, 0.4, 0.4])
    monkeypatch.setattr(DomainTask, "selection_score", lambda *_: next(scores))
    small = {"model": TINY, "optim__steps": 6, "optim__batch": 8, "select_every": 2}
    config, states = pacs_selected("linear", "photo").replace(**small), {}

    def look(model, step):
        states[step] = {name: value.clone() for name, value in model.state_dict().items()}

    run_training(config, tmp_path / "run", watch=look)
    saved = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert json.loads((tmp_path / "run" / "best" / "best.json").read_text())["step"] == 4
    assert all(torch.equal(saved[name], states[4][name]) for name in saved)
    assert not all(torch.equal(saved[name], states[6][name]) for name in saved)


@pytest.mark.parametrize("stop", [3, 6, 9])
def test_a_stopped_run_selects_the_model_of_the_whole_one(stop, tmp_path, monkeypatch):
    """Checkpoints at steps 4 and 8; scores at 2, 4, ..., 10, of which the third is the best."""
    monkeypatch.setattr(task_images, "load_pacs", lambda *_, **__: domains())
    scores = {}

    def score_by_weights(_task, model, _data):
        digest = float(sum(p.detach().double().sum() for p in model.parameters()))
        return scores.setdefault(digest, [0.2, 0.3, 0.9, 0.5, 0.4][len(scores) % 5])

    monkeypatch.setattr(DomainTask, "selection_score", score_by_weights)
    small = {"model": TINY, "optim__steps": 10, "optim__batch": 8, "select_every": 2}
    config = pacs_selected("linear", "photo").replace(checkpoint_every=4, **small)
    full_run = run_training(config, tmp_path / "whole")

    def interrupt(_model, step):
        if step == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(config, tmp_path / "cut", watch=interrupt)
    resumed = run_training(config, tmp_path / "cut", resume=True)
    assert resumed.resumed_from == stop // 4 * 4
    assert len(scores) == 5  # every score is of weights that the full run has
    assert resumed.scores == full_run.scores
    best = [json.loads((tmp_path / run / "best" / "best.json").read_text()) for run in RUNS]
    assert best[0] == best[1] == {"step": 6, "score": 0.9}
    weights = [load_file(tmp_path / run / "model" / "model.safetensors") for run in RUNS]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_only_tasks_with_held_out_training_data_select(tmp_path):
    config = recipe_config("demo-smoke-smoe").replace(select_every=2, optim__steps=2)
    with pytest.raises(TielineError, match="'language' selects no model"):
        run_training(config, tmp_path / "run")
