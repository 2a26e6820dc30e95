"""What a configuration says: sizes, code that it names, and the shape of its routed layers.

A configuration is a file that anybody may have written. A model of ten million layers would be
built for minutes before its weights turn out to be missing, and a router that chooses -3 experts
fails far from the number that is wrong.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, NamedTuple

from torch import nn
from transformers import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.untrusted_input import CHOSEN, EXPERTS, config_tables, refuse_fetched_kernels
from tieline.serving.modeling_tieline import TielineConfig

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
    if not trust_remote_code:
        refuse_fetched_kernels(fields)
    for table in config_tables(fields):
        quantised = table.get("quantization_config")
        if isinstance(quantised, Mapping):
            _check_quantisation(quantised)


def _check_quantisation(fields: Mapping[str, Any]) -> None:
    """Refuse a quantisation that transformers cannot read, or not with the packages here."""
    method = fields.get("quant_method")
    if method is None:
        return
    methods = {*PACKAGES, *AUTO_QUANTIZATION_CONFIG_MAPPING}
    require(
        isinstance(method, str) and method in methods,
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
