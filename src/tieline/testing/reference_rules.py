"""What a router is meant to compute: the reference choice and weights of its rule, in float64.

Selection scores are s = f(z) + bias, f the identity, softmax or sigmoid. With groups, the best
`k_groups` of `groups` equal runs of experts are chosen first, by their largest score or by the sum
of their two largest, and then the k largest scores inside of them. Combine weights are

    softmax              w_i = p_i, p = softmax(z)
    softmax of chosen    w_i = e^{z_i} / Σ_{j ∈ S} e^{z_j}
    sigmoid              w_i = 1 / (1 + e^{-z_i})

divided by Σ_{j ∈ S} w_j + offset where the rule renormalises, times `scale`. The bias takes part in
the choice and never in the weights.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from tieline.analysis.oracles import regret
from tieline.core.errors import ParameterError, require
from tieline.core.ranking import group_scores, stable_topk, top_values, topk_mask

Logits = Float[Tensor, "tokens experts"]
Bias = Float[Tensor, " experts"]
PerToken = Float[Tensor, " tokens"]

SINGLE = torch.finfo(torch.float32)
ROUNDINGS = 8
"""Roundings that a kernel may lose in an exponential, a sum and a division."""

LEAST_MASS = 1e-30
"""Sums of weights below this are lost in float32: what they divide is undetermined."""


@dataclass(frozen=True)
class RouterRule:
    """How a router chooses experts and weights them.

    Attributes:
        ranked: what is ranked. Softmax ranks as logits do up to its own rounding and underflow,
            which "softmax" forgives and "logits" does not.
        combine: how the weight of a chosen expert follows from the logits.
        renormalise: whether the chosen weights are divided by their sum.
        scale: factor of the weights.
        bias: whether a bias per expert is added to what is ranked.
        groups: number of groups of experts; 0 for none.
        k_groups: number of groups that a token may use.
        group_score: a group's score: its largest selection score or the sum of its two largest.
        sum_offset: number added to the sum before dividing by it.
        roundoff: spacing of the numbers around 1 in which the router computes; 2^-23 in float32.
    """

    ranked: Literal["logits", "softmax", "sigmoid"] = "softmax"
    combine: Literal["softmax", "softmax of chosen", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0
    bias: bool = False
    groups: int = 0
    k_groups: int = 0
    group_score: Literal["max", "top2sum"] = "max"
    sum_offset: float = 0.0
    roundoff: float = SINGLE.eps

    def __post_init__(self) -> None:
        require(
            self.groups == 0 or 1 <= self.k_groups <= self.groups,
            f"need 1 <= k_groups <= groups, got {self.k_groups=} of {self.groups=}",
        )

    def serves(self, experts: int, k: int) -> bool:
        """Return whether k of so many experts can be chosen under the rule's groups."""
        if not self.groups:
            return k <= experts
        size = experts // self.groups
        least = 2 if self.group_score == "top2sum" else 1
        return experts % self.groups == 0 and size >= least and k <= size * self.k_groups

    def scores(self, logits: Logits, bias: Bias | None = None) -> Logits:
        """Return the selection scores f(z) + bias in float64."""
        z = logits.double()
        scores = {"logits": lambda: z, "softmax": lambda: z.softmax(-1), "sigmoid": z.sigmoid}
        ranked = scores[self.ranked]()
        return ranked if bias is None else ranked + bias.double()

    def choice(self, logits: Logits, k: int, bias: Bias | None = None) -> Int[Tensor, "tokens k"]:
        """Return the experts of each token in order; of equal scores the lower index first."""
        scores = self.scores(logits, bias)
        if self.groups:
            open_groups = topk_mask(
                group_scores(scores, self.groups, self.group_score), self.k_groups
            )
            in_open_group = open_groups.repeat_interleave(scores.shape[1] // self.groups, dim=1)
            scores = scores.masked_fill(~in_open_group, -torch.inf)
        return stable_topk(scores, k).indices

    def weights(self, logits: Logits, ids: Int[Tensor, "tokens k"]) -> Float[Tensor, "tokens k"]:
        """Return the combine weights of the experts `ids` in float64."""
        mass = self._mass(logits, ids)
        if self.renormalise and self.combine != "softmax of chosen":
            mass = mass / (mass.sum(dim=-1, keepdim=True) + self.sum_offset)
        return self.scale * mass

    def undetermined(self, logits: Logits, ids: Int[Tensor, "tokens k"]) -> Bool[Tensor, " tokens"]:
        """Return the tokens whose weights are a quotient of numbers that float32 cannot hold."""
        finite = logits.nan_to_num(nan=torch.nan, posinf=torch.nan).isnan().any(dim=1)
        mass = self._mass(logits, ids).sum(dim=-1)
        if not self.renormalise or self.combine == "softmax of chosen":
            return finite | mass.isnan()
        return finite | ~(mass > LEAST_MASS)

    def _mass(self, logits: Logits, ids: Tensor) -> Tensor:
        """Weights before they are divided and scaled."""
        z = logits.double()
        if self.combine == "softmax of chosen":
            return z.gather(1, ids).softmax(dim=-1)
        return (z.sigmoid() if self.combine == "sigmoid" else z.softmax(-1)).gather(1, ids)

    def weight_tolerance(self, logits: Logits, ids: Tensor) -> Float[Tensor, "tokens k"]:
        """Return the relative error of each weight that rounding explains.

        e^{z_i - max z} loses |z_i - max z| roundings, a sum of E numbers up to E/2 of them.
        """
        z, experts = logits.double(), logits.shape[1]
        depth = (z.amax(dim=1, keepdim=True) - z.gather(1, ids)).nan_to_num(0.0, posinf=0.0)
        if self.combine == "sigmoid":
            depth = torch.zeros_like(depth)
        return self.roundoff * (ROUNDINGS + depth + experts / 2)

    def band(self, logits: Logits, k: int, bias: Bias | None = None) -> PerToken:
        """Return by how much rounding may reverse two selection scores at the threshold."""
        scores = self.scores(logits, bias)
        threshold = top_values(scores.nan_to_num(nan=-torch.inf), k)[:, -1]
        size = threshold.abs().nan_to_num(posinf=0.0)
        if self.ranked == "logits" and bias is None:
            return torch.zeros_like(size)
        if self.ranked == "softmax":
            top = top_values(logits.double().nan_to_num(nan=-torch.inf), k)
            depth = (top[:, 0] - top[:, -1]).nan_to_num(0.0, posinf=0.0)  # z_[1] - z_[k]
            size = size * (1 + depth)  # as many roundings as the exponential of the threshold loses
        if bias is not None:
            size = size + bias.double().abs().amax() + self.scores(logits).abs().amax(dim=1)
        return ROUNDINGS * self.roundoff * size.nan_to_num(0.0, posinf=0.0) + SINGLE.tiny

    def regret(
        self, chosen: Bool[Tensor, "tokens experts"], scores: Logits, band: PerToken
    ) -> PerToken:
        """Return max over experts left out minus min over the chosen; at most the band if right.

        With groups, over the experts of the groups that were open to the token. Groups tie as
        experts do: of those within the band, the ones that explain the choice best count as open.
        Infinite where the choice uses a group that cannot be open.
        """
        if not self.groups:
            return regret(chosen, scores)
        open_groups, possible = self._open_groups(chosen, scores, band)
        in_open_group = open_groups.repeat_interleave(scores.shape[1] // self.groups, dim=1)
        value = regret(chosen, scores.masked_fill(~in_open_group, -torch.inf))
        return value.masked_fill(~possible, torch.inf)

    def _open_groups(
        self, chosen: Tensor, scores: Tensor, band: PerToken
    ) -> tuple[Bool[Tensor, "tokens groups"], Bool[Tensor, " tokens"]]:
        """Groups that explain a choice best, and whether any do."""
        of_groups = group_scores(scores, self.groups, self.group_score)
        threshold = top_values(of_groups, self.k_groups)[:, -1:]
        slack = 2 * band[:, None]
        sure, able = of_groups > threshold + slack, of_groups >= threshold - slack
        used = chosen.unflatten(-1, (self.groups, -1)).any(dim=-1)
        needed = sure | used
        possible = (needed.sum(dim=1) <= self.k_groups) & ~(used & ~able).any(dim=1)
        missed = scores.masked_fill(chosen, -torch.inf).unflatten(-1, (self.groups, -1)).amax(-1)
        cost = missed.nan_to_num(neginf=-1e300).masked_fill(~able, torch.inf)
        cost = cost.masked_fill(needed, -torch.inf)  # needed first, then those that miss least
        return topk_mask(-cost, self.k_groups), possible


RULES: dict[str, RouterRule] = {
    "softmax": RouterRule(),
    "softmax-raw": RouterRule(renormalise=False),
    "softmax-of-chosen": RouterRule("logits", "softmax of chosen"),
    "softmax-biased": RouterRule(renormalise=False, bias=True),
    "sigmoid": RouterRule("sigmoid", "sigmoid", sum_offset=1e-20),
    "sigmoid-raw": RouterRule("sigmoid", "sigmoid", renormalise=False),
    "sigmoid-biased": RouterRule("sigmoid", "sigmoid", bias=True, sum_offset=1e-20),
    "llama4": RouterRule("logits", "sigmoid", renormalise=False),
    "deepseek-v2": RouterRule(renormalise=False, scale=16.0, groups=8, k_groups=3),
    "deepseek-v3": RouterRule(
        "sigmoid",
        "sigmoid",
        scale=2.5,
        bias=True,
        groups=8,
        k_groups=4,
        group_score="top2sum",
        sum_offset=1e-20,
    ),
}
"""Rules by name; "raw" weights are not divided by their sum."""


def rule_named(text: str) -> RouterRule:
    """Read "NAME" or "NAME,field=value,...", such as "sigmoid,scale=2.5,groups=4,k_groups=2"."""
    name, *changes = text.split(",")
    require(name in RULES, f"no rule is called {name!r:.40}; there are {', '.join(RULES)}")
    rule, kinds = RULES[name], {field.name: field.type for field in fields(RouterRule)}
    values: dict[str, object] = {}
    for change in changes:
        key, _, value = change.partition("=")
        require(key in kinds, f"a rule has no field {key!r:.40}; there are {', '.join(kinds)}")
        values[key] = _rule_field_value(key, value, type(getattr(rule, key)))
    return replace(rule, **values)  # type: ignore[arg-type]


def _rule_field_value(field: str, text: str, kind: type) -> object:
    """The value of a field of a rule, read from text."""
    if kind is bool:
        require(text in ("true", "false"), f"{field} is true or false, got {text!r:.40}")
        return text == "true"
    try:
        value = kind(text)
    except ValueError:
        raise ParameterError(f"{field} is a number, got {text!r:.40}") from None
    require(kind is str or math.isfinite(value), f"{field} must be finite, got {text!r:.40}")
    return value
