"""Sizes in a configuration: refused before anything of that size is built.

A configuration is a file that anybody may have written. A model of ten million layers would be
built for minutes before its weights turn out to be missing, and a router that chooses -3 experts
fails far from the number that is wrong.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from tieline.core.errors import UnsupportedModelError

MOST_LAYERS, MOST_EXPERTS, MOST = 10_000, 1 << 20, 1 << 40
DEEPEST = 16

EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts")
"""Names of the number of experts; `CHOSEN` of how many a token chooses."""

CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)


def check_sizes(config: Mapping[str, Any]) -> None:
    """Refuse a configuration, as read from its file, whose sizes no model has.

    Layers, experts and all other numbers are bounded; 1 <= k <= E experts are chosen, from
    1 <= g <= G groups of equal size.
    """
    for table in _tables(config, DEEPEST):
        for name, value in table.items():
            if type(value) is int:
                _refuse_unless(abs(value) <= _most(name), name, value, f"at most {_most(name):,}")
        experts, chosen = _first(table, EXPERTS), _first(table, CHOSEN)
        groups, taken = _first(table, ("n_group",)), _first(table, ("topk_group",))
        if experts is not None and experts[1] >= 1 and chosen is not None:
            rule = f"1 <= {chosen[0]} <= {experts[0]}={experts[1]}"
            _refuse_unless(1 <= chosen[1] <= experts[1], *chosen, rule)
        if groups is not None and groups[1] >= 1 and taken is not None:
            rule = f"1 <= {taken[0]} <= {groups[0]}={groups[1]}"
            _refuse_unless(1 <= taken[1] <= groups[1], *taken, rule)


def _most(name: str) -> int:
    if name.endswith(("layers", "n_layer")):
        return MOST_LAYERS
    return MOST_EXPERTS if name in (*EXPERTS, *CHOSEN) else MOST


def _refuse_unless(holds: bool, name: str, value: int, rule: str) -> None:
    if not holds:
        raise UnsupportedModelError(f"the configuration says {name}={value}: need {rule}")


def _first(table: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int] | None:
    return next(((name, table[name]) for name in names if type(table.get(name)) is int), None)


def _tables(value: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """Every table of a configuration: that of a text model may be inside another."""
    if isinstance(value, Mapping) and depth > 0:
        yield value
        for inner in value.values():
            yield from _tables(inner, depth - 1)
