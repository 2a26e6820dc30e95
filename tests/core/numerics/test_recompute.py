"""A repeated forward pass is told from the first one, for both kinds of checkpointing."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tieline.core.numerics import is_recomputing


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_only_the_repetition_is_a_recomputation(use_reentrant):
    answers = []

    def layer(x):
        answers.append(is_recomputing())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert answers == [False, True]
    assert not is_recomputing()
