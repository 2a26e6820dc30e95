"""Sound and broken runs of small models, for studies of how well they are told apart.

SHOWN, CALIBRATION    families of random models, the one half never seen while limits were set
clean, sound, broken  the trace of a model as it is, in another precision or kernel, or with a bug

Random models have 3 to 6 layers of width 64 whose weights are spread so that attention and experts
matter, as they do in a trained model; `demo` is the trained model in the box.
"""

import copy
import importlib
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tieline.analysis.compared_sides import ModelSide, trace_model
from tieline.models import find_routers
from tieline.models.demo import demo_text
from tieline.models.emulate import emulate, state_noise
from tieline.models.experts import use_experts
from tieline.models.model import Model
from tieline.run.corpus import tokenise
from tieline.trace.record import LayerTrace

WIDTH = 64
SMALL = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 512,
    "initializer_range": WIDTH**-0.5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHOWN = {
    "mixtral": {"num_local_experts": 16},
    "olmoe": {"num_experts": 16},
    "qwen3_moe": {"num_experts": 16, "moe_intermediate_size": 32, "head_dim": 16},
    "gpt_oss": {"num_local_experts": 16, "head_dim": 16, "sliding_window": 64},
    "deepseek_v3": {
        "n_routed_experts": 16,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
}
CALIBRATION = {
    "qwen2_moe": {
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts_per_tok": 2,
    },
    "granitemoe": {"num_local_experts": 32},
    "glm4_moe": {
        "n_routed_experts": 16,
        "moe_intermediate_size": 32,
        "head_dim": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    },
    "ernie4_5_moe": {"moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 32},
    "minimax_m2": {"num_local_experts": 32, "num_experts_per_tok": 2, "head_dim": 16},
}
SOUND = {
    "bf16": "bf16",
    "bf16, experts by grouped_mm": "bf16",
    "bf16, routers in float32": "bf16",
    "fp16": "fp16",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "int8": "int8",
    "int8_group": "int8_group",
    "int4": "int4",
    "int4_group": "int4_group",
    "eager against grouped_mm": "fp32",
    "state noise 0.001": None,
    "state noise 0.01": None,
}
"""Sound runs, and the format whose noise is to be expected of them."""
BUGS = {
    "rope base changed": {"positions"},
    "expert swapped with another": {"expert"},
    "selection bias of a layer dropped": {"offset"},
    "router rows rolled by one": {"permutation", "layer"},
    "tokens shifted by one": {"lag"},
    "stale weights in a layer": {"layer"},
    "stale choice in a layer": {"choice"},
    "k - 1 experts": {"k"},
    "causal mask off by one": {"positions"},
    "one router in fp8": {"layer"},
}
"""Bugs, and the patterns that name them."""


@cache
def demo():
    """The trained model in the box and its tokenizer."""
    return Model.open()


@cache
def text_ids():
    """Token ids of the text in the box."""
    loaded = demo()
    return torch.cat(list(tokenise(loaded.tokenizer, demo_text(), 10**9, 512).sequences))


def sequences(tokens, length, seed):
    """Windows of the text, as documents."""
    ids, generator = text_ids(), torch.Generator().manual_seed(1000 + seed)
    starts = torch.randint(0, len(ids) - length, (tokens // length,), generator=generator)
    return [ids[start : start + length] for start in starts.tolist()]


def model_of(name, seed):
    """A copy of the model in the box, or a random model of a family."""
    if name == "demo":
        model = copy.deepcopy(demo().module).requires_grad_(False)
    else:
        model = random_model(name, seed)
    use_experts(model, "eager")
    return model


def random_model(family, seed):
    """A random model whose routers have scores of order one."""
    torch.manual_seed(seed)
    config: Any = demo().module.config
    sizes = {"vocab_size": config.vocab_size, "num_hidden_layers": 3 + seed % 4}
    of_family = (SHOWN | CALIBRATION)[family]
    config = AutoConfig.for_model(family, **(SMALL | sizes | of_family))
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "correction" in name:
            tensor.copy_(0.1 * torch.randn(tensor.shape))
    for router in find_routers(model).values():
        for tensor in router.parameters():
            if tensor.ndim == 2:
                torch.nn.init.normal_(tensor, 0, WIDTH**-0.5)
    return model


def sound(model, documents, how, seed):
    """The trace of a sound run."""
    if how.startswith("state noise"):
        generator = torch.Generator().manual_seed(seed)
        with state_noise(model, float(how.split()[-1]), generator, "all"):
            trace = trace_model(ModelSide(model), documents)
        return replace(trace, provenance=trace.provenance | {"emulated": how})
    expected, region = SOUND[how], "others" if "routers in" in how else "all"
    if "grouped_mm" in how:
        use_experts(model, "grouped_mm")
    try:
        return trace_model(
            ModelSide(model, None if expected == "fp32" else expected, region), documents
        )
    finally:
        use_experts(model, "eager")


def broken(model, documents, bug, precision, seed):
    """The trace of a run with a bug, and the layer it sits in; None where it cannot occur.

    Args:
        model: the model, which is changed.
        documents: token ids.
        bug: a name in `BUGS`.
        precision: format of the run, None for float32.
        seed: decides which layer and experts are hit.
    """
    names = list(find_routers(model))
    index = seed % (len(names) - 1 if "expert swapped" in bug else len(names))
    if "stale choice" in bug:
        index = 1 + seed % (len(names) - 1)
    done = _CHANGES.get(bug, lambda *_: True)(model, names[index], seed)
    if not done:
        return None
    if "tokens shifted" in bug:
        moved = [torch.cat((ids[:1], ids[:-1])) for ids in documents]
        trace = trace_model(ModelSide(model, precision), moved)
        return replace(trace, tokens=torch.cat(documents).to(trace.tokens)), None
    with ExitStack() as stack:
        if "mask" in bug:
            stack.enter_context(_leaking_mask(model))
        if "router in fp8" in bug:
            return _one_fp8(model, documents, precision, names, index), names[index]
        trace = trace_model(ModelSide(model, precision), documents)
    if "stale choice" in bug:
        trace = _stale_choice(trace, index)
        return None if trace is None else (trace, names[index])
    return trace, names[index]


def _change_rope(model, name, seed):
    for module in model.modules():
        for kind, buffer in module.named_buffers(recurse=False):
            if "inv_freq" in kind:
                buffer.copy_(buffer.double().pow(1.5).to(buffer))  # the base to the power 1.5
    return True


def _swap_experts(model, name, seed):
    experts = model.get_submodule(name.rpartition(".")[0]).experts
    count = len(next(p for p in experts.parameters() if p.ndim >= 2))
    i, j = seed % count, (seed + 1 + seed % (count - 1)) % count
    for tensor in experts.parameters():
        tensor[[i, j]] = tensor[[j, i]]
    return True


def _drop_bias(model, name, seed):
    block = model.get_submodule(name.rpartition(".")[0])
    biases = [
        x for kind, x in [*block.named_parameters(), *block.named_buffers()] if "corr" in kind
    ]
    for tensor in biases:
        tensor.zero_()
    return bool(biases)


def _roll_rows(model, name, seed):
    for tensor in model.get_submodule(name).parameters():
        if tensor.ndim == 2:
            tensor.copy_(tensor.roll(1, 0))
    return True


def _make_stale(model, name, seed):
    """Matrices of a layer as they may have been some hundred steps ago: 5 % otherwise."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in model.get_submodule(name.rpartition(".")[0].rpartition(".")[0]).parameters():
        if tensor.ndim >= 2:
            size = 0.05 * tensor.square().mean().sqrt()
            tensor.add_(size * torch.randn(tensor.shape, generator=generator))
    return True


def _one_less(model, name, seed):
    for module in model.modules():
        for kind in ("top_k", "num_experts_per_tok"):
            if isinstance(getattr(module, kind, None), int):
                setattr(module, kind, getattr(module, kind) - 1)
    return True


_CHANGES = {
    "rope base changed": _change_rope,
    "expert swapped with another": _swap_experts,
    "selection bias of a layer dropped": _drop_bias,
    "router rows rolled by one": _roll_rows,
    "stale weights in a layer": _make_stale,
    "k - 1 experts": _one_less,
}


@contextmanager
def _leaking_mask(model):
    """Every token sees the one after it."""
    module = importlib.import_module(type(model).__module__)
    names = ("create_causal_mask", "create_sliding_window_causal_mask")
    before = {name: getattr(module, name) for name in names if hasattr(module, name)}

    def leaking(*args, **kwargs):
        states = kwargs["inputs_embeds"]
        count = states.shape[1]
        visible = torch.ones(count, count, dtype=torch.bool).tril(1)[None, None]
        if model.config._attn_implementation == "eager":
            return torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        return visible.expand(len(states), 1, count, count)

    for name in before:
        setattr(module, name, leaking)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(module, name, function)


def _one_fp8(model, documents, precision, names, index):
    others = [name for name in names if name != names[index]]
    with ExitStack() as stack:
        if precision is not None:
            stack.enter_context(emulate(model, precision, "all", keep=[names[index]]))
        stack.enter_context(emulate(model, "fp8_e4m3", "router", keep=others))
        trace = trace_model(ModelSide(model), documents)
    options = {} if precision is None else {"emulated": precision}
    return replace(trace, provenance=trace.provenance | options)


def _stale_choice(trace, index):
    """The trace with the experts of the layer before in a layer; scores stay those of the layer.

    Only tokens whose stale experts are among the kept ranks have them, so that scores are known.
    """
    layer, older = trace.layers[index], trace.layers[index - 1]
    if layer.facts.n_groups > 1:
        return None
    k = layer.facts.k
    stale = (layer.experts[:, :, None] == older.experts[:, None, :k]).any(2)
    complete = stale.sum(1) == k
    order = torch.where(complete[:, None], ~stale, torch.arange(stale.shape[1]) >= k)
    order = order.int().argsort(dim=1, stable=True)
    moved = LayerTrace(
        layer.name,
        layer.facts,
        layer.experts.gather(1, order),
        layer.scores.gather(1, order),
        bias=layer.bias,
    )
    layers = [moved if i == index else x for i, x in enumerate(trace.layers)]
    return replace(trace, layers=tuple(layers))
