"""Counts of flips by layer, which all trainer integrations share."""

import torch

from tieline.serving.flip_counts import MOST_LAYERS, FlipCounts, flip_scalars


def test_the_names_of_a_deep_model_are_bounded_and_its_last_layer_counts():
    counts, gaps = FlipCounts(MOST_LAYERS + 72), torch.arange(1.0, 9.0)
    for layer in range(MOST_LAYERS + 72):
        counts.add(layer, gaps, torch.full_like(gaps, layer == MOST_LAYERS + 71).bool())
    scalars = flip_scalars(counts.gaps)
    layers = [name for name in scalars if name.startswith("flip_rate/")]
    assert layers == [f"flip_rate/layer_{number}" for number in range(MOST_LAYERS)]
    assert (scalars["flip_rate_max"], scalars["worst_layer"]) == (1.0, MOST_LAYERS + 71)
    assert set(flip_scalars(counts.gaps, per_layer=False)) == set(scalars) - set(layers)


def test_gaps_of_any_size_are_counted():
    counts, gaps = FlipCounts(1), torch.tensor([0.0, 1e-30, 1e30, torch.inf, torch.nan])
    counts.add(0, gaps, torch.ones(5).bool())
    assert counts.gaps.sum(dim=(1, 2)).tolist() == [5, 5]
