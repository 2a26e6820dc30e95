"""Rules of routers: the reference choice and weights, in float64.

Selection scores are s = f(z) + bias, f the identity, softmax or sigmoid. With groups, the best
`k_groups` of `groups` equal runs of experts are chosen first, by their largest score or by the sum
of their two largest, and then the k largest scores inside of them. Combine weights are

    softmax              w_i = p_i, p = softmax(z)
    softmax of chosen    w_i = e^{z_i} / Σ_{j ∈ S} e^{z_j}
    sigmoid              w_i = 1 / (1 + e^{-z_i})

divided by Σ_{j ∈ S} w_j + offset if the rule renormalises, times `scale`. The bias affects the
choice and never the weights.
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

FLOAT32 = torch.finfo(torch.float32)
ROUNDINGS = 8
"""Number of roundings that a kernel may make in an exponential, a sum and a division."""

LEAST_MASS = 1e-30
"""Smallest sum of weights that float32 resolves: quotients by smaller sums are undetermined."""


@dataclass(frozen=True)
class RouterRule:
    """How a router chooses experts and weights them.

    Attributes:
        ranked: the scores that are ranked. Softmax ranks like logits up to its own rounding and
            underflow, which "softmax" tolerates and "logits" does not.
        combine: how the weight of a chosen expert follows from the logits.
        renormalise: whether the chosen weights are divided by their sum.
        scale: factor of the weights.
        bias: whether a bias per expert is added to the ranked scores.
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
    roundoff: float = FLOAT32.eps

    def __post_init__(self) -> None:
        require(
            self.groups == 0 or 1 <= self.k_groups <= self.groups,
            f"need 1 <= k_groups <= groups, got {self.k_groups=} of {self.groups=}",
        )

    def serves(self, experts: int, k: int) -> bool:
        """Return whether k of this number of experts can be chosen from the rule's groups."""
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
        """Return the chosen experts in descending score order; the lower index first if equal."""
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
        mass = self._unnormalised_weights(logits, ids)
        if self.renormalise and self.combine != "softmax of chosen":
            mass = mass / (mass.sum(dim=-1, keepdim=True) + self.sum_offset)
        return self.scale * mass

    def undetermined(self, logits: Logits, ids: Int[Tensor, "tokens k"]) -> Bool[Tensor, " tokens"]:
        """Return the mask of tokens whose weights are quotients that float32 cannot represent."""
        nonfinite = logits.nan_to_num(nan=torch.nan, posinf=torch.nan).isnan().any(dim=1)
        mass = self._unnormalised_weights(logits, ids).sum(dim=-1)
        if not self.renormalise or self.combine == "softmax of chosen":
            return nonfinite | mass.isnan()
        return nonfinite | ~(mass > LEAST_MASS)

    def _unnormalised_weights(self, logits: Logits, ids: Tensor) -> Tensor:
        """Return the weights before renormalisation and scaling."""
        z = logits.double()
        if self.combine == "softmax of chosen":
            return z.gather(1, ids).softmax(dim=-1)
        return (z.sigmoid() if self.combine == "sigmoid" else z.softmax(-1)).gather(1, ids)

    def weight_tolerance(self, logits: Logits, ids: Tensor) -> Float[Tensor, "tokens k"]:
        """Return the relative error of each weight that rounding explains.

        e^{z_i - max z} has an error of |z_i - max z| roundings, a sum of E numbers of up to E/2.
        """
        z, experts = logits.double(), logits.shape[1]
        depth = (z.amax(dim=1, keepdim=True) - z.gather(1, ids)).nan_to_num(0.0, posinf=0.0)
        if self.combine == "sigmoid":
            depth = torch.zeros_like(depth)
        return self.roundoff * (ROUNDINGS + depth + experts / 2)

    def band(self, logits: Logits, k: int, bias: Bias | None = None) -> PerToken:
        """Return the difference (T,) of two scores at the threshold that rounding may reverse."""
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
        return ROUNDINGS * self.roundoff * size.nan_to_num(0.0, posinf=0.0) + FLOAT32.tiny

    def regret(
        self, chosen: Bool[Tensor, "tokens experts"], scores: Logits, band: PerToken
    ) -> PerToken:
        """Return max over experts left out minus min over chosen ones; a right choice has <= band.

        With groups, the maximum is over the experts of the groups that the token may use. Groups
        tie as experts do: of groups within the band, those that explain the choice best are used.
        Infinite if the choice uses a group that cannot be among the best.
        """
        if not self.groups:
            return regret(chosen, scores)
        open_groups, possible = self._best_open_groups(chosen, scores, band)
        in_open_group = open_groups.repeat_interleave(scores.shape[1] // self.groups, dim=1)
        value = regret(chosen, scores.masked_fill(~in_open_group, -torch.inf))
        return value.masked_fill(~possible, torch.inf)

    def _best_open_groups(
        self, chosen: Tensor, scores: Tensor, band: PerToken
    ) -> tuple[Bool[Tensor, "tokens groups"], Bool[Tensor, " tokens"]]:
        """Return the mask of the groups that explain a choice best, and whether there are such."""
        of_groups = group_scores(scores, self.groups, self.group_score)
        threshold = top_values(of_groups, self.k_groups)[:, -1:]
        slack = 2 * band[:, None]
        must_be_open, can_be_open = of_groups > threshold + slack, of_groups >= threshold - slack
        used = chosen.unflatten(-1, (self.groups, -1)).any(dim=-1)
        needed = must_be_open | used
        possible = (needed.sum(dim=1) <= self.k_groups) & ~(used & ~can_be_open).any(dim=1)
        missed = scores.masked_fill(chosen, -torch.inf).unflatten(-1, (self.groups, -1)).amax(-1)
        cost = missed.nan_to_num(neginf=-1e300).masked_fill(~can_be_open, torch.inf)
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
    """Parse the value of a rule's field; raises if it is invalid."""
    if kind is bool:
        require(text in ("true", "false"), f"{field} is true or false, got {text!r:.40}")
        return text == "true"
    try:
        value = kind(text)
    except ValueError:
        raise ParameterError(f"{field} is a number, got {text!r:.40}") from None
    require(kind is str or math.isfinite(value), f"{field} must be finite, got {text!r:.40}")
    return value
