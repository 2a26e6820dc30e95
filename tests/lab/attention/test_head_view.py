"""Heads as mixtures of experts, against weights that transformers' eager attention returns."""

import math

import pytest
import torch

from tests.analysis.zoo import Letters, demo, random_text
from tests.models.tiny import lively, tiny_model
from tieline.core.errors import TielineError
from tieline.lab.attention.head_view import (
    FIRST_QUERY,
    QUERIES_PER_SEQUENCE,
    AttentionCall,
    AttentionView,
    attention_view,
    head_rows,
)
from tieline.lab.attention.model_attention import attend_

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def view():
    return attention_view((demo().module, demo().tokenizer), tokens=256, batch_size=2)


def test_numbers_of_a_row_by_hand():
    """Scores 0, log 3 and log 4 of three keys: weights 1/8, 3/8 and 4/8."""
    length = FIRST_QUERY + 3
    scores = torch.tensor([0.0, math.log(3), math.log(4)])
    key = torch.zeros(1, 1, length, 1)
    key[0, 0, -3:, 0] = scores
    mask = torch.zeros(1, 1, length, length, dtype=torch.bool)
    mask[..., -3:] = True
    value = torch.arange(float(length)).view(1, 1, length, 1)
    call = AttentionCall(torch.ones(1, 1, length, 1), key, value, mask, 1.0)
    row = head_rows(call)[0, -1].tolist()
    p = [1 / 8, 3 / 8, 1 / 2]
    odds = [1 / 3, 1.0, 4 / 3]
    mass = sum(x / (1 + x) for x in odds)
    softmax_output = sum(w * (FIRST_QUERY + i) for i, w in enumerate(p))
    sigmoid_output = sum(x / (1 + x) * (FIRST_QUERY + i) for i, x in enumerate(odds))
    entropy = -sum(w * math.log(w) for w in p)
    expected = [
        3,
        math.exp(entropy),
        3,
        0.5,
        math.log(4 / 3),
        0,
        mass,
        abs(sigmoid_output / softmax_output - 1),
    ]
    assert row == pytest.approx(expected, rel=1e-6)


def test_weights_are_those_of_the_model(view):
    """Largest weight and entropy of every head, from the matrices of eager attention."""
    loaded = demo()
    ids = torch.tensor(loaded.tokenizer(words_of_box())["input_ids"][:256]).view(1, -1)
    head_view = attention_view((loaded.module, Same(ids)), tokens=256, text="x", batch_size=1)
    before = loaded.module.config._attn_implementation
    loaded.module.set_attn_implementation("eager")
    with torch.no_grad():
        matrices = loaded.module(ids, output_attentions=True).attentions
    loaded.module.set_attn_implementation(before)
    queries = torch.linspace(FIRST_QUERY, 255, QUERIES_PER_SEQUENCE).long()
    flat = [rows[0, h, queries].double() for rows in matrices for h in range(rows.shape[1])]
    for head, weights in zip(head_view.heads, flat, strict=True):
        assert head.top == pytest.approx(weights.max(dim=-1).values.mean().item(), rel=1e-4)
        entropy = -(weights * weights.clamp(min=1e-300).log()).sum(dim=-1)
        assert head.effective == pytest.approx(entropy.exp().mean().item(), rel=1e-4)


def words_of_box():
    from tieline.models.demo import demo_text

    return demo_text()[:4000]


class Same:
    """A tokenizer that returns the same ids for every text."""

    is_fast = False

    def __init__(self, ids):
        self._ids = ids.flatten().tolist()

    def __call__(self, text, add_special_tokens=True, **options):
        return {"input_ids": list(self._ids) if text == "x" else [self._ids[0]]}

    def decode(self, ids):
        return "x" * len(ids)


def test_the_model_is_as_before(view):
    config = demo().module.config
    assert config._attn_implementation == "sdpa"
    assert len(view.heads) == config.num_hidden_layers * config.num_attention_heads
    for head in view.heads:
        assert 1 <= head.effective <= head.seen
        assert 0 < head.top <= 1
        assert head.gap >= 0


@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe"])
def test_the_loss_of_sigmoid_attention_is_that_of_the_model_with_it(family):
    model, text = lively(tiny_model(family)), random_text(200)
    head_view = attention_view((model, Letters()), text=text, tokens=128)
    ids = torch.tensor(Letters()(text)["input_ids"][:128]).view(1, -1)
    with torch.no_grad():
        softmax_loss = model(ids, labels=ids).loss.item()
        attend_(model)
        sigmoid_loss = model(ids, labels=ids).loss.item()
    assert head_view.loss.value == pytest.approx(softmax_loss, rel=1e-5)
    assert head_view.sigmoid_change.value == pytest.approx(sigmoid_loss - softmax_loss, abs=1e-5)
    with pytest.raises(TielineError, match="sigmoid attention already"):
        attention_view((model, Letters()), text=text, tokens=128)


def test_the_result_reads_back_and_is_drawn(view):
    again = AttentionView.from_dict({k: v for k, v in view.to_dict().items() if k != "format"})
    assert again == view
    assert "What to do" in view.to_html()
    assert "near" in view.metrics


def test_sinks_and_short_texts_are_refused():
    with pytest.raises(TielineError, match=r"s_aux|attention function"):
        attention_view((lively(tiny_model("gpt_oss")), Letters()), text=random_text(100), tokens=64)
    with pytest.raises(TielineError, match="too short"):
        attention_view((demo().module, demo().tokenizer), text="a b", tokens=64)
