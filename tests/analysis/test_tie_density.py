"""Expected ties against counted ones."""

import pytest
import torch

from tieline.analysis.tie_density import tie_density
from tieline.core.errors import ParameterError, RoutingWarning
from tieline.core.ranking import gap, stable_topk
from tieline.trace import LayerFacts, LayerTrace, RoutingTrace

EXPERTS, K = 64, 8


def layer(scores, name="a", **options):
    ranked = stable_topk(scores, K + 4)
    facts = LayerFacts(scores.shape[1], K, **options)
    return LayerTrace(name, facts, ranked.indices, ranked.values.float())


def trace(*layers):
    count = len(layers[0].experts)
    return RoutingTrace(layers, *(torch.arange(count) for _ in range(3)))


@pytest.mark.filterwarnings("ignore::tieline.core.errors.RoutingWarning")
def test_ties_in_bf16_are_as_many_as_expected():
    scores = torch.randn(20000, EXPERTS)
    counted = (gap(scores.bfloat16(), K) == 0).double().mean().item()
    (density,) = tie_density(trace(layer(scores)), torch.bfloat16).layers
    assert density.tie.value == pytest.approx(counted, rel=0.1)
    assert density.population.value == pytest.approx(counted, rel=0.15)
    assert density.low <= density.within <= density.high
    assert density.within == pytest.approx(2 * counted, rel=0.2)
    assert density.exact == 0


def test_a_fine_format_has_ties_that_no_sample_shows():
    scores = torch.randn(20000, EXPERTS)
    report = tie_density(trace(layer(scores)), "fp32")
    ratio = report.per_token * 2**16
    assert report.message is None
    with pytest.warns(RoutingWarning, match=r"bf16.*keep the router's logits in fp32"):
        coarse = tie_density(trace(layer(scores)), "bf16")
    assert ratio == pytest.approx(coarse.per_token, rel=0.1)  # spacings differ by 2^16
    assert report.expected(10**9) == report.per_token * 1e9


@pytest.mark.filterwarnings("ignore::tieline.core.errors.RoutingWarning")
def test_layers_add_up_and_say_what_they_cannot_answer():
    scores = torch.randn(5000, EXPERTS)
    ids = LayerTrace("ids", LayerFacts(EXPERTS, K), stable_topk(scores, K).indices)
    soft = layer(scores.softmax(dim=1), "soft", units="softmax")
    single = tie_density(trace(layer(scores)), "bf16")
    many = tie_density(trace(layer(scores), layer(scores, "b"), ids, soft), "bf16")
    assert many.per_token == pytest.approx(2 * single.per_token)
    assert [x.status == "ok" for x in many.layers] == [True, True, False, False]
    assert "ids only" in many.layers[2].status
    assert "size of the logits" in many.layers[3].status
    assert many.to_dict()["precision"] == "bf16"


def test_exact_ties_of_the_trace_are_counted_and_the_limit_is_the_callers():
    scores = torch.randn(3000, EXPERTS).bfloat16().float()
    with pytest.warns(RoutingWarning, match="fp8_e4m3"):
        tie_density(trace(layer(scores)), torch.float8_e4m3fn)
    report = tie_density(trace(layer(scores)), "bf16", warn_above=1.0)
    assert report.layers[0].exact == int((gap(scores, K) == 0).sum()) > 0
    assert report.message is None


@pytest.mark.parametrize("dtype", ["fp12", torch.int8, torch.float64])
def test_unknown_types_are_refused(dtype):
    with pytest.raises(ParameterError, match="unknown dtype"):
        tie_density(trace(layer(torch.randn(10, EXPERTS))), dtype)
