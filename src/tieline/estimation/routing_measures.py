"""A fitted mixture seen as a router: its margins and boundary mass, as `tieline inspect` has them.

The scores of a gate are the logits of a router, and the expert with the largest score is the one
that it would choose. What a model's layer is asked, a regression can be asked too: how near its
rows are to a tie, and how many would change their expert under noise or rounding.
"""

from jaxtyping import Float
from torch import Tensor

from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters
from tieline.geometry.distance import expert_distances, nearest_tie
from tieline.geometry.measures import MeasureSettings, measure_layer
from tieline.geometry.records import LayerMeasures
from tieline.ranking import stable_topk
from tieline.trace.record import LayerFacts, LayerTrace

__all__ = ["routing_measures"]


def routing_measures(
    model: MoEModel,
    params: MoEParameters,
    x: Float[Tensor, "rows d"],
    *,
    k: int = 1,
    name: str = "gate",
    settings: MeasureSettings | None = None,
) -> LayerMeasures:
    """All measures of the choice of the k largest scores on the rows x.

    Distances to the nearest tie are exact for linear gates and not answered for the others.

    Args:
        model: the family.
        params: one set of parameters, without leading axes.
        x: rows (n, d) in the units of the parameters.
        k: number of experts that the choice would keep, 1 <= k <= E.
        name: of the layer in the record.
        settings: grids and formats; those of `tieline inspect` by default.
    """
    scores = model.scores(params, x)
    ranked = stable_topk(scores, model.n_experts)
    linear = model.gate == "linear"
    distance = nearest_tie(scores, expert_distances(params.router), k, ranked).distance
    trace = LayerTrace(
        name=name,
        facts=LayerFacts(model.n_experts, k, affine=linear),
        experts=ranked.indices,
        scores=ranked.values,
        weights=model.weights(params, x).gather(1, ranked.indices[:, :k]),
        distance=distance if linear else None,
        inputs=x,
    )
    return measure_layer(trace, settings, weight=params.router if linear else None)
