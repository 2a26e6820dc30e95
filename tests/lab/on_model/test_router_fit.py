"""New routers that choose as the old ones did: exact where a sphere exists, fitted where not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.strategies import seeds
from tieline.core.errors import TielineError
from tieline.lab.on_model.router_fit import RouterSamples, fit_router, sphere_centre
from tieline.routing.routers import CosineRouter, LinearRouter


def case(seed, experts=6, width=10, tokens=400, spread=0.3):
    """Rows of an old router, and tokens whose norms differ."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(experts, width, generator=generator)
    x = torch.randn(tokens, width, generator=generator)
    x = x * (1 + spread * torch.rand(tokens, 1, generator=generator))
    return rows, RouterSamples(x, x @ rows.T)


def with_rows(router, rows):
    router.weight.data = rows.clone()
    return router


@settings(max_examples=20)
@given(seeds, st.integers(2, 8))
def test_all_rows_are_equally_far_from_the_centre(seed, experts):
    rows, _ = case(seed, experts)
    radii = (rows.double() - sphere_centre(rows)).norm(dim=1)
    torch.testing.assert_close(radii, radii.mean().expand_as(radii), rtol=1e-8, atol=1e-8)


@settings(max_examples=6)
@given(seeds, st.sampled_from([(0.0, 0.0), (0.1, 0.1), (0.5, 0.02)]))
def test_a_cosine_on_the_sphere_ranks_every_token_as_the_old_router(seed, tau):
    rows, samples = case(seed)
    new = with_rows(CosineRouter(10, 6, tau=tau), rows)
    fit = fit_router(new, samples)
    assert fit.steps == 0
    assert fit.loss <= fit.start + 1e-6
    assert fit.temperature == new.temperature
    scores = new(samples.inputs)
    gaps = samples.logits.sort(dim=1).values.diff(dim=1).min(dim=1).values
    sure = gaps > 1e-4
    assert torch.equal(scores.argsort(dim=1)[sure], samples.logits.argsort(dim=1)[sure])


def test_tokens_of_one_norm_keep_their_weights_too():
    rows, samples = case(0)
    x = samples.inputs / samples.inputs.norm(dim=1, keepdim=True) * 3
    new = with_rows(CosineRouter(10, 6, tau=(0.1, 0.1)), rows)
    fit_router(new, RouterSamples(x, x @ rows.T), steps=0)
    close = {"rtol": 2e-3, "atol": 2e-4}
    torch.testing.assert_close(new(x).softmax(1), (x @ rows.T).softmax(1), **close)


def test_without_a_sphere_the_rows_are_fitted():
    rows, samples = case(1, experts=9, width=3)
    new = with_rows(CosineRouter(3, 9), rows)
    fit = fit_router(new, samples, steps=None)
    assert fit.steps > 0
    assert fit.loss < 0.9 * fit.start


def test_sigmoid_scores_keep_their_level():
    rows, samples = case(2)
    new = with_rows(CosineRouter(10, 6), rows)
    fit = fit_router(new, samples, softmax=False)
    assert fit.steps > 0
    assert fit.loss < 0.9 * fit.start
    level, before = new(samples.inputs).sigmoid().mean(), samples.logits.sigmoid().mean()
    assert level.item() == pytest.approx(before.item(), abs=0.02)


def test_a_router_that_is_the_old_one_stays():
    rows, samples = case(3)
    new = with_rows(LinearRouter(10, 6), rows)
    fit = fit_router(new, samples)
    assert (fit.steps, fit.temperature) == (0, None)
    assert torch.equal(new.weight, rows)


def test_a_given_temperature_is_kept_and_steps_are_checked():
    rows, samples = case(4)
    new = with_rows(CosineRouter(10, 6), rows)
    assert fit_router(new, samples, temperature=0.5, steps=3).temperature == 0.5
    assert new.weight.grad is None
    with pytest.raises(TielineError, match="steps"):
        fit_router(new, samples, steps=-1)
