"""The loss of a text against the model's own loss."""

import pytest
import torch

from tieline.core.errors import ParameterError
from tieline.lab.on_model.upcycle import text_loss
from tieline.models.demo import demo_text, load_demo_model, load_demo_tokenizer


def test_it_is_the_models_own_loss():
    model, tokenizer = load_demo_model(), load_demo_tokenizer()
    loss = text_loss(model, tokenizer, demo_text(), tokens=96, length=32)
    ids = torch.tensor(tokenizer(demo_text()[:2000])["input_ids"][:96]).view(3, 32)
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert loss.tokens == 93
    assert loss.value == pytest.approx(expected.item(), rel=1e-5)
    assert 0 < loss.error < loss.value
    assert text_loss(model, tokenizer, demo_text(), tokens=32, length=32).error is None


def test_a_text_of_one_token_has_no_loss():
    model, tokenizer = load_demo_model(), load_demo_tokenizer()
    with pytest.raises(ParameterError, match="too short"):
        text_loss(model, tokenizer, "a")
