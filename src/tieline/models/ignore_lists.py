r"""The routers of a model, as quantisation libraries take modules that stay in full precision.

llm-compressor    recipe modifier `ignore=["lm_head", "re:^model\.layers\.\d+\.mlp\.gate$"]`
AutoRound         `layer_config={"^model\.layers\.\d+\.mlp\.gate$": {"bits": 16, ...}}`
GPTQModel         `QuantizeConfig(dynamic={"-:^model\.layers\.\d+\.mlp\.gate$": {}})`
bitsandbytes      `BitsAndBytesConfig(llm_int8_skip_modules=["lm_head", "model\.layers\.…"])`

Names that differ in numbers alone become one pattern where it fits no other module; else they stay
as they are. A router that holds linear layers is named by these, since most of the libraries look
at the names of linear layers alone. The output head is named where the library would quantise it
otherwise: llm-compressor always, bitsandbytes as soon as a list is given.
"""

import re
from collections.abc import Collection
from typing import Any

from torch import nn

from tieline.models.families import family_of, find_routers

FULL_PRECISION = {"bits": 16, "data_type": "fp", "act_bits": 16, "act_data_type": "fp"}
"""What AutoRound does to layers that it leaves alone, activations included."""


def ignore_lists(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return, by library, the argument that keeps all routers of a model out of quantisation."""
    names, modules = router_weights(model), dict(model.named_modules())
    output_head = getattr(model, "get_output_embeddings", lambda: None)()
    head = [name for name, m in modules.items() if output_head is not None and m is output_head]
    patterns = list(dict.fromkeys(_module_pattern(name, names, modules) for name in names))
    return {
        "llm-compressor": {"ignore": [*head, *(f"re:^{pattern}$" for pattern in patterns)]},
        "auto-round": {
            "layer_config": {f"^{pattern}$": dict(FULL_PRECISION) for pattern in patterns}
        },
        "gptqmodel": {"dynamic": {f"-:^{pattern}$": {} for pattern in patterns}},
        "bitsandbytes": {"llm_int8_skip_modules": [*head, *patterns]},
    }


def router_weights(model: nn.Module) -> list[str]:
    """Return the names of the modules that hold the weights of the routers.

    These are the linear layers of a router, or the router itself where its matrix is a parameter
    of its own. Where the block routes, only the module of its routing matrix is meant.
    """
    names = []
    for name, router in find_routers(model).items():
        family = family_of(router)
        if family is not None and family.in_block and family.weight:
            names.append(f"{name}.{family.weight.rpartition('.')[0]}")
            continue
        inner = [path for path, module in router.named_modules() if isinstance(module, nn.Linear)]
        names += [".".join(filter(None, (name, path))) for path in inner or [""]]
    return names


def _module_pattern(name: str, names: Collection[str], modules: Collection[str]) -> str:
    """The pattern of a name with any numbers, or the name if that fits modules not in `names`."""
    pattern = re.sub(r"(?<=\.)\d+(?=\\\.|$)", r"\\d+", re.escape(name))
    matches = {other for other in modules if re.fullmatch(pattern, other)}
    return pattern if matches <= set(names) else re.escape(name)
