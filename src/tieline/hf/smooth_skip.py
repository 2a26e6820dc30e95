"""How a slot that is not used is left out, so that it costs nothing where the experts allow it.

    experts of transformers, eager        index E, but for the families in `EAGER_COUNTS_ALL`
    the same, grouped_mm and batched_mm   index E, with `_is_expert_parallel` set on the experts
    the same, "tieline"                   index E
    longcat_flash with zero experts       the index of the first zero expert, which is the identity
    all others                            an expert of the token's own with weight 0

The implementation is read when the router runs, since it may be changed at any time.
"""

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.hf.family_table import TRANSFORMERS_FAMILIES

__all__ = ["SkipRule", "experts_of", "skip_rule"]

EAGER_COUNTS_ALL = frozenset({"gpt_oss", "nemotron_h", "openai_privacy_filter"})
"""Families whose eager experts take the index E for an expert."""

EAGER_SKIPS = frozenset(family.name for family in TRANSFORMERS_FAMILIES) - EAGER_COUNTS_ALL
"""Families with the experts interface whose eager experts leave the index E out."""

EAGER_ALONE = frozenset({"step3p7"})
"""Families without the experts interface whose experts leave the index E out."""

IMPLEMENTATIONS = frozenset({"grouped_mm", "batched_mm", "tieline"})
"""Implementations that leave the index E out."""

FLAG = "_is_expert_parallel"


@dataclass(frozen=True)
class SkipRule:
    """When the index `sentinel` skips a slot.

    Attributes:
        sentinel: the index.
        eager: whether it does under the family's eager experts.
        config: configuration whose `_experts_implementation` is in force; None where the family has
            one implementation only.
    """

    sentinel: int
    eager: bool
    config: Any = None

    @property
    def works(self) -> bool:
        """Whether the index skips a slot at present."""
        name = getattr(self.config, "_experts_implementation", None) or "eager"
        return self.eager if name == "eager" else name in IMPLEMENTATIONS

    def applied(
        self, ids: Int[Tensor, "tokens columns"], share: Float[Tensor, "tokens columns"]
    ) -> Int[Tensor, "tokens columns"]:
        """The experts with the index in the place of those that are not used, if it skips them."""
        return ids.masked_fill(share == 0, self.sentinel) if self.works else ids


def experts_of(model: nn.Module, router_name: str) -> nn.Module | None:
    """The experts beside a router; None where they are no module."""
    parent = model.get_submodule(router_name.rpartition(".")[0])
    experts = getattr(parent, "experts", None)
    return experts if isinstance(experts, nn.Module) else None


def skip_rule(family: str, experts: nn.Module | None, n_experts: int) -> SkipRule:
    """The rule for the routers of a family.

    Args:
        family: its name.
        experts: the experts that the router serves.
        n_experts: number of experts that the router ranks.
    """
    if family == "longcat_flash" and getattr(experts, "zero_expert_num", 0):
        return SkipRule(int(getattr(experts, "num_routed_experts", 0)), eager=True)
    if experts is None or not hasattr(experts, FLAG):
        return SkipRule(n_experts, eager=family in EAGER_ALONE)
    config = getattr(experts, "config", None)
    return SkipRule(n_experts, eager=family in EAGER_SKIPS, config=config)
