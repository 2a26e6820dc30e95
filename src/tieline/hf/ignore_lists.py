"""The routers of a model, as quantisation libraries take modules that stay in full precision.

llm-compressor    recipe modifier `ignore=[...]`
AutoRound         `layer_config={name: {"bits": 16}}`
GPTQModel         `QuantizeConfig(dynamic={"-:regex": {}})`
bitsandbytes      `BitsAndBytesConfig(llm_int8_skip_modules=[...])`
"""

import re
from typing import Any

from torch import nn

from tieline.hf.families import find_routers


def ignore_lists(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return, by library, the argument that keeps all routers of a model out of quantisation.

    Routers are named one by one, so that nothing else of a similar name is left out; the output
    head, which all of the libraries leave alone, is not among them.
    """
    names = list(find_routers(model))
    return {
        "llm-compressor": {"ignore": names},
        "auto-round": {"layer_config": {name: {"bits": 16, "data_type": "fp"} for name in names}},
        "gptqmodel": {"dynamic": {f"-:^{re.escape(name)}$": {} for name in names}},
        "bitsandbytes": {"llm_int8_skip_modules": names},
    }
