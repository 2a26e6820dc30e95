"""Fits of mixtures: they reach the noise and say how they ended."""

import numpy as np
import pytest
import torch

from tests.lab.estimation.tables import piecewise
from tieline.lab.estimation import mixture_fit
from tieline.lab.estimation.mixture_fit import FitSettings, SharedGate, fit_mixture, mixture_starts
from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.regressor import standardised


def problem(n=1500, width=4, regions=3, noise=0.1, outputs=None, **family):
    x, y, _exact = piecewise(n, width, regions, noise, outputs=outputs)
    names = {"gate": "linear", "link": "softmax", "expert": "linear", **family}
    model = MoEModel(d=width, n_experts=regions, **names)
    rows, scales = standardised(x, y.reshape(n, -1), np.ones(n), model)
    return SharedGate(model, rows.y.shape[1]), rows, (noise / scales.y_scale).square().mean().item()


@pytest.mark.parametrize("outputs", [None, 2])
def test_piecewise_data_are_fitted_to_the_noise(outputs):
    regression, rows, floor = problem(outputs=outputs)
    result = fit_mixture(regression, rows, FitSettings(starts=2))
    assert result.status == "converged"
    assert 0.9 * floor < result.error < 1.5 * floor
    assert result.failed == sum(word != "converged" for word in result.starts)
    assert len(result.starts) == 2


def test_all_starts_are_near_the_regions_before_the_fit():
    regression, rows, _floor = problem()
    starts = mixture_starts(regression, rows, 3, torch.Generator().manual_seed(0))
    values = regression.value(starts, rows.x.expand(3, -1, -1))
    errors = (values - rows.y).square().mean(dim=(1, 2))
    assert errors.min() < 0.1
    assert not torch.equal(starts[1], starts[2])
    again = mixture_starts(regression, rows, 1, torch.Generator().manual_seed(9))
    assert torch.equal(again[0], starts[0])


@pytest.mark.parametrize("gate", ["linear", "cosine", "perturbed", "quadratic", "partial"])
@pytest.mark.parametrize("link", ["softmax", "sigmoid"])
def test_every_gate_does_better_than_a_line(gate, link):
    regression, rows, _ = problem(n=400, width=2, regions=2, gate=gate, link=link)
    result = fit_mixture(regression, rows, FitSettings(starts=2, max_iter=60))
    design = torch.cat([rows.x, torch.ones_like(rows.y)], dim=1)
    line = (rows.y - design @ torch.linalg.lstsq(design, rows.y).solution).square().mean()
    assert result.error < 0.8 * line


@pytest.mark.parametrize("expert", ["polynomial", "relu", "gelu", "tanh", "two_layer"])
def test_every_expert_does_better_than_the_mean(expert):
    regression, rows, _ = problem(n=400, width=2, regions=2, expert=expert)
    result = fit_mixture(regression, rows, FitSettings(starts=2, max_iter=60))
    assert result.error < 0.6 * (rows.y - rows.y.mean()).square().mean()


def test_larger_tables_are_fitted_in_samples_and_then_as_a_whole(monkeypatch):
    regression, rows, floor = problem(n=3000)
    monkeypatch.setattr(mixture_fit, "FIRST", 500)
    monkeypatch.setattr(mixture_fit, "SECOND", 1200)
    sizes = []
    refine = mixture_fit._refine_starts
    monkeypatch.setattr(
        mixture_fit,
        "_refine_starts",
        lambda *a: (sizes.append((len(a[1].x), len(a[2]))), refine(*a))[1],
    )
    result = fit_mixture(regression, rows, FitSettings(starts=2))
    assert sizes == [(500, 2), (500, 1), (1200, 1), (3000, 1)]
    assert sorted(result.starts) == ["converged", "set aside"]
    assert result.failed == 0
    assert result.error < 1.5 * floor


def test_too_few_steps_are_a_status():
    regression, rows, _ = problem(n=300)
    result = fit_mixture(regression, rows, FitSettings(starts=3, max_iter=1, tol=0.0))
    assert result.starts == ("unfinished",) * 3
    assert result.failures() == "3 unfinished"
    assert result.failed == 3
    assert result.iterations == 1


def test_a_ridge_shrinks_and_few_rows_have_one():
    regression, rows, _ = problem(n=200)
    free, held = (
        fit_mixture(regression, rows, FitSettings(starts=1, ridge=ridge)) for ridge in (None, 0.1)
    )
    assert held.theta.norm() < 0.5 * free.theta.norm()
    assert held.error > free.error
    few = rows.take(torch.arange(20))
    settings = FitSettings()
    assert settings.penalty(regression, rows) == 1e-10
    assert settings.penalty(regression, few) == 1e-3
    assert FitSettings(ridge=0.5).penalty(regression, few) == 0.5
