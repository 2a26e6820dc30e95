"""Capture of a small random model of every family, and what its record says about it."""

from operator import attrgetter

import pytest
import torch

from tests.models.tiny import CHOSEN, NO_GROUPED_MM, SUPPORTED, batch, lively, tiny_model
from tieline.core.errors import ParameterError, UnsupportedModelError
from tieline.models import (
    FAMILIES,
    TRANSFORMERS_FAMILIES,
    RouterFamily,
    capture,
    family_of,
    find_routers,
    register_family,
)

REFUSED = sorted({f.name for f in TRANSFORMERS_FAMILIES if f.refused is not None} - {"deepseek_v4"})
RUNS = [
    pytest.param(family, dtype, experts, id=f"{family}-{str(dtype)[6:]}-{experts}")
    for family in SUPPORTED
    for dtype in (torch.float32, torch.bfloat16)
    for experts in ("eager", "grouped_mm")
    if experts == "eager" or family not in NO_GROUPED_MM
]


def test_at_least_62_families_are_supported():
    assert len(SUPPORTED) >= 62


@pytest.mark.parametrize(("family", "dtype", "experts"), RUNS)
def test_capture_explains_the_choice_and_changes_nothing(family, dtype, experts):
    model = lively(tiny_model(family)).to(dtype)
    model.set_experts_implementation(experts)
    ids, keys = batch(), list(model.state_dict())
    seen, plain = _outputs_of_routers(model, ids)
    with torch.no_grad(), capture(model, ranks="all") as recorder:
        captured = model(input_ids=ids)[0]
        assert list(model.state_dict()) == keys
    assert torch.equal(plain, captured)
    trace = recorder.trace()
    assert [layer.name for layer in trace.layers] == list(seen)
    assert torch.equal(trace.tokens, ids.flatten())
    for layer in trace.layers:
        _check_layer(layer, seen[layer.name], find_routers(model)[layer.name])


def _outputs_of_routers(model, ids):
    """What each router returns without capture, by ordinary hooks; and the model's output."""
    seen, handles = {}, []
    for name, router in find_routers(model).items():
        record = lambda module, args, output, name=name: seen.update({name: output})  # noqa: E731
        handles.append(router.register_forward_hook(record))
    with torch.no_grad():
        output = model(input_ids=ids)[0]
    for handle in handles:
        handle.remove()
    return seen, output


def _check_layer(layer, output, router):
    """The record of a layer against what the router returned to an ordinary hook."""
    family, k = family_of(router), layer.facts.k
    assert (layer.scores[:, 1:] <= layer.scores[:, :-1]).all()
    assert (layer.gap >= 0).all()
    assert (layer.near[:, -1] >= layer.near[:, 0]).all()
    assert (layer.near[:, 0] >= k).all()
    if family.layout != "topk":
        return  # tests/models/test_outputs.py
    logits, weights, ids = (x.flatten(0, -2).double() for x in output[:3])
    logits = logits.log() if family.probabilities else logits
    if family.skip_class:
        ids = ids.masked_fill(weights == 0, logits.shape[1] - 1)
    chosen, order = layer.experts[:, :k].long().sort(dim=1)
    theirs, places = ids.long().sort(dim=1)
    assert torch.equal(chosen, theirs)
    assert torch.equal(layer.weights.gather(1, order), weights.gather(1, places).float())
    rounding = 40 * torch.finfo(output[0].dtype if family.own_dtype else torch.float32).eps
    expected = _selection_scores(logits, layer).gather(1, layer.experts.long())
    outside = layer.scores == (family.groups.fill if family.groups else -torch.inf)
    facts = layer.facts
    limited = facts.n_experts // facts.n_groups * (facts.n_groups - facts.k_groups)
    assert (outside.sum(dim=1) == limited).all()
    expected[outside] = layer.scores[outside].double()
    torch.testing.assert_close(layer.scores.double(), expected, rtol=rounding, atol=rounding)
    if family.combine != "own":
        combined = _combined(logits, layer.experts[:, :k].long(), family, router)
        torch.testing.assert_close(layer.weights.double(), combined, rtol=0.02, atol=0.005)


def _selection_scores(logits, layer):
    activations = {
        "logits": logits,
        "softmax": logits.softmax(dim=-1),
        "sigmoid": logits.sigmoid(),
        "sqrtsoftplus": torch.nn.functional.softplus(logits).sqrt(),
    }
    return activations[layer.facts.units] + (0.0 if layer.bias is None else layer.bias.double())


def _combined(logits, chosen, family, router):
    """Combine weights as the record tells them; rounded to bfloat16 by some routers."""
    if family.combine == "softmax of chosen":
        weights = logits.gather(1, chosen).softmax(dim=-1)
    elif family.combine == "activation":
        weights = attrgetter(family.activation)(router)(logits).gather(1, chosen)
    else:
        weights = getattr(logits, family.combine)(*[-1] * (family.combine == "softmax"))
        weights = weights.gather(1, chosen)
    flag = {"always": True, "never": False}.get(family.renormalise)
    if flag if flag is not None else attrgetter(family.renormalise)(router):
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if family.skip_class:
        weights = weights.masked_fill(chosen == logits.shape[1] - 1, 0.0)
    scale = 1.0 if family.scale is None else attrgetter(family.scale)(router)
    return weights * (scale.double()[chosen] if isinstance(scale, torch.Tensor) else scale)


@pytest.mark.parametrize("family", REFUSED)
def test_routers_whose_choice_scores_cannot_tell_are_refused_by_name(family):
    model = tiny_model(family)
    router = next(iter(find_routers(model).values()))
    with pytest.raises(UnsupportedModelError, match=family) as refusal, capture(model):
        pass
    assert str(family_of(router).refused) in str(refusal.value)


def test_hash_layers_are_refused_unless_they_are_left_out():
    model = lively(tiny_model("deepseek_v4", mlp_layer_types=["hash_moe", "moe"]))
    with pytest.raises(UnsupportedModelError, match="hash layers"), capture(model):
        pass
    learned = [n for n, m in find_routers(model).items() if family_of(m).refused is None]
    with torch.no_grad(), capture(model, layers=learned) as recorder:
        model(input_ids=batch())
    assert [layer.name for layer in recorder.trace().layers] == learned


def test_sparsemixer_is_refused_in_training_mode_only():
    model = tiny_model("phimoe").train()
    with capture(model), pytest.raises(UnsupportedModelError, match="sparsemixer samples"):
        model(input_ids=batch())


@pytest.mark.parametrize("family", ["axk2", "deepseek_v2", "mistral4", "deepseek_v3"])
def test_families_with_groups_also_run_without_them(family):
    ungrouped = {"n_group": None, "topk_group": None} if family == "axk2" else {"n_group": 1}
    ungrouped |= {"deepseek_v2": {"topk_method": "greedy"}}.get(family, {})
    ungrouped |= {} if family == "axk2" else {"topk_group": 1}
    model = lively(tiny_model(family, **ungrouped))
    with torch.no_grad(), capture(model) as recorder:
        model(input_ids=batch())
    layer = recorder.trace().layers[0]
    assert layer.facts.n_groups == 1
    assert layer.group_gap is None
    assert (layer.distance is not None) == (family in ("deepseek_v2", "mistral4"))


class _HalfRouter(torch.nn.Linear):
    """Ranks half of its logits and returns them as a family of transformers would."""

    top_k = CHOSEN

    def forward(self, hidden_states):
        logits = super().forward(hidden_states.flatten(0, -2)) / 2
        weights, ids = logits.topk(self.top_k)
        return logits, weights.softmax(dim=-1), ids


class _OwnModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 8)
        self.gate = _HalfRouter(8, 4)
        self.experts = torch.nn.Identity()

    def forward(self, input_ids):
        return self.gate(self.embed(input_ids))[0]


def test_a_family_outside_the_package_is_one_record():
    with pytest.raises(UnsupportedModelError, match="register_family"), capture(_OwnModel()):
        pass
    family = register_family(RouterFamily("own", ("_HalfRouter",)))
    try:
        with pytest.raises(ParameterError, match="_HalfRouter"):
            register_family(family)
        model = _OwnModel()
        with torch.no_grad(), capture(model) as recorder:
            logits = model(batch())
    finally:
        del FAMILIES["_HalfRouter"]
    assert torch.equal(recorder.trace().layers[0].scores, logits.sort(descending=True).values)


def test_incomplete_records_are_refused():
    for wrong in ({"ranked": "activation"}, {"activation": "act"}, {"routers": ()}):
        with pytest.raises(ParameterError):
            RouterFamily(**({"name": "own", "routers": ("R",)} | wrong))
    with pytest.raises(ParameterError, match="attribute or an argument"):
        RouterFamily("own", ("R",), bias="b", bias_argument="b")
