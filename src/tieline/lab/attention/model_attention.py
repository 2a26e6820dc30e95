"""Sigmoid attention as an attention function of transformers (paper 4, eq. 2).

    AutoModelForCausalLM.from_config(config, attn_implementation="tieline_sigmoid")
    attend_(model, "sigmoid")                 # the same on a model, remembered when it is saved

    o_i = Σ_j σ(s q_i·k_j − log N_i) v_j       over the N_i keys that query i sees

Importing this module registers it. N_i counts the keys that the query itself sees, so outputs do
not depend on padding, on later tokens, or on how a sequence is split into a prompt and tokens
generated from its cache. Masks are those that transformers makes for SDPA: causal, padded, windows,
chunks and packed sequences. Options that the function cannot honour are refused with the reason.

The name of an attention function is not part of a checkpoint: a model that was trained with
sigmoid attention and saved after `attend_` is restored with it by `load_pretrained`; every other
loader refuses it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.lab.attention.softmax_and_sigmoid import AttentionKind, sigmoid_attention
from tieline.models.saved_models import (
    Restorer,
    changes_of,
    forget_change,
    record_change,
    register_restorer,
)

SIGMOID = "tieline_sigmoid"
"""Name of sigmoid attention in transformers."""

FEATURE = "attention"

NOT_HONOURED = {
    "softcap": "scores are not capped in sigmoid attention",
    "s_aux": "a sink is a share of the softmax, and sigmoid weights share nothing",
    "position_bias": "a bias of positions leaves the number of keys N of -log N undefined",
    "cache": "its keys lie in pages",
}
"""Arguments of an attention function that are refused unless they are None, with the reason."""


def register_attention(name: str = SIGMOID) -> None:
    """Register `sigmoid_attention_forward` in transformers as `attn_implementation=name`.

    Raises if transformers has another function of that name.
    """
    taken = dict(AttentionInterface()).get(name, sigmoid_attention_forward)
    if name == "eager" or taken is not sigmoid_attention_forward:
        raise ParameterError(f"transformers has an attention function {name!r} that is not ours")
    AttentionInterface.register(name, sigmoid_attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def sigmoid_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Σ_j σ(s q_i·k_j − log N_i) v_j with the signature of transformers' attention functions.

    Args:
        module: the attention module, whose `is_causal` is the default.
        query: (B, H, N, d).
        key: (B, H / g, M, d), shared by g consecutive heads each.
        value: (B, H / g, M, d_v).
        attention_mask: which keys are seen, (B, 1 or H, N, M), boolean, or 0 and the lowest number
            of a dtype; None for all keys, or those up to the query.
        dropout: must be 0: no matrix of weights exists that could be thinned.
        scaling: s, 1/√d if None.
        is_causal: whether a query sees only the keys up to its own position, without a mask.
        options: further arguments of models; refused if they would change the scores.
    """
    _check_attention_options(dropout, options)
    length = query.shape[2]
    mask = None if attention_mask is None else _boolean_mask(attention_mask, query, key)
    requested = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(requested) and length > 1 and mask is None
    if causal and key.shape[2] > length:  # a static cache: later keys are not written yet
        key, value = key[:, :, :length], value[:, :, :length]
    settings = {"causal": causal, "scale": scaling, "bias": "-log seen"}
    if length == 1:
        mixed = _attend_one_query(query, key, value, mask, settings)
    else:
        groups = query.shape[1] // key.shape[1]
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        mixed = sigmoid_attention(query, keys, values, mask=mask, **settings)
    return mixed.transpose(1, 2).contiguous(), None


def _attend_one_query(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, settings: dict[str, Any]
) -> Tensor:
    """Attention of one query per sequence; heads that share keys become queries of one head."""
    batch, heads, _, _ = query.shape
    shared = key.shape[1]
    grouped = query.view(batch, shared, heads // shared, -1)
    if mask is not None:
        mask = mask.expand(batch, heads, 1, -1).reshape(batch, shared, heads // shared, -1)
    return sigmoid_attention(grouped, key, value, mask=mask, **settings).view(batch, heads, 1, -1)


def _check_attention_options(dropout: float, options: dict[str, Any]) -> None:
    """Raise if dropout or an option is set that sigmoid attention cannot honour."""
    require(
        dropout == 0,
        f"sigmoid attention drops no weights: set attention_dropout=0, got {dropout}",
        UnsupportedModelError,
    )
    for name, reason in NOT_HONOURED.items():
        if options.get(name) is not None:
            raise UnsupportedModelError(f"sigmoid attention cannot honour {name!r}: {reason}")
    if options.get("output_attentions"):
        raise UnsupportedModelError(
            "sigmoid attention keeps no weights to return: leave out output_attentions"
        )


def _boolean_mask(mask: Any, query: Tensor, key: Tensor) -> Tensor:
    """Convert a mask to boolean; refuses other shapes and additive biases."""
    expected = (*query.shape[:3], key.shape[2])
    shape = tuple(mask.shape) if isinstance(mask, Tensor) else ()
    fits = len(shape) == 4 and shape[2:] == expected[2:]
    require(
        fits
        and all(given in (1, size) for given, size in zip(shape[:2], expected[:2], strict=True)),
        f"sigmoid attention needs a mask (B or 1, H or 1, N, M) for {expected}, got "
        f"{shape or type(mask).__name__}",
        UnsupportedModelError,
    )
    if mask.dtype == torch.bool:
        return mask
    require(
        mask.is_floating_point(),
        f"a mask is boolean, or 0 and the lowest number of a dtype, got {mask.dtype}",
        UnsupportedModelError,
    )
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    require(
        bool((hidden | (mask == 0)).all()),
        "the mask adds finite numbers to the scores: sigmoid attention only knows keys that are "
        "seen and keys that are not, because its bias is -log of their number",
        UnsupportedModelError,
    )
    return ~hidden


def set_attention_function(model: nn.Module, name: str) -> None:
    """Make a model of transformers compute attention by the function registered as `name`."""
    setter: Any = getattr(model, "set_attn_implementation", None)
    require(setter is not None, f"{type(model).__name__} takes no attention function")
    try:
        setter(name)
    except ValueError as problem:
        raise UnsupportedModelError(
            f"{type(model).__name__} takes no attention function of others: {problem}"
        ) from problem


def attend_(model: nn.Module, kind: AttentionKind = "sigmoid") -> None:
    """Switch a model to sigmoid attention, recorded when it is saved, or back to softmax.

    The weights stay, so the predictions of a model trained with softmax attention change.

    Args:
        model: a model of transformers that takes attention functions.
        kind: "sigmoid" or "softmax" (SDPA).
    """
    require(kind in ("sigmoid", "softmax"), f"{kind=} is not 'sigmoid' or 'softmax'")
    set_attention_function(model, SIGMOID if kind == "sigmoid" else "sdpa")
    if kind == "sigmoid":
        record_change(model, FEATURE, {"kind": kind})
    elif FEATURE in changes_of(getattr(model, "config", None)):
        forget_change(model, FEATURE)


def _check_attention_record(facts: dict[str, Any]) -> None:
    """Raise unless the checkpoint records sigmoid attention."""
    sigmoid = facts.get("kind") == "sigmoid"
    require(sigmoid, f"the checkpoint's attention is unknown: {facts}", UnsupportedModelError)


def _restore_attention(model: nn.Module, facts: dict[str, Any]) -> None:
    """Switch a reopened model to the attention that its checkpoint records."""
    attend_(model, facts["kind"])


register_restorer(FEATURE, Restorer(before=_restore_attention, check=_check_attention_record))
register_attention()
