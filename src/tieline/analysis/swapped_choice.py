"""The choice of a router with the experts of ranks k and k + 1 swapped.

Raise the score of rank k + 1 to z_[k], and the router may as well choose its expert j instead of
the expert i of rank k. Expert i leaves; j enters with the weight that the family gives to the
selection score z_[k]. Without a correction bias both scores are then equal and j takes over the
weight of i. With a bias b the scores that make the weights differ by it at the tie,

    w_j / w_i = s(z_[k] - b_j) / s(z_[k] - b_i),

s the function that turns what is ranked into a weight, and the weights of the chosen keep their sum
where the family renormalises them. Factors that belong to an expert go with it. The jump is thus
that of the layer's output across the wall nearest to the token in the order of its scores; at ties
between groups of experts it is not measured (Def. 10.1).

A smoothed router uses both experts near a tie. There the two exchange their shares, which at the
tie itself are equal: what is left of the jump is what the ramp makes of the gap.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import UnsupportedModelError
from tieline.models.families import RouterFamily, family_of
from tieline.models.parallel import full_tensor
from tieline.models.router_output import Choice
from tieline.models.router_rule import combine_rule, family_scale, renormalises_weights
from tieline.trace.record import LayerTrace, take_tokens

PerToken = Float[Tensor, " tokens"]
Places = Int[Tensor, " tokens"]

TINY = 1e-30


def recorded_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"]) -> Choice:
    """What the router chose for these tokens."""
    weights, experts = layer.combined()
    return Choice(weights[tokens], experts[tokens].long())


def swapped_choice(layer: LayerTrace, tokens: Int[Tensor, " chosen"], router: nn.Module) -> Choice:
    """The same with the expert of rank k + 1 in the place of that of rank k.

    Args:
        layer: a trace with at least k + 1 ranks.
        tokens: places of the tokens in it.
        router: the layer's router, for the facts of its family.
    """
    family, k = family_of(router), layer.facts.k
    if family is None:
        raise UnsupportedModelError(f"{type(router).__name__} is no router of a known family")
    weights, ids = recorded_choice(layer, tokens)
    ids, weights, before = ids.clone(), weights.clone(), weights.sum(dim=1, keepdim=True)
    some = take_tokens(layer, tokens)
    ids[:, k - 1] = some.experts[:, k].long()
    entering = _entering_weight(some, family, router)
    if layer.smoothed:  # the expert that leaves takes the place and the share of the other
        ids[:, k] = some.experts[:, k - 1].long()
        weights[:, k] *= weights[:, k - 1] / entering.clamp(min=TINY)
    weights[:, k - 1] = entering
    if layer.bias is not None and renormalises_weights(family, router):
        weights *= before / weights.sum(dim=1, keepdim=True).clamp(min=TINY)
    return Choice(weights, ids)


def _entering_weight(some: LayerTrace, family: RouterFamily, router: nn.Module) -> PerToken:
    """Weight that the entering expert gets in place of the leaving one, before normalisation."""
    k = some.facts.k
    assert some.weights is not None
    leaving, entering = some.experts[:, k - 1].long(), some.experts[:, k].long()
    if family.skip_class:  # to skip has no weight of its own to hand over
        return _raw_weight(some, family, router, entering)
    ratio = torch.ones(len(leaving))
    if some.bias is not None:
        raw = [_raw_weight(some, family, router, experts) for experts in (entering, leaving)]
        ratio = raw[0] / raw[1].clamp(min=TINY)
    scale = family_scale(family, router)
    if isinstance(scale, Tensor) and scale.numel() > 1:
        factor = full_tensor(scale.detach()).float().cpu()
        ratio = ratio * factor[entering] / factor[leaving]
    return some.weights[:, k - 1] * ratio


def _raw_weight(
    some: LayerTrace, family: RouterFamily, router: nn.Module, experts: Int[Tensor, " tokens"]
) -> PerToken:
    """s(z_[k] - b_e): the weight of an expert whose selection score is at the threshold."""
    assert some.scores is not None
    bias = 0.0 if some.bias is None else some.bias[experts]
    score = some.scores[:, some.facts.k - 1] - bias
    if some.facts.units == "logits" and combine_rule(family, router) == "sigmoid":
        return score.sigmoid()
    return score.clamp(min=0)
