"""The loss of a text, by the model's own loss, and its clustered standard error."""

import math

import pytest
import torch

from tieline.analysis.text import _clustered, text_loss
from tieline.core.errors import ParameterError
from tieline.hf.shipped import load_shipped_model, load_shipped_tokenizer, shipped_text


def test_it_is_the_models_own_loss():
    model, tokenizer = load_shipped_model(), load_shipped_tokenizer()
    found = text_loss(model, tokenizer, shipped_text(), tokens=96, length=32)
    ids = torch.tensor(tokenizer(shipped_text()[:2000])["input_ids"][:96]).view(3, 32)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert found.tokens == 93
    assert found.value == pytest.approx(expected.item(), rel=1e-5)
    assert 0 < found.error < found.value


def test_the_standard_error_is_that_of_sequences():
    sums, counts = torch.tensor([2.0, 4.0, 6.0]).double(), torch.tensor([2, 2, 2])
    found = _clustered(sums, counts)
    assert (found.value, found.tokens) == (2.0, 6)
    assert found.error == pytest.approx(torch.tensor([1.0, 2.0, 3.0]).std().item() / math.sqrt(3))
    assert _clustered(sums[:1], counts[:1]) == (1.0, None, 2)


def test_a_text_of_one_token_has_no_loss():
    model, tokenizer = load_shipped_model(), load_shipped_tokenizer()
    with pytest.raises(ParameterError, match="too short"):
        text_loss(model, tokenizer, "a")
