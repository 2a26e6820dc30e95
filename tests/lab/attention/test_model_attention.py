"""Sigmoid attention in whole models against the formula with all weights in one matrix."""

import pytest
import torch
from jaxtyping import TypeCheckError
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.masking_utils import sdpa_mask

from tests.models.tiny import VOCABULARY, tiny_model
from tieline.core.errors import ParameterError, TielineError, UnsupportedModelError
from tieline.lab.attention.model_attention import (
    SIGMOID,
    attend_,
    register_attention,
    sigmoid_attention_forward,
)
from tieline.models import load_pretrained

REFERENCE = "reference_sigmoid"
FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "llama"]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
pytestmark = pytest.mark.filterwarnings("ignore")


def reference(module, query, key, value, attention_mask, scaling=None, is_causal=None, **_):
    """Σ_j σ(s q·k_j − log N) v_j from the full matrix, N being the number of visible keys.

    Without a mask, transformers attends to the keys up to the query, or all for a single query.
    """
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    heads = [h for h in range(key.shape[1]) for _ in range(groups)]
    key, value = key[:, heads], value[:, heads]
    if attention_mask is None:
        attention_mask = torch.ones(length, key.shape[2], dtype=torch.bool)
        attention_mask = attention_mask if length == 1 else attention_mask.tril()
    visible = attention_mask.expand(*query.shape[:3], key.shape[2]).to(query)
    scores = query @ key.mT * scaling - visible.sum(-1, keepdim=True).clamp(min=1).log()
    return (visible / (1 + torch.exp(-scores)) @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register(REFERENCE, reference)
AttentionMaskInterface.register(REFERENCE, sdpa_mask)


def model_of(family, **changes):
    """A tiny model with two heads to a key, and large enough weights that attention matters."""
    if family == "llama":
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
        model = LlamaForCausalLM(LlamaConfig(**shape, **heads, **changes)).eval()
    else:
        model = tiny_model(family, num_key_value_heads=2, **changes)
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if "_proj" in name and "self_attn" in name:
            weight.data = torch.randn_like(weight) / weight.shape[-1] ** 0.5 * 2
    return model


def tokens(rows=3, length=24):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(5))


def padding(ids, side):
    mask = torch.ones_like(ids)
    for row, count in enumerate([0, 5, 11]):
        mask[row, :count] = 0 if side == "left" else 1
        if side == "right" and count:
            mask[row, -count:] = 0
    return mask


def both(model, run):
    outputs = []
    for name in (SIGMOID, REFERENCE):
        model.set_attn_implementation(name)
        outputs.append(run(model))
    return outputs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_whole_model_computes_the_formula(family, side):
    model, ids = model_of(family), tokens()
    mask = None if side is None else padding(ids, side)
    ours, formula = both(model, lambda m: m(ids, attention_mask=mask).logits)
    torch.testing.assert_close(ours, formula, **CLOSE)
    model.set_attn_implementation("sdpa")
    assert (model(ids, attention_mask=mask).logits - ours).abs().max() > 0.01


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_training_are_those_of_the_formula(family):
    model, ids = model_of(family).train(), tokens()
    model.requires_grad_(True)

    def gradients(model):
        model.zero_grad()
        loss = model(ids, attention_mask=padding(ids, "right"), labels=ids).loss
        loss.backward()
        return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    ours, formula = both(model, gradients)
    assert len(ours) > 10
    for mine, theirs in zip(ours, formula, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_gives_what_the_whole_sequence_gives(family):
    model, ids = model_of(family), tokens()
    mask = padding(ids, "left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model.set_attn_implementation(SIGMOID)
    full_logits = model(ids, attention_mask=mask, position_ids=positions).logits
    cache, chunks = None, []
    for start, end in [(0, 13), (13, 20), (20, 21), (21, 22), (22, 24)]:
        chunk = slice(start, end)
        options = {"attention_mask": mask[:, :end], "position_ids": positions[:, chunk]}
        out = model(ids[:, chunk], past_key_values=cache, use_cache=True, **options)
        cache = out.past_key_values
        chunks.append(out.logits)
    visible = mask.bool()
    torch.testing.assert_close(torch.cat(chunks, 1)[visible], full_logits[visible], **CLOSE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", ["mixtral", "llama"])
def test_generation_follows_the_formula(family, cache):
    model, ids = model_of(family), tokens(length=9)

    def generated(model):
        options = {"output_logits": True, "return_dict_in_generate": True, "pad_token_id": 0}
        output = model.generate(
            ids,
            attention_mask=padding(ids, "left"),
            max_new_tokens=8,
            min_new_tokens=8,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            **options,
        )
        return output.sequences, torch.stack(output.logits)

    (ours, scores), (formula, theirs) = both(model, generated)
    assert torch.equal(ours, formula)
    torch.testing.assert_close(scores, theirs, **CLOSE)
    model.set_attn_implementation(SIGMOID)
    again = model.generate(
        ids,
        attention_mask=padding(ids, "left"),
        max_new_tokens=8,
        min_new_tokens=8,
        do_sample=False,
        use_cache=False,
        pad_token_id=0,
    )
    assert torch.equal(again, ours)


def test_padding_changes_nothing():
    model, ids = model_of("mixtral"), tokens(rows=1, length=10)
    model.set_attn_implementation(SIGMOID)
    alone = model(ids).logits
    padded = torch.cat([torch.zeros(1, 6, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(16) >= 6).long().unsqueeze(0)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    shifted = model(padded, attention_mask=mask, position_ids=positions).logits[:, 6:]
    torch.testing.assert_close(shifted, alone, **CLOSE)


def test_windows_and_packed_sequences_are_honoured():
    model, ids = model_of("mixtral", sliding_window=5), tokens()
    ours, formula = both(model, lambda m: m(ids).logits)
    torch.testing.assert_close(ours, formula, **CLOSE)
    wide = model_of("mixtral")
    wide.set_attn_implementation(SIGMOID)
    assert (wide(ids).logits - ours).abs().max() > 1e-3
    packed = torch.arange(24).remainder(8).expand(3, -1)
    packed_logits = wide(ids, position_ids=packed, use_cache=False).logits
    chunks = [wide(part, use_cache=False).logits for part in ids.split(8, dim=1)]
    torch.testing.assert_close(packed_logits, torch.cat(chunks, dim=1), **CLOSE)


def shapes(queries=4, keys=4):
    q = torch.randn(2, 4, queries, 8, generator=torch.Generator().manual_seed(0))
    k = torch.randn(2, 2, keys, 8, generator=torch.Generator().manual_seed(1))
    return q, k, k.flip(-1)


def test_masks_of_zeros_and_lowest_numbers_are_read_as_boolean():
    module, visible = torch.nn.Module(), torch.rand(2, 4, 4, 4) < 0.6
    lowest = torch.finfo(torch.float32).min
    additive = torch.where(visible, 0.0, lowest)
    for hidden in (additive, torch.where(visible, 0.0, -torch.inf)):
        ours, _ = sigmoid_attention_forward(module, *shapes(), hidden, scaling=0.3)
        expected, _ = reference(module, *shapes(), visible, scaling=0.3)
        torch.testing.assert_close(ours, expected, **CLOSE)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"attention_mask": torch.full((2, 1, 4, 4), -0.5)}, "finite numbers"),
        ({"attention_mask": torch.ones(2, 1, 4, 4, dtype=torch.long)}, "boolean"),
        ({"attention_mask": torch.ones(2, 4, dtype=torch.bool)}, "needs a mask"),
        ({"attention_mask": torch.ones(2, 3, 4, 4, dtype=torch.bool)}, "needs a mask"),
        ({"attention_mask": torch.ones(2, 1, 4, 9, dtype=torch.bool)}, "needs a mask"),
        ({"attention_mask": object()}, "needs a mask"),
        ({"dropout": 0.1}, "attention_dropout=0"),
        ({"softcap": 30.0}, "not capped"),
        ({"s_aux": torch.zeros(4)}, "sink"),
        ({"position_bias": torch.zeros(1, 4, 4, 4)}, "positions"),
        ({"output_attentions": True}, "keeps no weights"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(options, reason):
    arguments = {"attention_mask": None} | options
    with pytest.raises(UnsupportedModelError, match=reason):
        sigmoid_attention_forward(torch.nn.Module(), *shapes(), **arguments)


def test_a_name_of_another_function_is_not_taken():
    register_attention()
    with pytest.raises(ParameterError, match="not ours"):
        register_attention("sdpa")
    with pytest.raises(ParameterError, match="not ours"):
        register_attention("eager")


def test_a_saved_model_remembers_its_attention(tmp_path):
    model, ids = model_of("mixtral"), tokens()
    plain = model(ids).logits
    attend_(model)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "sigmoid")
    with pytest.raises(ValueError, match="Tieline"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "sigmoid")
    loaded = load_pretrained(tmp_path / "sigmoid").eval()
    torch.testing.assert_close(loaded(ids).logits, expected)
    attend_(loaded, "softmax")
    torch.testing.assert_close(loaded(ids).logits, plain, **CLOSE)
    loaded.save_pretrained(tmp_path / "softmax")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "softmax").eval()
    torch.testing.assert_close(stock(ids).logits, plain, **CLOSE)


def test_attend_refuses_other_kinds_and_models_without_attention():
    with pytest.raises((TielineError, TypeCheckError), match="kind"):
        attend_(model_of("llama"), "relu")  # type: ignore[arg-type]
    with pytest.raises(TielineError, match="no attention function"):
        attend_(torch.nn.Linear(2, 2))
