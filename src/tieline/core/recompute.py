"""Whether code runs a second time on behalf of a backward pass.

Activation checkpointing repeats a forward pass while gradients are computed. Whatever counts, sums
or records tokens must count them once, so it asks here and stays silent during the repetition.
"""

import torch

__all__ = ["is_recomputing"]


def is_recomputing() -> bool:
    """True inside the autograd engine, which is where checkpointed forwards are repeated.

    The engine numbers the graph task that a thread works on and reports -1 outside of any; this
    holds for both kinds of checkpointing and for the engine's own device threads.
    """
    return torch._C._current_graph_task_id() != -1
