"""Routers with a soft choice: its formula, its limit, and its complete removal."""

import pytest
import torch

from tests.models.tiny import batch, lively, tiny_model
from tieline.core.errors import TielineError
from tieline.lab.on_model.soft_choice import soft_share, softened_routers
from tieline.models import capture, find_routers


def logits_of(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits


def top1(**changes):
    return lively(tiny_model("olmoe", num_experts_per_tok=1, **changes))


@pytest.mark.parametrize("norm", [False, True])
def test_one_expert_becomes_a_softmax_over_all(norm):
    model, ids = top1(norm_topk_prob=norm), batch()
    name = next(iter(find_routers(model)))
    router, outputs = model.get_submodule(name), []
    with softened_routers(model, {name: 0.7}), torch.inference_mode():
        handle = router.register_forward_hook(lambda m, a, out: outputs.append(out))
        model(input_ids=ids)
        handle.remove()
    logits, weights, experts = outputs[0][:3]
    dense = torch.zeros_like(logits).scatter_(1, experts.clamp(max=7), weights)
    share = (logits / 0.7).softmax(dim=-1)
    expected = share if norm else share * logits.softmax(dim=-1)
    assert torch.allclose(dense, expected, atol=1e-6)


@pytest.mark.parametrize("model", [top1(), lively(tiny_model("mixtral"))], ids=["one", "two"])
def test_a_vanishing_width_is_the_hard_choice_and_nothing_remains(model):
    ids = batch()
    hard, widths = logits_of(model, ids), dict.fromkeys(find_routers(model), 1e-7)
    with softened_routers(model, widths):
        assert torch.allclose(logits_of(model, ids), hard, atol=1e-5)
    with softened_routers(model, dict.fromkeys(widths, 0.5)):
        assert not torch.allclose(logits_of(model, ids), hard, atol=1e-3)
    assert torch.equal(logits_of(model, ids), hard)


def test_the_share_of_two_is_that_of_the_router():
    model, ids = top1(num_experts=2), batch(4, 16)
    name = next(iter(find_routers(model)))
    with torch.inference_mode(), capture(model) as recorder:
        model(input_ids=ids)
    gaps = recorder.trace().layer(name).gap
    share = soft_share(gaps, 0.3, 1)
    assert torch.allclose(share, 1 / (1 + (gaps / 0.3).exp()))
    assert soft_share(torch.tensor([0.0, 0.1, 0.2, 9.0]), 0.2, 2).tolist() == pytest.approx(
        [0.5, 0.25, 0.0, 0.0]
    )


def test_a_width_that_is_not_positive_is_refused():
    with (
        pytest.raises(TielineError, match="widths must be > 0"),
        softened_routers(top1(), {"x": 0.0}),
    ):
        pass
