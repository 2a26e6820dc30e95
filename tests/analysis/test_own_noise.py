"""The noise of rounding the whole model: its size, the orders of ties at it, times to a flip."""

import math
from contextlib import nullcontext

import pytest
import torch

from tests.analysis.zoo import Letters, words
from tests.models.tiny import lively, tiny_model
from tieline.analysis.own_noise import HORIZONS, PATHS, STEPS, flip_walk, noise_pull, own_noise
from tieline.core.numerics import one_thread
from tieline.lab.geometry.exit_time import face_exit, face_quantile, score_flip_times
from tieline.measure.boundary import order_shares, tie_order
from tieline.models import capture, find_routers
from tieline.models.emulate import emulate
from tieline.run.corpus import tokenise


def report(model, tokens=240):
    text = tokenise(Letters(), words(tokens), tokens, 40)
    return own_noise(model, tuple(find_routers(model)), text, 3), text


@pytest.fixture(scope="module")
def mixtral():
    return lively(tiny_model("mixtral"))


@pytest.fixture(scope="module")
def reported(mixtral):
    return report(mixtral)


def by_hand(model, text):
    """Scores (T, E) of the second router, clean and rounded, and the changes of its input."""
    found = []
    for rounded in (False, True):
        how = emulate(model, "bf16", "all") if rounded else nullcontext()
        with torch.inference_mode(), how, capture(model, keep="inputs", ranks="all") as seen:
            model(input_ids=torch.stack(text.sequences))
        layer = seen.trace().layers[1]
        scores = torch.zeros(layer.scores.shape, dtype=torch.float64)
        found.append((scores.scatter_(1, layer.experts.long(), layer.scores.double()), layer))
    return found


def test_sizes_orders_and_flips_are_those_of_two_runs_by_hand(mixtral, reported):
    found, text = reported
    (clean, layer), (rounded, other) = by_hand(mixtral, text)
    top = layer.experts[:, 1:3].long()
    delta = (rounded - clean).gather(1, top).diff(dim=1).abs()
    noise = found.layers[1]
    assert noise.epsilon == pytest.approx(delta.median().item() / 0.6745, rel=1e-9)
    assert noise.orders == pytest.approx(
        order_shares(tie_order(clean, 2, noise.epsilon), 6).tolist()
    )
    assert math.isclose(sum(noise.orders), 1)
    flips = (layer.experts[:, :2].sort().values != other.experts[:, :2].sort().values).any(dim=1)
    assert noise.flipped.value == flips.double().mean().item()


def test_the_pull_has_the_covariance_of_the_changes(mixtral, reported):
    _, text = reported
    (_, clean), (_, rounded) = by_hand(mixtral, text)
    weight = mixtral.get_submodule(clean.name).weight
    pull = noise_pull(clean, rounded, weight)
    moved = (rounded.inputs - clean.inputs).double() @ weight.double().T
    moved = moved - moved.mean(dim=1, keepdim=True)
    assert torch.allclose(pull @ pull.T, moved.T @ moved / len(moved), atol=1e-12)


def test_a_walk_to_one_wall_has_the_exact_times():
    scores = torch.tensor([[1.0, 0.0], [0.25, 0.0], [0.0, 0.03]], dtype=torch.float64)
    with one_thread():
        walk = flip_walk(scores, 1, 0.05 * torch.eye(2, dtype=torch.float64))
    r = (scores[:, 0] - scores[:, 1]).abs() / (0.05 * math.sqrt(2))
    for place, time in enumerate(HORIZONS):
        exact = face_exit(r, time).mean().item()
        assert walk.lower[place] == pytest.approx(exact)
        assert walk.upper[place] == pytest.approx(exact)
        assert walk.value[place].value == pytest.approx(exact, abs=4 * 0.5 / math.sqrt(PATHS))
    assert walk.median == pytest.approx((r.median().item() / 0.67449) ** 2, rel=1e-4)
    assert walk.directions == pytest.approx(2)


def test_a_walk_has_the_flip_times_of_its_tokens():
    generator = torch.Generator().manual_seed(5)
    scores, pull = (torch.randn(6, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    walk = flip_walk(scores[:3], 2, 0.3 * pull[:5], seed=7)
    options = {"steps": STEPS, "paths": PATHS, "seed": 7}
    for place, time in enumerate(HORIZONS):
        by_rank = scores[:3].sort(descending=True)
        alone = [
            score_flip_times(z[None], 2, 0.3 * pull[:5][ids], time, **options)
            for z, ids in zip(*by_rank, strict=True)
        ]
        for name, found in (
            ("lower", walk.lower[place]),
            ("value", walk.value[place].value),
            ("upper", walk.upper[place]),
        ):
            expected = torch.stack([getattr(one, name)[0, -1] for one in alone]).mean().item()
            assert found == pytest.approx(expected, abs=1e-12)
    nearest = torch.stack([one.nearest[0] for one in alone])
    assert walk.median == pytest.approx(face_quantile(nearest, 0.5).median().item())
    assert walk.lower[2] < walk.value[2].value < walk.upper[2]


def test_noise_grows_and_walks_lie_between_their_bounds(reported):
    found, _ = reported
    for noise in found.layers:
        walk = noise.walk.value
        assert noise.walk.status == "ok"
        shares = [value.value for value in walk.value]
        assert shares == sorted(shares)
        for low, share, high in zip(walk.lower, shares, walk.upper, strict=True):
            assert low - 0.08 <= share <= high + 0.08


def test_what_cannot_be_measured_says_why():
    grouped, _ = report(lively(tiny_model("deepseek_v3")))
    assert "within groups" in grouped.layers[0].walk.status
    half, _ = report(lively(tiny_model("mixtral")).to(torch.bfloat16))
    assert not half.layers
    assert "runs in bfloat16" in half.status
    inside, _ = report(lively(tiny_model("dbrx")))
    assert "no module of its own" in inside.status
