"""From a weights matrix (T, E) to the (weights, indices) of K columns that experts blocks take."""

from jaxtyping import Float
from torch import Tensor

from tieline.errors import ShapeError, require
from tieline.hf.override import Choice
from tieline.hf.smooth_skip import SkipRule
from tieline.ranking import stable_topk

__all__ = ["to_slots"]


def to_slots(
    weights: Float[Tensor, "tokens experts"], skip: SkipRule, columns: int | None = None
) -> Choice:
    """Weights and indices (T, K), the largest weight first; gradients reach `weights`.

    Args:
        weights: exact zeros where an expert is not used.
        skip: how the experts pass over a slot that has none; its weight is 0.
        columns: K; None for the largest number of experts that a token here uses.
    """
    used = int((weights != 0).sum(dim=1).max()) if len(weights) else 0
    columns = max(used, 1) if columns is None else columns
    require(
        used <= columns <= weights.shape[1],
        f"need {used} (experts of a token) <= columns <= {weights.shape[1]} (experts), "
        f"got {columns=}",
        ShapeError,
    )
    ids = stable_topk(weights.detach().abs(), columns).indices
    chosen = weights.gather(1, ids)
    return Choice(chosen, skip.applied(ids, chosen))
