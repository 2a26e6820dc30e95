"""One router's call as a record, from logits that are exact."""

import sys

import pytest
import torch
from torch import nn

from tieline.core.errors import UnsupportedModelError
from tieline.models import GroupRule, RouterFamily
from tieline.models.capture import LayerRecorder, RecorderSettings, counts_near_threshold
from tieline.models.pass_tokens import DocumentCounter

capture_module = sys.modules[LayerRecorder.__module__]
LOGITS = torch.tensor([[4.0, 1.0, 3.0, 3.5], [0.5, 2.0, 1.0, 0.25]])
IDS = torch.tensor([[0, 3], [1, 2]])
WEIGHTS = torch.tensor([[0.75, 0.25], [0.625, 0.375]])
BATCH = DocumentCounter().read_batch({"input_ids": torch.tensor([[5, 6]])})


class _Router(nn.Module):
    top_k = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4, 5))


def _observe(output=(LOGITS, WEIGHTS, IDS), router=None, settings=None, **facts):
    observer = LayerRecorder(
        "gate",
        RouterFamily("own", ("_Router",), **facts),
        settings or RecorderSettings(ranks=1, epsilons=(0.5, 1.0), inputs=False, distances=True),
    )
    return observer.observe(router or _Router(), ((None,), {}), output, BATCH)


def test_a_record_holds_ranks_weights_counts_and_distances():
    layer = _observe()
    assert layer.experts.tolist() == [[0, 3, 2], [1, 2, 0]]
    assert layer.scores.tolist() == [[4.0, 3.5, 3.0], [2.0, 1.0, 0.5]]
    assert torch.equal(layer.weights, WEIGHTS.cpu())
    assert layer.gap.tolist() == [0.5, 0.5]
    assert layer.near.tolist() == [[2, 3], [2, 4]]
    assert layer.distance.tolist() == pytest.approx([0.5 / 2**0.5] * 2)
    assert layer.experts.dtype == layer.near.dtype == torch.int16


def test_weights_follow_their_experts_whatever_order_the_router_returns_them_in():
    layer = _observe((LOGITS, WEIGHTS.flip(1), IDS.flip(1)))
    assert torch.equal(layer.weights, WEIGHTS.cpu())
    assert layer.experts[:, :2].tolist() == IDS.tolist()


@pytest.mark.cpu("on an accelerator the answer would have to be read back")
def test_ranks_are_searched_only_where_the_scores_do_not_explain_the_choice(monkeypatch):
    searches = []
    search = capture_module.searched_ranks
    monkeypatch.setattr(
        capture_module, "searched_ranks", lambda *given: searches.append(1) or search(*given)
    )
    logits = torch.arange(32.0).flip(0).repeat(2, 1)
    settings = RecorderSettings(ranks=2, epsilons=(), inputs=False, distances=False)
    exact = _observe((logits, WEIGHTS, torch.tensor([[0, 1], [1, 0]])), settings=settings)
    assert exact.experts.tolist() == [[0, 1, 2, 3]] * 2
    assert torch.equal(exact.weights[1], WEIGHTS[1].flip(0).cpu())
    assert not searches
    with pytest.raises(UnsupportedModelError, match="does not describe"):
        _observe((logits, WEIGHTS, torch.tensor([[0, 1], [1, 2]])), settings=settings)
    assert searches


def test_a_record_is_a_copy_of_what_the_model_had():
    router, states = _Router(), torch.ones(2, 5)
    router.b = torch.tensor([0.0, 0.25, 0.0, 0.0])
    output = (LOGITS.clone(), WEIGHTS.clone(), IDS.clone())
    observer = LayerRecorder(
        "gate", RouterFamily("own", ("_Router",), bias="b"), RecorderSettings(1, (0.5,), True, True)
    )
    layer = observer.observe(router, ((states,), {}), output, BATCH)
    kept = {name: value.clone() for name, value in vars(layer).items() if hasattr(value, "clone")}
    for tensor in (*output, router.b, states):
        tensor.zero_()
    assert {"bias", "inputs", "weights", "scores", "distance"} <= set(kept)
    for name, value in kept.items():
        assert torch.equal(getattr(layer, name), value), name


def test_an_expert_at_exactly_epsilon_below_the_threshold_is_not_near():
    counts = counts_near_threshold(
        torch.tensor([[2.0, 1.5, 1.0]]), torch.tensor([2.0]), (0.5, 0.75, 1.0)
    )
    assert counts.tolist() == [[1, 2, 2]]


def test_all_ranks_are_kept_on_request_and_never_more_than_there_are():
    everything = RecorderSettings(ranks=None, epsilons=(), inputs=False, distances=False)
    beyond = RecorderSettings(ranks=9, epsilons=(), inputs=False, distances=False)
    for settings in (everything, beyond):
        assert _observe(settings=settings).scores.shape == (2, 4)


def test_groups_leave_the_ranks_inside_them_and_no_distance():
    router = _Router()
    router.num_group, router.topk_group = 2, 1
    ids = torch.tensor([[3, 2], [1, 0]])
    layer = _observe((LOGITS, WEIGHTS, ids), router, groups=GroupRule())
    assert layer.experts[:, :2].tolist() == ids.tolist()
    assert layer.scores[:, 2].tolist() == [-torch.inf] * 2  # no further expert in the group
    assert layer.group_gap.tolist() == layer.gap.tolist() == [1.5, 1.25]
    assert layer.near.tolist() == [[2, 2], [2, 2]]
    assert layer.distance is None
    assert (layer.facts.n_groups, layer.facts.k_groups) == (2, 1)


def test_scores_that_are_not_affine_have_no_distance():
    for facts in ({"ranked": "sigmoid"}, {"weight": None}):
        layer = _observe(**facts)
        assert layer.distance is None
        assert not layer.facts.affine


@pytest.mark.parametrize(("experts", "dtype"), [(32767, torch.int16), (32768, torch.int32)])
def test_ids_take_the_smallest_type_that_holds_them(experts, dtype):
    logits = torch.zeros(2, experts)
    logits[:, -2:] = 1.0
    ids = torch.tensor([[experts - 1, experts - 2]] * 2)
    layer = _observe((logits, WEIGHTS, ids), weight=None)
    assert layer.experts.dtype == dtype
    assert layer.experts[0].tolist() == [experts - 2, experts - 1, 0]
