"""The worker for vLLM without vLLM: routers with the method that computes the choice."""

from types import SimpleNamespace

import pytest
import torch

from tieline.engines.workers import vllm as worker


class Router:
    def __init__(self, bias=None):
        self.e_score_correction_bias = bias

    def _compute_routing(self, hidden, logits, indices_type=None, *, input_ids=None):
        weights, ids = logits.softmax(1).topk(2)
        return weights, ids.to(torch.int32)


def test_routers_are_recorded_and_compute_as_before():
    routers, recorder = {0: Router(), 3: Router()}, worker.VllmRecorder()
    logits = torch.randn(5, 6, dtype=torch.bfloat16)
    before = routers[0]._compute_routing(None, logits)
    for layer, router in routers.items():
        recorder.watch_router(layer, router)
    after = routers[0]._compute_routing(None, logits, None, input_ids=None)
    routers[3]._compute_routing(None, -logits)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    arrays = recorder.take_document(5)
    assert arrays["layers"] == [0, 3]
    assert arrays["picks"][:, 0].tolist() == before[1].tolist()
    assert arrays["logits"][:, 1].tolist() == (-logits).float().tolist()
    assert arrays["weights"].dtype == "float32"
    with pytest.raises(Exception, match="no router of this model ran"):
        recorder.take_document(5)


def test_a_bias_is_ranked_and_not_shown_so_only_ids_are_kept():
    recorder, router = worker.VllmRecorder(), Router(bias=torch.zeros(6))
    recorder.watch_router(0, router)
    router._compute_routing(None, torch.randn(4, 6))
    assert "logits" not in recorder.take_document(4)


def test_cached_or_chunked_rows_are_an_error():
    recorder, router = worker.VllmRecorder(), Router()
    recorder.watch_router(0, router)
    router._compute_routing(None, torch.randn(4, 6))
    with pytest.raises(Exception, match=r"\[4\] rows for a document of 7"):
        recorder.take_document(7)


def test_routers_are_found_by_what_they_can_do():
    modules = [
        ("model.layers.0.mlp.experts", SimpleNamespace(router=Router())),
        ("model.layers.1.mlp", SimpleNamespace()),
        ("model.layers.12.mlp.experts", SimpleNamespace(router=Router())),
        ("model.layers.13.mlp", SimpleNamespace(router=None)),
    ]
    routers = worker.layer_routers(SimpleNamespace(named_modules=lambda: modules))
    assert [layer for layer, _ in routers] == [0, 12]


def test_log_probabilities_come_from_all_hidden_states():
    states = [torch.randn(6, 3)]
    model = SimpleNamespace(compute_logits=lambda x: x @ torch.ones(3, 4))
    logprobs = worker.final_logprobs(model, states, 5)
    assert logprobs.shape == (5, 4)
    assert states == []
    assert torch.allclose(torch.from_numpy(logprobs).exp().sum(1), torch.ones(5))


def test_weights_cannot_be_read_back():
    with pytest.raises(Exception, match="cannot be read back"):
        worker.run({"job": "weights"}, [], lambda _: None)
