"""The record of labelled images."""

import pytest
import torch

from tieline.core.errors import ParameterError
from tieline.lab.training.data_files import DataError
from tieline.lab.training.image_data import Images, as_floats


def images(n=6, classes=("a", "b", "c")):
    pixels = torch.arange(n * 12, dtype=torch.uint8).reshape(n, 2, 2, 3)
    return Images(pixels, torch.arange(n) % 3, classes, "made")


def test_a_subset_is_the_same_for_the_same_seed_and_has_no_image_twice():
    full_set = images()
    first, again, other = full_set.subset(4, 1), full_set.subset(4, 1), full_set.subset(4, 2)
    assert torch.equal(first.pixels, again.pixels)
    assert not torch.equal(first.pixels, other.pixels)
    assert len({tuple(image.flatten().tolist()) for image in first.pixels}) == len(first) == 4
    for pixels, label in zip(first.pixels, first.labels, strict=True):
        assert int(pixels[0, 0, 0]) // 12 % 3 == label
    assert len(full_set.subset(100)) == 6


def test_floats_span_minus_one_to_one():
    values = as_floats(torch.tensor([[[[0, 255, 51]]]], dtype=torch.uint8))
    torch.testing.assert_close(values, torch.tensor([[[[-1.0, 1.0, -0.6]]]]))


def test_labels_without_a_class_and_empty_subsets_are_refused():
    with pytest.raises(DataError, match="labels from 0 to 2, classes 2"):
        images(classes=("a", "b"))
    with pytest.raises(ParameterError, match="at least one image"):
        images().subset(0)
