"""Predicted against measured flips on the trained model that ships with the package."""

import math

import pytest
import torch

from tests.measure.problems import chosen_sets
from tieline.measure.boundary import gap_density
from tieline.measure.measures import MeasureSettings, measure_layer
from tieline.measure.noise_flips import flip_probability, logit_view, noisy_gap, population_flips

pytestmark = pytest.mark.slow
FRACTIONS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
ENOUGH = 3000
TOKENS = 16_384


@pytest.fixture(scope="module")
def layers():
    demo = pytest.importorskip("tieline.models.demo")
    if not (demo.DEMO_FOLDER / "model.safetensors").exists():
        pytest.skip("the demo model has not been made: python -m tools.demo_model")
    model, tokenizer = demo.load_demo_model(), demo.load_demo_tokenizer()
    ids = torch.tensor(tokenizer(demo.demo_text())["input_ids"])
    return captured(model, ids[: len(ids) // 512 * 512].view(-1, 512))


def captured(model, rows):
    from tieline.models import capture

    with torch.no_grad(), capture(model, ranks="all") as recorder:
        for batch in rows.split(8):
            model(input_ids=batch)
    return recorder.trace().layers


def noise_view(layer):
    """Scores and slopes of the first tokens; the noise can be drawn repeatedly."""
    view = logit_view(layer)
    return view.scores[:TOKENS], view.slope[:TOKENS], layer.facts.k


def measured_rate(scores, k, sigma):
    """Share of flips under noise, drawn until enough tokens flip, and its standard error."""
    clean, flips, runs = chosen_sets(scores, k), 0, 0
    generator = torch.Generator().manual_seed(0)
    while flips < ENOUGH:
        noisy = scores + sigma * torch.randn(scores.shape, generator=generator)
        flips += int((chosen_sets(noisy, k) != clean).any(dim=1).sum())
        runs += 1
    total = runs * len(scores)
    return flips / total, math.sqrt(flips) / total


def test_noise_flips_these_tokens_as_predicted(layers):
    for layer in layers:
        scores, _, k = noise_view(layer)
        for fraction in FRACTIONS:
            sigma = fraction * scores.std().item()
            expected = flip_probability(scores, k, sigma).mean().item()
            rate, _ = measured_rate(scores.float(), k, sigma)
            assert rate == pytest.approx(expected, rel=0.05), f"{layer.name} at {fraction}"


def test_noise_flips_other_tokens_as_the_population_says(layers):
    for layer in layers:
        scores, slope, k = noise_view(layer)
        half = torch.arange(len(scores)) // 512 % 2 == 0
        density = gap_density(noisy_gap(scores[half], k, slope[half]))
        for fraction in FRACTIONS[:4]:
            sigma = fraction * scores.std().item()
            rate = population_flips(density, sigma)
            measured, noise = measured_rate(scores[~half].float(), k, sigma)
            chances = flip_probability(scores[~half], k, sigma)
            error = math.hypot(
                rate.standard_error, noise, chances.std().item() / len(chances) ** 0.5
            )
            assert abs(rate.value - measured) < 3 * error, f"{layer.name} at {fraction}"


def test_rounding_to_bf16_ties_and_flips_as_predicted(layers):
    settings = MeasureSettings(sigmas=(), precisions=("bf16",))
    for layer in layers:
        (row,) = measure_layer(layer, settings).precision.value
        assert row.tie.value == pytest.approx(row.tie_emulated.value, rel=0.15), layer.name
        assert row.flip.value == pytest.approx(row.flip_emulated.value, rel=0.15), layer.name
