"""Times to the first flip under the noise of rounding the whole model."""

import math

import pytest
import torch

from tests.analysis.test_rounded_runs import by_hand
from tests.analysis.zoo import Letters, random_text
from tests.models.tiny import lively, tiny_model
from tieline.core.numerics import one_thread
from tieline.lab.command_settings import WalksSettings
from tieline.lab.geometry.exit_time import face_exit, face_quantile, score_flip_times
from tieline.lab.on_model.walks import (
    HORIZONS,
    PATHS_PER_TOKEN,
    STEPS_PER_HORIZON,
    flip_walk,
    score_noise_factor,
    walks,
)
from tieline.run.corpus import tokenise

SETTINGS = WalksSettings(text=random_text(240), tokens=240, batch_size=3, sequence_length=40)


@pytest.fixture(scope="module")
def mixtral():
    return lively(tiny_model("mixtral"))


def test_the_pull_has_the_covariance_of_the_changes(mixtral):
    text = tokenise(Letters(), random_text(240), 240, 40)
    (_, clean), (_, rounded) = by_hand(mixtral, text)
    weight = mixtral.get_submodule(clean.name).weight
    pull = score_noise_factor(clean, rounded, weight)
    moved = (rounded.inputs - clean.inputs).double() @ weight.double().T
    moved = moved - moved.mean(dim=1, keepdim=True)
    assert torch.allclose(pull @ pull.T, moved.T @ moved / len(moved), atol=1e-12)


def test_a_walk_to_one_wall_has_the_exact_times():
    scores = torch.tensor([[1.0, 0.0], [0.25, 0.0], [0.0, 0.03]], dtype=torch.float64)
    with one_thread():
        walk = flip_walk(scores, 1, 0.05 * torch.eye(2, dtype=torch.float64))
    r = (scores[:, 0] - scores[:, 1]).abs() / (0.05 * math.sqrt(2))
    for index, time in enumerate(HORIZONS):
        exact = face_exit(r, time).mean().item()
        assert walk.lower[index] == pytest.approx(exact)
        assert walk.upper[index] == pytest.approx(exact)
        assert walk.value[index].value == pytest.approx(
            exact, abs=4 * 0.5 / math.sqrt(PATHS_PER_TOKEN)
        )
    assert walk.median == pytest.approx((r.median().item() / 0.67449) ** 2, rel=1e-4)
    assert walk.directions == pytest.approx(2)


def test_a_walk_has_the_flip_times_of_its_tokens():
    generator = torch.Generator().manual_seed(5)
    scores, pull = (torch.randn(6, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    walk = flip_walk(scores[:3], 2, 0.3 * pull[:5], seed=7)
    options = {"steps": STEPS_PER_HORIZON, "paths": PATHS_PER_TOKEN, "seed": 7}
    for index, time in enumerate(HORIZONS):
        by_rank = scores[:3].sort(descending=True)
        alone = [
            score_flip_times(z[None], 2, 0.3 * pull[:5][ids], time, **options)
            for z, ids in zip(*by_rank, strict=True)
        ]
        for name, average in (
            ("lower", walk.lower[index]),
            ("value", walk.value[index].value),
            ("upper", walk.upper[index]),
        ):
            expected = (
                torch.stack([getattr(token_times, name)[0, -1] for token_times in alone])
                .mean()
                .item()
            )
            assert average == pytest.approx(expected, abs=1e-12)
    nearest = torch.stack([token_times.nearest[0] for token_times in alone])
    assert walk.median == pytest.approx(face_quantile(nearest, 0.5).median().item())
    assert walk.lower[2] < walk.value[2].value < walk.upper[2]


def test_flips_grow_and_walks_lie_between_their_bounds(mixtral):
    steps = []
    result = walks(
        (mixtral, Letters()), settings=SETTINGS, progress=lambda *step: steps.append(step)
    )
    assert steps[-1] == ("walks", len(result.layers), len(result.layers))
    for layer in result.layers:
        walk = layer.walk.value
        assert layer.walk.status == "ok"
        assert result.metrics[f"median:{layer.name}"] == walk.median
        shares = [value.value for value in walk.value]
        assert shares == sorted(shares)
        for low, share, high in zip(walk.lower, shares, walk.upper, strict=True):
            assert low - 0.08 <= share <= high + 0.08


def test_what_cannot_be_measured_says_why():
    grouped = walks((lively(tiny_model("deepseek_v3")), Letters()), settings=SETTINGS)
    assert "within groups" in grouped.layers[0].walk.status
    half = walks((lively(tiny_model("mixtral")).to(torch.bfloat16), Letters()), settings=SETTINGS)
    assert not half.layers
    assert "runs in bfloat16" in half.status
