"""Proof that the captured scores explain the choice: otherwise nothing is captured at all.

With distinct chosen experts, "the sorted selected scores are z_[1], ..., z_[k]" says the same as
"no chosen score is below z_[k]", and where the gap is positive it forces equal ids. Scores are
compared up to the router's own rounding: it may evaluate the same function in another order, or
rank softmax probabilities whose logits we keep, and two scores closer than

    tolerance = 8 · eps · max(1, |z_[k]|),    eps = unit roundoff of the precision it ranks in,

may change places there. A larger difference means that the record does not describe the router.
"""

from importlib.metadata import version

import torch
from jaxtyping import Float, Int
from torch import Tensor

from tieline.errors import TielineError, UnsupportedModelError
from tieline.hf.batches import Batch

__all__ = ["check_distinct", "check_finite", "check_selected"]

ROUNDINGS = 8
"""How many units of rounding an activation, a bias and a sum may add up to."""


def check_finite(scores: Float[Tensor, "tokens experts"], layer: str, batch: Batch) -> None:
    """Refuse scores that are not numbers, with their layer, count and first token."""
    if scores.sum().isfinite():  # one pass, no mask; a sum that overflows is looked at closely
        return
    wrong = ~scores.isfinite()
    rows = wrong.any(dim=1).nonzero().squeeze(1)
    if len(rows):
        first = int(rows[0])
        raise TielineError(
            f"layer {layer!r}: {int(wrong.sum())} selection scores of {len(rows)} tokens are NaN "
            f"or infinite, first at token {int(batch.positions[first])} of document "
            f"{int(batch.documents[first])} (token id {int(batch.tokens[first])})"
        )


def check_distinct(ids: Int[Tensor, "tokens k"], layer: str, family: str) -> None:
    """Refuse a router that names an expert twice for one token."""
    ordered = ids.sort(dim=1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise _refusal(layer, family, "an expert was chosen twice for one token")


def check_selected(
    selected: Float[Tensor, "tokens k"],
    threshold: Float[Tensor, " tokens"],
    rounding: float,
    layer: str,
    family: str,
) -> None:
    """Refuse unless every selected score reaches z_[k], up to the router's rounding.

    Args:
        selected: captured scores at the router's own indices.
        threshold: z_[k] of the captured scores.
        rounding: unit roundoff of the precision in which the router ranks.
        layer: name of the router module.
        family: name of its family.
    """
    tolerance = ROUNDINGS * rounding * threshold.abs().clamp(min=1)
    short = threshold - selected.amin(dim=1) > tolerance
    if bool(short.any()):
        count, first = int(short.sum()), int(short.nonzero()[0])
        found = torch.stack([selected[first].amin(), threshold[first]]).tolist()
        why = (
            f"{count} of {len(short)} tokens chose an expert that its scores do not rank among "
            f"the first {selected.shape[1]}; the first has {found[0]:.9g} < {found[1]:.9g}"
        )
        raise _refusal(layer, family, why)


def _refusal(layer: str, family: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {layer!r}: the record of family {family!r} does not describe this router under "
        f"transformers {version('transformers')}: {why}"
    )
