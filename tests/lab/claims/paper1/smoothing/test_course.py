"""The course of a run: it records the run's own routing, and recording does not change the run."""

import pytest
import torch

from tests.lab.training.tiny import tiny
from tieline.core.errors import TielineError
from tieline.lab.claims.paper1.smoothing import routing_course
from tieline.lab.training.language_tasks import moe_layers
from tieline.lab.training.recipes import pacs_small
from tieline.lab.training.text_data import load_streams
from tieline.lab.training.training_run import run_training
from tieline.routing.losses import collect_routing

TOLERANCES = (0.1, 1.0, 50.0)


@pytest.fixture(scope="module")
def course():
    return routing_course(tiny("smooth50", steps=5), every=2, windows=6, tolerances=TOLERANCES)


def test_looks_are_taken_at_the_start_every_n_steps_and_at_the_end(course):
    assert course.steps.tolist() == [1, 2, 4, 5]
    assert course.experts.shape == course.epsilon.shape == (4, 1)
    assert course.near.shape == (4, 1, 3)
    assert course.near.diff(dim=-1).min() >= 0
    assert (course.near[..., -1] == 8).all()
    assert course.experts.min() >= 2
    assert len(course.losses) == 3
    assert course.epsilon.diff(dim=0).abs().min() > 0


def test_the_last_look_is_the_model_of_the_same_run_without_looks(course, tmp_path):
    config, calls = tiny("smooth50", steps=5), []
    done = run_training(
        config, tmp_path / "run", watch=lambda model, step: calls.append((model, step))
    )
    assert [step for _, step in calls] == [1, 2, 3, 4, 5]
    model = calls[-1][0].eval()
    (layer,) = moe_layers(model).values()
    assert layer.gate.epsilon.item() == pytest.approx(course.epsilon[-1, 0].item(), abs=0)
    assert done.scores["validation"]["experts_per_token"] == course.held_out
    text = load_streams(config.data).train
    windows = text[: len(text) // 32 * 32].view(-1, 32)
    with torch.no_grad(), collect_routing(model) as records:
        model(input_ids=windows[:: len(windows) // 6][:6].long())
    active = records[0].routing.active.double().mean().item()
    assert active == pytest.approx(course.experts[-1, 0].item(), abs=0)


def test_hard_gates_have_no_width():
    course = routing_course(tiny("smoe", steps=2), every=1, windows=4)
    assert course.epsilon.isnan().all()
    assert (course.experts == 2).all()
    assert course.near.shape == (2, 1, 0)


def test_parts_of_a_course(course):
    assert course.between(0, 1) == slice(0, 4)
    assert course.between(0.5, 1) == slice(2, 4)
    with pytest.raises(TielineError, match=r"no look between 0\.5 and 0\.6 of 5 steps"):
        course.between(0.5, 0.6)


def test_other_tasks_are_refused():
    with pytest.raises(TielineError, match="needs a decoder"):
        routing_course(pacs_small("cosine", "photo"), every=1)
