"""Activation checkpointing that saves the choice of experts instead of repeating it.

A checkpointed layer runs its router twice. If the second run flips a token, by another kernel or by
state that moved in between, experts get other numbers of tokens, and PyTorch raises a
`CheckpointError` or gradients belong to another choice. Selective checkpointing can save what ranks
the scores (topk, sort) and repeat the rest, at k indices and scores per token:

    model.gradient_checkpointing_enable(
        {"use_reentrant": False, "context_fn": saved_choice_contexts}
    )
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

RANKING = ("topk", "sort", "argsort", "kthvalue", "max", "argmax", "one_hot", "nonzero")
"""Operations whose outputs a choice is read from."""


def choice_policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save what ranks scores; prefer to repeat everything else."""
    packet = getattr(operation, "overloadpacket", operation)
    saved = any(packet is getattr(torch.ops.aten, name, None) for name in RANKING)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saved_choice_contexts() -> tuple[Any, Any]:
    """Return the contexts of `torch.utils.checkpoint.checkpoint(..., context_fn=...)`."""
    return create_selective_checkpoint_contexts(choice_policy)
