"""What a served precision does to a model, where a comparison has measured it.

`diff` of a model in float32 with itself in a precision that models are served in measures what
`inspect` and `audit` report (`serving`): the share of tokens that change an expert somewhere, the
KL of the predictions and the change of the loss. Nothing is replayed.
"""

from collections.abc import Mapping

from jaxtyping import Bool, Int
from torch import Tensor

from tieline.analysis.attribution import recorded_format
from tieline.analysis.diff_records import LogitsDiff
from tieline.analysis.serving import Serving, equal_layers, exact_ties, replay_bytes, router_state
from tieline.analysis.settings import SERVED
from tieline.core.statistics import Estimate, clustered_error
from tieline.trace.record import RoutingTrace


def served_precision(side: Mapping[str, object]) -> str | None:
    """Return the served precision in which the whole of a side was computed; None for others."""
    if " " in str(side.get("emulated", "")):
        return None  # a part of the model alone
    recorded = recorded_format(side)
    return next((name for name, emulated in SERVED.items() if emulated == recorded), None)


def measured_serving(
    traces: tuple[RoutingTrace, RoutingTrace],
    flipped: Bool[Tensor, " tokens"],
    documents: Int[Tensor, " tokens"],
    logits: LogitsDiff | None,
) -> Serving | None:
    """Return what the served precision of one side does beside the other in float32.

    None unless one side is in float32, the other in a served precision, routers are not smoothed,
    and predictions were compared. The KL is that of A to B, whichever is served.

    Args:
        traces: the routing of A and of B.
        flipped: tokens that flip in at least one layer.
        documents: document of each token.
        logits: how far the final distributions are apart.
    """
    sides = [trace.provenance for trace in traces]
    exact = [recorded_format(side) == "fp32" for side in sides]
    if logits is None or sum(exact) != 1:
        return None
    precision = served_precision(sides[exact.index(False)])
    if precision is None:
        return None
    plain, sign = traces[exact.index(True)], 1.0 if exact[0] else -1.0
    if any(layer.smoothed for layer in plain.layers):
        return None  # compared are the k experts of top-k, not those with any weight
    sequences = len(documents.unique())
    return Serving(
        precision=precision,
        changed=Estimate(
            flipped.double().mean().item(), clustered_error(flipped.double(), documents)
        ),
        kl=Estimate(logits.kl, logits.kl_error),
        loss=Estimate(sign * (logits.loss_b - logits.loss_a), logits.loss_error),
        tokens=len(flipped),
        sequences=sequences,
        layers=len(plain.layers),
        replay_bytes=sum(replay_bytes(layer, weights=False) for layer in plain.layers),
        routers=router_state(plain.layers),
        equal_layers=equal_layers(plain.layers),
        exact_ties=exact_ties(plain.layers),
    )
