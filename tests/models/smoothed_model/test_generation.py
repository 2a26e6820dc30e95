"""Smoothed models generate, and whole models that see and hear are saved as text models are."""

import importlib
import inspect

import pytest
import torch
from transformers import PreTrainedModel

from tests.models.smoothing import KINDS, SMOOTHED
from tests.models.tiny import batch, lively, tiny_model
from tests.models.tiny_whole import WHOLE, tiny_whole
from tieline.models import find_routers, load_smoothed, smooth_
from tieline.models.saved_models import changes_of
from tieline.models.smoothed_router import router_smoothing

pytestmark = pytest.mark.filterwarnings("ignore")
SILENT = "openai_privacy_filter"  # labels tokens
DIFFUSES = "diffusion_gemma"
GENERATES = [n for n in SMOOTHED if n not in (SILENT, DIFFUSES)]
ALL = [pytest.param(n, marks=[] if n in KINDS else [pytest.mark.slow]) for n in GENERATES]
START = batch(1, 6)


def generator(family):
    """The small model of a family that generates, smoothed."""
    model = lively(tiny_whole(family) if family in WHOLE else tiny_model(family))
    smooth_(model, epsilon=0.3)
    return model


def test_the_families_that_do_not_generate_are_known_by_name():
    module = importlib.import_module(type(tiny_model(SILENT)).__module__)
    models = [m for m in vars(module).values() if inspect.isclass(m)]
    assert not any(m.can_generate() for m in models if issubclass(m, PreTrainedModel))
    assert len(GENERATES) == len(SMOOTHED) - 2 == 63


@pytest.mark.parametrize("family", ALL)
@torch.inference_mode()
def test_it_generates_as_its_forward_pass_predicts(family):
    model = generator(family)
    generated = model.generate(START, max_new_tokens=4, do_sample=False, eos_token_id=None)
    logits = model(input_ids=generated[:, :-1]).logits
    assert generated.shape == (1, 10)
    assert torch.equal(logits[:, 5:].argmax(dim=-1), generated[:, 6:])


@torch.inference_mode()
def test_a_canvas_is_denoised_as_the_forward_pass_predicts():
    """One step of block diffusion from a canvas that is given; prompt and canvas are routed."""
    model = generator(DIFFUSES)
    canvas = batch(1, model.config.canvas_length)
    generated = model.generate(
        START, max_new_tokens=canvas.shape[1], max_denoising_steps=1, decoder_input_ids=canvas
    )
    logits = model(input_ids=START, decoder_input_ids=canvas).logits
    routers = find_routers(model)
    assert {name.split(".")[1] for name in routers} == {"encoder", "decoder"}
    assert all(router_smoothing(router).checked for router in routers.values())
    assert torch.equal(generated.sequences[:, START.shape[1] :], logits.argmax(dim=-1))


@pytest.mark.parametrize(
    "family",
    [pytest.param(n, marks=[] if n == "qwen3_vl_moe" else [pytest.mark.slow]) for n in WHOLE],
)
@torch.inference_mode()
def test_whole_models_are_saved_and_loaded_smoothed(family, tmp_path):
    model = generator(family)
    model.save_pretrained(tmp_path)
    loaded = load_smoothed(tmp_path, type(model).__mro__[1])
    given = {"decoder_input_ids": batch(1, 8)} if family == DIFFUSES else {}
    mine, theirs = (m(input_ids=START, **given).logits for m in (loaded, model))
    assert changes_of(loaded.config) == changes_of(model.config)
    assert torch.equal(mine, theirs)
