"""A choice that is compared with a reference: weight moved, and routes that are forced."""

import pytest
import torch

from tieline.models.router_output import Choice, RouterOutput
from tieline.run.schedule import compared_choice


def test_the_weight_moved_is_that_of_the_experts_lost():
    clean = Choice(torch.tensor([[0.75, 0.25], [0.5, 0.25]]), torch.tensor([[0, 1], [2, 3]]))
    routed = RouterOutput(torch.zeros(2, 4), torch.ones(2, 2), torch.tensor([[1, 0], [1, 3]]))
    lost, free = compared_choice(clean, routed, forced=False)
    assert lost.tolist() == [-1.0, pytest.approx(2 / 3)]  # another order is no flip
    assert free.ids.tolist() == routed.ids.tolist()
    _, forced = compared_choice(clean, routed, forced=True)
    assert forced.ids.tolist() == [[1, 0], [2, 3]]
    assert forced.weights.tolist() == [[1.0, 1.0], [0.5, 0.25]]
