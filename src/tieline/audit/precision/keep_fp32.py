"""Which routers to leave in float32, so that little memory recovers most of the damage.

The jump-weighted damage of layers on clean inputs adds up, D = Σ_l D_l, so the routers of the most
damage per byte are kept until a share of D is gone. Whether that holds when errors compound over
depth is measured by the KL of a run that keeps them.
"""

from collections.abc import Mapping

from torch import nn

from tieline.audit.precision.records import KeepList
from tieline.errors import require
from tieline.hf.formats import format_named

__all__ = ["extra_bytes", "keep_list"]


def extra_bytes(router: nn.Module, number_format: str) -> int:
    """Bytes that the router's weights take in float32 beyond those of the format."""
    bits = 32 - format_named(number_format).bits
    return sum(weight.numel() for weight in router.parameters()) * bits // 8


def keep_list(damages: Mapping[str, float], costs: Mapping[str, int], wanted: float) -> KeepList:
    """The routers whose damage is at least `wanted` of the whole, by damage per byte.

    Args:
        damages: jump-weighted damage D_l >= 0 of each layer.
        costs: bytes to keep each layer's router in float32.
        wanted: share of the damage to recover, in (0, 1].
    """
    require(0 < wanted <= 1, f"the share of damage to recover is in (0, 1], got {wanted}")
    whole = sum(damages.values())
    order = sorted(damages, key=lambda name: damages[name] / max(1, costs[name]), reverse=True)
    kept: list[str] = []
    gone = 0.0
    for name in order:
        if gone >= wanted * whole * (1 - 1e-12) or damages[name] <= 0:
            break
        kept.append(name)
        gone += damages[name]
    return KeepList(
        wanted=wanted,
        layers=tuple(kept),
        recovered=gone / whole if whole > 0 else 0.0,
        bytes=sum(costs[name] for name in kept),
        bytes_all=sum(costs.values()),
    )
