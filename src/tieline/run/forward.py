"""One forward pass: the call of the model and its logits."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.core.errors import NoLogitsError, TielineError, UnsupportedModelError, require
from tieline.models.router_output import (
    Rule,
    override_choice,
)

Ids = Int[Tensor, "rows length"]


def forward(model: nn.Module, ids: Int[Tensor, "rows length"], *, predicts: bool = True) -> Any:
    """Return the model's output for these tokens, all visible, without a cache.

    Args:
        model: a model of transformers.
        ids: token ids.
        predicts: whether the logits of all tokens are wanted; without, the output head runs on the
            last token alone where the model can do so: its products and logits may be the largest.
    """
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {"use_cache": False} | ({} if predicts else {"logits_to_keep": 1})
    options = {name: value for name, value in arguments.items() if name in parameters}
    return model(input_ids=ids.to(model_device(model)), **options)


def next_token_logprobs(
    model: nn.Module, inputs: Mapping[str, Any], temperature: float = 1.0
) -> Float[Tensor, "rows targets"]:
    """Return log p(token t + 1 | tokens up to t) of the tokens of a batch, in at least float32.

    Args:
        model: a causal language model, run in its present mode.
        inputs: arguments of its forward, with `input_ids` (rows, length).
        temperature: what logits are divided by.
    """
    logits = model(**{**inputs, "use_cache": False}).logits[:, :-1] / temperature
    scores = logits if logits.dtype == torch.float64 else logits.float()
    ids = inputs["input_ids"][:, 1:, None]
    return scores.gather(-1, ids)[..., 0] - scores.logsumexp(-1)


def model_device(model: nn.Module) -> torch.device:
    """Return the device of the first parameter that is not on the meta device."""
    for parameter in model.parameters():
        if not parameter.is_meta:
            return parameter.device
    raise TielineError(f"{type(model).__name__} has no parameters in memory: nothing can be run")


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the block; restores each module's training mode on exit."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def only_running(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and no gradients inside the block."""
    with evaluation_mode(model), torch.inference_mode():
        yield


def finite_logits(output: object, ids: Ids) -> Tensor:
    """Return the logits of an unperturbed run; raises if some are not numbers."""
    logits = model_logits(output, ids)
    wrong = (~(logits < torch.inf)).flatten(0, 1).any(dim=1)  # minus infinity masks words
    require(
        not bool(wrong.any()),
        f"the model's logits are NaN or infinite for {int(wrong.sum())} of {len(wrong)} tokens: "
        "run it in float32 and, if they still are, look for a buffer that is not finite",
        UnsupportedModelError,
    )
    return logits


def model_logits(output: object, ids: Ids) -> Tensor:
    """Return the logits (rows, length, words) of a model's output; raises if it has none.

    A plain model may return the logits themselves or first in a tuple; they are logits if there
    are more of them than the largest token id.
    """
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, Tensor) and first.dim() == 3 and first.shape[-1] > int(ids.max()):
        logits: object = first
    else:
        logits = getattr(output, "logits", None)
    require(
        isinstance(logits, Tensor) and logits.shape[:2] == ids.shape,
        "the model gives no logits for its tokens, so damage to its predictions has no measure",
        NoLogitsError,
    )
    assert isinstance(logits, Tensor)
    return logits


def overridden_output(model: nn.Module, router: nn.Module, rule: Rule, ids: Ids) -> Any:
    """Run tokens through a model in memory while one of its routers chooses by a rule.

    Args:
        model: the model, in evaluation mode.
        router: one of its routers.
        rule: maps the router's own output to the choice that it returns.
        ids: token ids (rows, length).
    """
    with override_choice(router, rule):
        return forward(model, ids)
