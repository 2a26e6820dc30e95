"""Calls of our own gates, against what the gates themselves choose."""

import pytest
import torch

from tests.routing.zoo import EXPERTS
from tieline import Groups, Hard, SmoothTopK, TopK, moe
from tieline.models.router_calls import call_of_tieline_layer

BIAS = torch.linspace(-0.3, 0.3, EXPERTS)
GATES = {
    "mixtral": TopK(2),
    "olmoe": TopK(2, renormalize=False),
    "gpt-oss": TopK(2, order="after"),
    "biased": TopK(2, order="after", selection_bias=BIAS),
    "deepseek": TopK(2, scoring="sigmoid", selection_bias=BIAS, groups=Groups(2, 1)),
    "softmax bias": TopK(2, selection_bias=BIAS),
    "groups by max": TopK(2, groups=Groups(2, 1, "max")),
    "smooth": SmoothTopK(2, epsilon=0.4),
    "hard": Hard(),
}
UNITS = {"deepseek": "sigmoid", "softmax bias": "softmax"}


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("ranks", [1, None])
def test_the_trace_holds_what_the_gate_ranks_and_chooses(name, ranks):
    layer = moe(d_model=5, n_experts=EXPERTS, k=2, d_hidden=4)
    layer.gate = GATES[name]
    scores = torch.randn(60, EXPERTS)
    weights = layer.gate(scores)
    call = call_of_tieline_layer("here", layer, scores, weights, ranks)
    k, scores, weights = call.trace.facts.k, scores.cpu(), weights.cpu()
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(1, call.trace.experts[:, :k], True)
    if name != "smooth":
        assert torch.equal(chosen, weights != 0)
    else:
        assert bool((chosen <= (weights != 0)).all())
    assert torch.equal(call.used, (weights != 0).sum(dim=0))
    assert call.active == pytest.approx((weights != 0).sum(dim=1).double().mean().item())
    assert call.trace.facts.units == UNITS.get(name, "logits")
    assert call.trace.experts.shape[1] == (EXPERTS if ranks is None else k + ranks)
    assert (call.epsilon == pytest.approx(0.4)) if name == "smooth" else call.epsilon is None


@pytest.mark.parametrize("name", ["mixtral", "biased", "softmax bias", "deepseek", "groups by max"])
def test_moving_the_scores_by_the_gap_is_what_changes_the_choice(name):
    layer = moe(d_model=5, n_experts=EXPERTS, k=2, d_hidden=4)
    layer.gate = GATES[name]
    selection = layer.gate.selection(torch.randn(60, EXPERTS).double())
    call = call_of_tieline_layer(
        "here", layer, torch.randn(60, EXPERTS), torch.zeros(60, EXPERTS), None
    )
    assert bool((call.trace.gap >= 0).all())
    before = layer.gate.share(selection)
    ours = call_of_tieline_layer("here", layer, *_logits_of(layer.gate, selection), None).trace
    noise = torch.rand_like(selection) - 0.5
    safe = layer.gate.share(selection + noise * ours.gap[:, None].to(noise) * 0.49)
    assert torch.equal(before, safe)


def _logits_of(gate, selection):
    """Logits with these selection scores, and weights that no test reads."""
    plain = selection if gate.selection_bias is None else selection - gate.selection_bias
    if gate.order == "before" and gate.scoring == "sigmoid":
        plain = plain.logit()
    elif gate.order == "before" and gate.selection_bias is not None:
        plain = plain.log()
    return plain, torch.zeros_like(plain)


def test_sums_over_all_logits():
    layer = moe(d_model=5, n_experts=EXPERTS, k=2, d_hidden=4)
    scores = torch.randn(3, 20, EXPERTS)
    sums = call_of_tieline_layer("here", layer, scores, layer.gate(scores), 4).logits
    assert sums.mean_square == pytest.approx(scores.square().mean().item())
    assert sums.largest == pytest.approx(scores.abs().max().item())
    assert sums.least == pytest.approx(scores.min().item())
    confidence = scores.softmax(dim=-1).amax(dim=-1).mean().item()
    assert sums.confidence == pytest.approx(confidence)
    assert sums.row_error == pytest.approx((scores.sum(dim=-1) - 1).abs().max().item())


def test_no_tokens_have_no_sums():
    layer = moe(d_model=5, n_experts=EXPERTS, k=2, d_hidden=4)
    scores = torch.randn(0, EXPERTS)
    call = call_of_tieline_layer("here", layer, scores, layer.gate(scores), 4)
    assert call.logits is None
    assert call.tokens == 0
