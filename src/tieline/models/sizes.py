"""Sizes in a configuration: the shape of routed layers, and limits that are checked first.

    check_sizes     refuses sizes that no model has, before anything of that size is built
    tables          every table inside a configuration
    routed_shape    experts, experts per token, widths and groups that a configuration describes

A configuration is a file that anybody may have written. A model of ten million layers would be
built for minutes before its weights turn out to be missing, and a router that chooses -3 experts
fails far from the number that is wrong.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

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
    for table in tables(config):
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


def tables(value: Any, depth: int = DEEPEST) -> Iterator[Mapping[str, Any]]:
    """Yield every table of a configuration: that of a text model may be inside another."""
    if isinstance(value, Mapping) and depth > 0:
        yield value
        for inner in value.values():
            yield from tables(inner, depth - 1)


SIZE_NAMES: dict[str, tuple[str, ...]] = {
    "n_experts": EXPERTS,
    "k": CHOSEN,
    "width": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "ffn_hidden_size",
        "intermediate_size",
    ),
    "hidden": ("hidden_size", "d_model"),
}
"""Names of each number in configurations; the first one present counts."""


class RoutedShape(NamedTuple):
    """Shape of a routed layer.

    Attributes:
        n_experts: routed experts N.
        k: experts chosen per token.
        width: hidden width H of an expert.
        hidden: width of the model.
        shared: experts that every token uses; 0 where the configuration names none.
        n_groups: groups of experts, 1 where routing is not group-limited.
        k_groups: groups that a token may choose from.
    """

    n_experts: int
    k: int
    width: int
    hidden: int
    shared: int = 0
    n_groups: int = 1
    k_groups: int = 1


def routed_shape(
    config: Any, changes: Mapping[str, Mapping[str, Any]] | None = None
) -> RoutedShape:
    """Return the shape that a configuration, or its text part, describes.

    Refuses a configuration without experts, and one whose experts per token is a list.

    Args:
        config: of the model.
        changes: facts of the changes of the model, by feature; those of one that gave the model its
            experts name "n_experts" and "k".
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes_of_experts = {"n_experts", "k"}
    changed = [facts for facts in (changes or {}).values() if sizes_of_experts <= facts.keys()]
    stated = {name: changed[-1][name] for name in sizes_of_experts} if changed else {}
    sizes = {field: stated.get(field) or _positive_size(config, field) for field in SIZE_NAMES}
    groups = getattr(config, "n_group", None) or 1
    limited = (getattr(config, "topk_group", None) or 1) if groups > 1 else 1
    shared = getattr(config, "n_shared_experts", None) or 0
    return RoutedShape(**sizes, shared=int(shared), n_groups=int(groups), k_groups=int(limited))


def _positive_size(config: Any, field: str) -> int:
    for name in SIZE_NAMES[field]:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    kind = getattr(config, "model_type", type(config).__name__)
    raise UnsupportedModelError(
        f"the configuration of {kind!r} names no {field}: none of "
        f"{', '.join(SIZE_NAMES[field])} is a positive integer; give --n-experts, --k, "
        "--expert-width and --hidden instead"
    )
