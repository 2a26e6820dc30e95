"""What a configuration says: sizes, code that it names, and the shape of its routed layers.

    check_config_sizes     refuses sizes that no model has, before anything of that size is built
    check_config_fields    refuses fields that fetch code, and packages that are missing
    config_tables          every table inside a configuration
    text_config            the configuration of the language model of a model
    routed_shape           experts, experts per token, widths and groups that it describes

A configuration is a file that anybody may have written. A model of ten million layers would be
built for minutes before its weights turn out to be missing, and a router that chooses -3 experts
fails far from the number that is wrong.
"""

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import nn
from transformers import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from tieline.core.errors import UnsupportedModelError, require
from tieline.serving.modeling_tieline import TielineConfig

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


def check_config_sizes(config: Mapping[str, Any]) -> None:
    """Refuse a configuration, as read from its file, whose sizes no model has.

    Layers, experts and all other numbers are bounded; 1 <= k <= E experts are chosen, from
    1 <= g <= G groups of equal size.
    """
    for table in config_tables(config):
        for name, value in table.items():
            if type(value) is int:
                _require_size(
                    abs(value) <= _largest_size(name),
                    name,
                    value,
                    f"at most {_largest_size(name):,}",
                )
        experts, chosen = _first_size(table, EXPERTS), _first_size(table, CHOSEN)
        groups, taken = _first_size(table, ("n_group",)), _first_size(table, ("topk_group",))
        if experts is not None and experts[1] >= 1 and chosen is not None:
            rule = f"1 <= {chosen[0]} <= {experts[0]}={experts[1]}"
            _require_size(1 <= chosen[1] <= experts[1], *chosen, rule)
        if groups is not None and groups[1] >= 1 and taken is not None:
            rule = f"1 <= {taken[0]} <= {groups[0]}={groups[1]}"
            _require_size(1 <= taken[1] <= groups[1], *taken, rule)


def _largest_size(name: str) -> int:
    """Largest value that a field of this name may have."""
    if name.endswith(("layers", "n_layer")):
        return MOST_LAYERS
    return MOST_EXPERTS if name in (*EXPERTS, *CHOSEN) else MOST


def _require_size(holds: bool, name: str, value: int, rule: str) -> None:
    """Refuse a size that breaks a rule, naming field, value and rule."""
    if not holds:
        raise UnsupportedModelError(f"the configuration says {name}={value}: need {rule}")


def _first_size(table: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int] | None:
    """The first of these fields that is an integer, with its value; None without one."""
    return next(((name, table[name]) for name in names if type(table.get(name)) is int), None)


def config_tables(value: Any, depth: int = DEEPEST) -> Iterator[Mapping[str, Any]]:
    """Yield every table of a configuration: that of a text model may be inside another."""
    if isinstance(value, Mapping) and depth > 0:
        yield value
        for inner in value.values():
            yield from config_tables(inner, depth - 1)


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
    """The first positive integer among the names of a size; refuses a configuration without."""
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


def text_config(model: nn.Module) -> Any:
    """Return the configuration of the language model, also inside that of a multimodal model."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


KERNEL = re.compile(r"_implementation(_internal)?$")
"""Fields that name the code of a layer; a name with a slash is fetched from the hub and run."""


PACKAGES: dict[str, tuple[str, ...]] = {
    "awq": ("gptqmodel",),
    "gptq": ("optimum", "gptqmodel"),
    "bitsandbytes": ("bitsandbytes",),
    "bitsandbytes_4bit": ("bitsandbytes",),
    "bitsandbytes_8bit": ("bitsandbytes",),
    "compressed-tensors": ("compressed_tensors",),
    "quanto": ("optimum.quanto",),
    "hqq": ("hqq",),
    "aqlm": ("aqlm",),
    "torchao": ("torchao",),
}
"""Packages that transformers needs to read weights of each kind of quantisation."""


def check_config_fields(fields: Mapping[str, Any], trust_remote_code: bool = False) -> None:
    """Refuse fields of a configuration that fetch code, and weights that cannot be read.

    Args:
        fields: the configuration, as read from its file.
        trust_remote_code: whether code that comes with a model may run.
    """
    kind = str(fields.get("model_type"))
    native = kind in CONFIG_MAPPING or kind == TielineConfig.model_type  # no code of the file runs
    require(
        trust_remote_code or native or "auto_map" not in fields,
        f"the configuration says auto_map={fields.get('auto_map')!r:.200}, code that would run: "
        "look at it, and trust it with --trust-remote-code (trust_remote_code=True)",
        UnsupportedModelError,
    )
    for table in config_tables(fields):
        for name, value in table.items():
            if not trust_remote_code and KERNEL.search(str(name)):
                _refuse_fetched_kernel(str(name), value)
        quantised = table.get("quantization_config")
        if isinstance(quantised, Mapping) and "tieline" not in quantised:
            _check_quantisation(quantised)


def _refuse_fetched_kernel(name: str, value: Any) -> None:
    """Refuse a field that names code on the hub, which transformers would fetch and run."""
    for kernel in value.values() if isinstance(value, Mapping) else [value]:
        require(
            not (isinstance(kernel, str) and "/" in kernel),
            f"the configuration says {name}={kernel!r:.200}, code that would be fetched and run: "
            "remove the field, or trust it with --trust-remote-code (trust_remote_code=True)",
            UnsupportedModelError,
        )


def _check_quantisation(fields: Mapping[str, Any]) -> None:
    """Refuse a quantisation that transformers cannot read, or not with the packages here."""
    method = fields.get("quant_method")
    if method is None:
        return
    methods = {*PACKAGES, *AUTO_QUANTIZATION_CONFIG_MAPPING}
    known = isinstance(method, str) and method in methods
    require(
        known,
        f"the weights are quantised by {method!r:.80}, which transformers does not read",
        UnsupportedModelError,
    )
    missing = [name for name in PACKAGES.get(str(method), ()) if not _is_installed(name)]
    names = " ".join(name.replace(".", "-").replace("_", "-") for name in missing)
    require(
        not missing,
        f"the weights are quantised by {method}, which is read with {names.replace(' ', ' and ')}: "
        f"pip install {names}, or give the model that was not quantised",
        UnsupportedModelError,
    )


def _is_installed(package: str) -> bool:
    """Whether a package can be imported."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False
