"""Router inputs of the trained model in the box, in float32 or in an emulated format.

    router_states   inputs and weight of every router on the first tokens of the text in the box

Used by claims about real hidden states; each format is computed once per process.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import require

__all__ = ["RouterStates", "router_states"]

WINDOW = 256
"""Tokens of a window: the model's context."""


@dataclass(frozen=True, eq=False)
class RouterStates:
    """Inputs and weight of one router.

    Attributes:
        name: of the router.
        inputs: hidden states that it scores, (T, D), in float64.
        weight: its matrix in float32's precision, (E, D), in float64.
        k: experts per token.
    """

    name: str
    inputs: Float[Tensor, "tokens dim"]
    weight: Float[Tensor, "experts dim"]
    k: int

    def scores(self) -> Float[Tensor, "tokens experts"]:
        """Scores in float64."""
        return self.inputs @ self.weight.T


@lru_cache(maxsize=4)
def router_states(tokens: int, form: str = "") -> tuple[RouterStates, ...]:
    """Return the inputs and the weight of each router of the model in the box.

    The first `tokens` of the text in the box run in windows of 256, in the format `form` of
    `models.emulate`; float32 by default.
    """
    require(find_spec("transformers") is not None, "needs transformers: pip install 'tieline[hf]'")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    from tieline.models.demo import demo_text, load_demo_model, load_demo_tokenizer
    from tieline.models.emulate import emulate
    from tieline.models.families import find_routers

    model = load_demo_model().eval()
    ids = load_demo_tokenizer()(demo_text(), return_tensors="pt")["input_ids"]
    routers = find_routers(model)
    weights = [router.get_parameter("weight").detach().double() for router in routers.values()]
    inputs: list[list[Tensor]] = [[] for _ in routers]

    def input_recorder(index: int):
        def record_input(_module, arguments) -> None:
            inputs[index].append(arguments[0].detach().flatten(0, -2).double())

        return record_input

    hooks = [
        router.register_forward_pre_hook(input_recorder(at))
        for at, router in enumerate(routers.values())
    ]
    with torch.no_grad(), emulate(model, form, region="all") if form else nullcontext():
        for rows in ids[:, :tokens].reshape(-1, WINDOW).split(4):
            model(rows)
    for record_input in hooks:
        record_input.remove()
    k = model.config.num_experts_per_tok
    collected = zip(routers, inputs, weights, strict=True)
    return tuple(RouterStates(name, torch.cat(x), weight, k) for name, x, weight in collected)
