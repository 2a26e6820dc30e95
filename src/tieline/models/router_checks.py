"""What a router's scores and choice must be, checked while a model runs.

    PassChecks               checks of a pass whose answers are read when it has ended
    check_router_scores      scores are finite
    check_distinct_experts   no expert is chosen twice for a token
    check_selected           the scores explain the choice: no chosen score is below z_[k], up to

    tolerance = 8 · eps · max(1, |z_[k]|),    eps = unit roundoff of the router's precision,

since a router may evaluate the same function in another order, or rank probabilities whose logits
are kept. A larger difference means that the family's record does not describe the router.

Reading an answer makes the host wait for an accelerator. With `PassChecks` answers stay there until
the pass has ended; without, they are read at once.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.core.errors import TielineError, UnsupportedModelError
from tieline.core.text import layer_label
from tieline.models.families import transformers_version
from tieline.models.pass_tokens import Batch


class PassChecks:
    """Checks of one forward pass whose answers are read when it has ended."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Callable[[], None]]] = []
        self._kept: dict[torch.device, Tensor] = {}

    def add(self, wrong: Bool[Tensor, ""], refuse: Callable[[], None]) -> None:
        """Note that `refuse`, which raises, is to be called if `wrong`."""
        self._noted.append((wrong, refuse))

    def on_device(self, rows: Tensor, device: torch.device) -> Tensor:
        """Row numbers of the pass on a device, copied once."""
        if device not in self._kept:
            self._kept[device] = rows.to(device)
        return self._kept[device]

    def pop_noted(self) -> list[tuple[Tensor, Callable[[], None]]]:
        """Remove and return the noted checks."""
        noted, self._noted = self._noted, []
        return noted


def refuse_if(
    wrong: Bool[Tensor, ""], refuse: Callable[[], None], checks: PassChecks | None = None
) -> None:
    """Call `refuse`, which raises, if `wrong`; on an accelerator with `checks`, at the end."""
    if checks is not None and wrong.device.type != "cpu":
        checks.add(wrong, refuse)
    elif bool(wrong):
        refuse()


ROUNDINGS = 8
"""Units of rounding that an activation, a bias and a sum may add up to."""


def check_router_scores(
    scores: Float[Tensor, "tokens experts"],
    layer: str,
    batch: Batch,
    checks: PassChecks | None = None,
) -> None:
    """Refuse NaN and infinite scores, with their layer, count and first token."""
    # one pass, no mask; a sum that overflows is looked at closely
    total = scores.sum()
    if total.device.type != "cpu":
        refuse = partial(_require_finite_scores, scores, layer, batch)
        refuse_if(~total.isfinite(), refuse, checks)
    elif not math.isfinite(total.item()):
        _require_finite_scores(scores, layer, batch)


def _require_finite_scores(
    scores: Float[Tensor, "tokens experts"], layer: str, batch: Batch
) -> None:
    """Raise with layer, count and first token if a score is not finite."""
    not_finite = ~scores.isfinite()
    rows = not_finite.any(dim=1).nonzero().squeeze(1)
    if len(rows):
        first = int(rows[0])
        raise TielineError(
            f"{layer_label(layer)}: {int(not_finite.sum())} selection scores of {len(rows)} tokens "
            f"are NaN or infinite, first at token {int(batch.positions[first])} of document "
            f"{int(batch.documents[first])} (token id {int(batch.tokens[first])})"
        )


def check_distinct_experts(
    ids: Int[Tensor, "tokens k"], layer: str, family: str, checks: PassChecks | None = None
) -> None:
    """Refuse a router that chose an expert twice for one token."""
    ordered = ids.sort(dim=1).values

    def raise_repeated_expert() -> None:
        raise _record_refusal(layer, family, "an expert was chosen twice for one token")

    refuse_if((ordered[:, 1:] == ordered[:, :-1]).any(), raise_repeated_expert, checks)


def check_selected(
    selected: Float[Tensor, "tokens k"],
    threshold: Float[Tensor, " tokens"],
    rounding: float,
    layer: str,
    family: str,
    checks: PassChecks | None = None,
) -> None:
    """Refuse unless every selected score reaches z_[k], up to the router's rounding.

    Args:
        selected: captured scores at the router's own indices.
        threshold: z_[k] of the captured scores.
        rounding: unit roundoff of the precision in which the router ranks.
        layer: name of the router module.
        family: name of its family.
        checks: where the answer is read later; None to read it now.
    """
    tolerance = ROUNDINGS * rounding * threshold.abs().clamp(min=1)
    short = threshold - selected.amin(dim=1) > tolerance

    def raise_below_threshold() -> None:
        count, first = int(short.sum()), int(short.nonzero()[0])
        lowest, needed = torch.stack([selected[first].amin(), threshold[first]]).tolist()
        why = (
            f"{count} of {len(short)} tokens chose an expert that its scores do not rank among "
            f"the first {selected.shape[1]}; the first has {lowest:.9g} < {needed:.9g}"
        )
        raise _record_refusal(layer, family, why)

    refuse_if(short.any(), raise_below_threshold, checks)


def _record_refusal(layer: str, family: str, why: str) -> UnsupportedModelError:
    """The error of a family whose record does not describe a router."""
    return UnsupportedModelError(
        f"{layer_label(layer)}: the record of family {family!r} does not describe this router "
        f"under transformers {transformers_version()}: {why}"
    )
