"""What the rows of an audit come to, in plain words."""

from collections.abc import Sequence

from tieline.audit.metrics import percent
from tieline.audit.precision.records import PerturbationEffect
from tieline.hf.formats import FORMATS

__all__ = ["HARMLESS", "harmless", "verdict"]

HARMLESS = 0.001
"""Nats per token by which a format may raise the loss and count as harmless."""


def harmless(row: PerturbationEffect) -> bool:
    """Whether the loss rises by less than `HARMLESS`, and the KL is not larger than that either."""
    risen, kl = row.loss.value, row.kl.value
    return risen is not None and kl is not None and max(risen, kl) < HARMLESS


def verdict(rows: Sequence[PerturbationEffect]) -> str:
    """Which formats the routers bear, where damage comes from, and whether it compounds."""
    routers = [row for row in rows if row.kind == "rounding" and row.part == "router"]
    if not routers:
        return "No rounding of the routers was run: nothing is said about formats."
    return " ".join(filter(None, (_borne(routers), _worst(routers), _whole(rows))))


def _borne(routers: Sequence[PerturbationEffect]) -> str:
    good = [row for row in routers if harmless(row)]
    if not good:
        return f"No format is harmless for the routers: each costs {HARMLESS:g} nats per token."
    small = min(good, key=lambda row: (FORMATS[str(row.level)].bits, row.kl.value or 0.0))
    names = ", ".join(str(row.level) for row in good)
    flips, cost = percent(small.full.value or 0.0), _nats(small.kl.value)
    return (
        f"The routers bear {names} (under {HARMLESS:g} nats per token): of these {small.level} is "
        f"the smallest, with {flips} of tokens changing experts per layer and a KL of {cost}."
    )


def _worst(routers: Sequence[PerturbationEffect]) -> str:
    bad = [row for row in routers if not harmless(row)]
    if not bad:
        return ""
    worst = max(bad, key=lambda row: row.kl.value or 0.0)
    flips, cost, risen = worst.full.value or 0.0, _nats(worst.kl.value), worst.loss.value or 0.0
    names = ", ".join(str(row.level) for row in bad)
    return (
        f"They do not bear {names}: under {worst.level}, {percent(flips)} of tokens change experts "
        f"per layer, for a KL of {cost} and {risen:+.2g} nats of loss."
    )


def _whole(rows: Sequence[PerturbationEffect]) -> str:
    """The whole model in bf16, or in what comes first: flips add up over depth."""
    model = [row for row in rows if row.part == "model" and row.kind == "rounding"]
    model.sort(key=lambda row: row.level != "bf16")
    if not model or model[0].compounding is None:
        return ""
    row, share = model[0], model[0].by_flips
    flips = f"{percent(row.full.value or 0.0)} of tokens change experts per layer"
    more = f"{row.compounding:.1f} times what each router does by itself"
    words = f"With the whole model in {row.level}, {flips}, {more}"
    if share is None or share < 0.01:
        return f"{words}."
    return f"{words}, and flips are behind {percent(min(1.0, share))} of the damage."


def _nats(value: float | None) -> str:
    return f"{value or 0.0:.2g} nats"
