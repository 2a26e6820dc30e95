"""Items in training order, and the score of a model on images."""

import pytest
import torch
from transformers.modeling_outputs import ImageClassifierOutput

from tieline.core.errors import TielineError
from tieline.lab.training.image_data import Images
from tieline.lab.training.image_tasks import _accuracy_with_errors, image_order, score_images
from tieline.routing import moe


def images(n=8, classes=4):
    pixels = torch.zeros(n, 2, 2, 3, dtype=torch.uint8)
    pixels[:, :, 0, 0], pixels[:, :, 1, 0] = torch.arange(n, dtype=torch.uint8)[:, None], 99
    return Images(pixels, torch.arange(n) % classes, tuple("abcd"[:classes]), "made")


def test_each_pass_has_every_image_once_and_the_seed_fixes_all():
    items = image_order(images(), 20, seed=1)
    assert len(items) == 20
    for first in (0, 8):
        labels = sorted(int(index) for index in items.order[first : first + 8])
        assert labels == list(range(8))
    assert not torch.equal(items.order[:8], items.order[8:16])
    again, other = image_order(images(), 20, seed=1), image_order(images(), 20, seed=2)
    assert all(torch.equal(items[i]["pixels"], again[i]["pixels"]) for i in range(20))
    assert not torch.equal(items.order, other.order)


def test_a_mirrored_item_has_left_and_right_changed_and_its_label_kept():
    items = image_order(images(), 64, seed=0)
    for at in range(64):
        item, index = items[at], int(items.order[at])
        sides = [index, 99] if not items.mirrored[at] else [99, index]
        assert item["pixels"][0, :, 0].tolist() == sides
        assert item["labels"] == index % 4
    assert 16 < items.mirrored.sum() < 48
    assert not image_order(images(), 64, seed=0, mirror=False).mirrored.any()
    with pytest.raises(TielineError, match="needs an item"):
        image_order(images(), 0, seed=0)


class Guess(torch.nn.Module):
    """Predicts class 0 for half of the images and the true class for the others."""

    def __init__(self):
        super().__init__()
        self.layer = moe(d_model=3, n_experts=4, k=2, d_hidden=2)

    def forward(self, pixels, labels):
        self.layer(pixels.float().mean(dim=(1, 2)))
        index = pixels[:, 0, 0, 0].long()
        answers = torch.where(index < 4, 0, labels)
        logits = 2.0 * torch.nn.functional.one_hot(answers, 4).float()
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return ImageClassifierOutput(loss=loss, logits=logits)


def test_scores_of_a_model_whose_answers_are_known(monkeypatch):
    monkeypatch.setattr(
        "tieline.lab.training.image_tasks.SCORED_ROWS", 3
    )  # batches of unequal size
    scores = score_images(Guess(), images())
    assert scores["accuracy"] == 5 / 8
    assert scores["accuracy_se"] == pytest.approx((5 / 8 * 3 / 8 / 8) ** 0.5)
    assert (scores["chance"], scores["commonest"], scores["images"]) == (0.25, 0.25, 8)
    assert scores["experts"] == [2.0]
    assert scores["balanced"] == pytest.approx((1 + 0.5 * 3) / 4)  # class 0 always, others half
    assert scores["balanced_se"] == pytest.approx((3 * 0.25 / 2) ** 0.5 / 4)
    right, wrong = -2 + torch.tensor([2.0, 0, 0, 0]).logsumexp(0), torch.tensor([2.0, 0, 0, 0])
    expected = (5 * right + 3 * wrong.logsumexp(0)) / 8
    assert scores["loss"] == pytest.approx(expected.item(), rel=1e-6)


def test_always_saying_the_same_is_at_chance_when_classes_count_alike():
    labels = torch.tensor([0, 0, 0, 0, 0, 1, 2, 2])
    scores = _accuracy_with_errors(labels == 0, labels)
    assert scores["accuracy"] == scores["commonest"] == 5 / 8
    assert (scores["balanced"], scores["balanced_se"]) == (pytest.approx(1 / 3), 0.0)
