"""The shape of a model's routed layers, from its configuration alone: no weight is read."""

from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

from tieline.errors import UnsupportedModelError
from tieline.hf.loading import _explained, _source
from tieline.hf.shipped import SHIPPED_FOLDER

__all__ = ["NAMES", "RoutedShape", "read_shape", "shape_of"]

NAMES: dict[str, tuple[str, ...]] = {
    "n_experts": ("num_local_experts", "n_routed_experts", "num_experts", "moe_num_experts"),
    "k": (
        "num_experts_per_tok",
        "num_experts_per_token",
        "top_k_experts",
        "moe_topk",
        "moe_top_k",
        "moe_k",
    ),
    "width": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "ffn_hidden_size",
        "intermediate_size",
    ),
    "hidden": ("hidden_size", "d_model"),
}
"""What configurations call each number; the first name that is there counts."""


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


def read_shape(
    name: str | Path | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> RoutedShape:
    """The shape that a model's config.json tells.

    Args:
        name: folder with a config.json or id on the hub; None for the model in the box.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.
    """
    source = SHIPPED_FOLDER if name is None else _source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"local_files_only": True} if isinstance(source, Path) else {"revision": revision}
    with _explained(source, "configuration"):
        config = AutoConfig.from_pretrained(source, **options)
    return shape_of(config)


def shape_of(config: Any) -> RoutedShape:
    """The shape that a configuration of transformers describes; its text part, if it has several.

    Refuses a configuration without experts, and one whose experts per token is a list.
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes = {field: _number(config, field) for field in NAMES}
    groups = getattr(config, "n_group", None) or 1
    limited = (getattr(config, "topk_group", None) or 1) if groups > 1 else 1
    shared = getattr(config, "n_shared_experts", None) or 0
    return RoutedShape(**sizes, shared=int(shared), n_groups=int(groups), k_groups=int(limited))


def _number(config: Any, field: str) -> int:
    for name in NAMES[field]:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    kind = getattr(config, "model_type", type(config).__name__)
    raise UnsupportedModelError(
        f"the configuration of {kind!r} names no {field}: none of {', '.join(NAMES[field])} is a "
        "positive integer; give --experts, --topk, --expert-width and --hidden instead"
    )
