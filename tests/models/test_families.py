"""Capture of a small random model of every family, and what its record says about it."""

from copy import deepcopy
from dataclasses import replace
from operator import attrgetter

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import tieline
from tests.models.tiny import CHOSEN, NO_GROUPED_MM, SUPPORTED, batch, lively, tiny_model
from tieline.core.errors import ParameterError, UnsupportedModelError
from tieline.models import (
    FAMILIES,
    TRANSFORMERS_FAMILIES,
    RouterFamily,
    ScoresLayout,
    TupleLayout,
    capture,
    family_of,
    find_routers,
    register_family,
    smooth_,
)
from tieline.models.router_output_layouts import COLUMNS
from tieline.run.calibration import calibrate

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
    outputs, plain = _outputs_of_routers(model, ids)
    with torch.no_grad(), capture(model, ranks="all") as recorder:
        captured = model(input_ids=ids)[0]
        assert list(model.state_dict()) == keys
    assert torch.equal(plain, captured)
    trace = recorder.trace()
    assert [layer.name for layer in trace.layers] == list(outputs)
    assert torch.equal(trace.tokens, ids.flatten().cpu())
    for layer in trace.layers:
        _check_layer(layer, outputs[layer.name], find_routers(model)[layer.name])


def on_cpu(output):
    """What a router returned, where records are."""
    return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, output)


def _outputs_of_routers(model, ids):
    """What each router returns without capture, by ordinary hooks; and the model's output."""
    outputs, handles = {}, []
    for name, router in find_routers(model).items():
        record = lambda module, args, output, name=name: outputs.update({name: on_cpu(output)})  # noqa: E731
        handles.append(router.register_forward_hook(record))
    with torch.no_grad():
        output = model(input_ids=ids)[0]
    for handle in handles:
        handle.remove()
    return outputs, output


def _check_layer(layer, output, router):
    """The record of a layer against what the router returned to an ordinary hook."""
    family, k = family_of(router), layer.facts.k
    assert (layer.scores[:, 1:] <= layer.scores[:, :-1]).all()
    assert (layer.gap >= 0).all()
    assert (layer.near[:, -1] >= layer.near[:, 0]).all()
    assert (layer.near[:, 0] >= k).all()
    if family.layout != COLUMNS:
        return  # tests/models/router_output/test_outputs.py
    logits, weights, ids = (x.flatten(0, -2).double() for x in output[:3])
    logits = logits.log() if family.probabilities else logits
    if family.skip_class:
        ids = ids.masked_fill(weights == 0, logits.shape[1] - 1)
    chosen, order = layer.experts[:, :k].long().sort(dim=1)
    theirs, their_order = ids.long().sort(dim=1)
    assert torch.equal(chosen, theirs)
    assert torch.equal(layer.weights.gather(1, order), weights.gather(1, their_order).float())
    rounding = 40 * torch.finfo(output[0].dtype if family.own_dtype else torch.float32).eps
    expected = _selection_scores(logits, layer).gather(1, layer.experts.long())
    outside = layer.scores == (family.groups.fill if family.groups else -torch.inf)
    facts = layer.facts
    limited = facts.n_experts // facts.n_groups * (facts.n_groups - facts.k_groups)
    assert (outside.sum(dim=1) == limited).all()
    expected[outside] = layer.scores[outside].double()
    torch.testing.assert_close(layer.scores.double(), expected, rtol=rounding, atol=rounding)
    if _plain_weights(family):
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


def _plain_weights(family):
    """Whether the weights follow from `combine`, `renormalise` and an attribute `scale` alone."""
    special = (family.norm_order, family.shared_weights, family.refused_weights)
    return all(fact is None for fact in special) and not (
        callable(family.combine) or callable(family.scale)
    )


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
    return weights * (scale.cpu().double()[chosen] if isinstance(scale, torch.Tensor) else scale)


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


class Gate(nn.Module):
    """The router of the page of families: scores, weights and ids by name."""

    def __init__(self, width, experts, chosen):
        super().__init__()
        self.proj, self.n_active = nn.Linear(width, experts), chosen

    def forward(self, x):
        scores = self.proj(x)
        weights, ids = scores.sigmoid().topk(self.n_active)
        return {"ids": ids, "weights": weights, "scores": scores}


class ScoresGate(Gate):
    """The same router whose block reads its scores and chooses."""

    def forward(self, x):
        return self.proj(x)


class Mixture(nn.Module):
    """Eight linear experts behind a gate."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate(16, 8, CHOSEN)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, x):
        flat = x.flatten(0, -2)
        routed = self.gate(flat)
        if isinstance(routed, torch.Tensor):
            weights, ids = routed.sigmoid().topk(CHOSEN)
        else:
            weights, ids = routed["weights"], routed["ids"]
        outputs = torch.stack([expert(flat) for expert in self.experts], dim=1)
        chosen = outputs.gather(1, ids[..., None].expand(-1, -1, 16))
        return x + (weights[..., None] * chosen).sum(dim=1).view_as(x)


class PlainModel(nn.Module):
    """A language model without transformers: two mixtures between embedding and head."""

    def __init__(self, gate=Gate):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.layers = nn.ModuleList(Mixture(gate) for _ in range(2))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Bytes:
    """A tokenizer of 64 characters."""

    def __call__(self, text, **options):
        return {"input_ids": [ord(letter) % 64 for letter in text]}

    def decode(self, ids, **options):
        return "".join(chr(64 + token) for token in ids)

    def __len__(self):
        return 64


RULE = {
    "combine": "sigmoid",
    "renormalise": "never",
    "k": "n_active",
    "n_experts": "proj.out_features",
    "weight": "proj.weight",
}


@pytest.fixture
def registered(monkeypatch):
    """Register a record for one test."""
    for name in ("Gate", "ScoresGate", "LinearMixture.gate"):
        monkeypatch.setitem(FAMILIES, name, None)
        del FAMILIES[name]
    return lambda name, **fields: tieline.register_family(
        tieline.RouterFamily("mine", (name,), **RULE, **fields)
    )


@pytest.fixture
def plain(registered):
    registered("Gate", layout=TupleLayout("scores", "weights", "ids"))
    return PlainModel().eval()


def test_a_router_without_a_record_is_refused_with_the_way_to_write_one(registered):
    with pytest.raises(UnsupportedModelError, match="register_family"), capture(PlainModel()):
        pass


def test_a_class_has_one_record(registered):
    family = registered("Gate")
    with pytest.raises(ParameterError, match="Gate"):
        register_family(family)


def test_a_plain_model_is_captured(plain):
    with torch.no_grad(), tieline.capture(plain, ranks="all") as recorder:
        logits = plain(batch())
    trace = recorder.trace()
    scores = plain.layers[0].gate.proj(plain.embed(batch()).flatten(0, 1)).detach().cpu()
    assert torch.equal(trace.layers[0].scores, scores.sort(descending=True).values)
    assert trace.layers[0].distance is not None
    with torch.no_grad():
        assert torch.equal(plain(batch()), logits)


def test_a_plain_model_is_inspected_with_what_its_flips_cost(plain):
    result = tieline.inspect((plain, Bytes()), text="what is routed where " * 40, tokens=256)
    assert result.metrics["experts"] == CHOSEN
    assert result.metrics["jump"] > 0
    assert result.noise.layers
    assert result.serving is not None
    assert result.serving.kl.value > 0


def test_a_record_may_say_k_as_a_number(registered, monkeypatch):
    family = registered("Gate", layout=TupleLayout("scores", "weights", "ids"))
    source, options = (PlainModel().eval(), Bytes()), {"text": "what goes where " * 400}
    by_attribute = tieline.audit(source, tokens=256, **options)
    monkeypatch.setitem(FAMILIES, "Gate", replace(family, k=CHOSEN))
    by_number = tieline.audit(source, tokens=256, **options)
    assert by_number.metrics == by_attribute.metrics
    assert by_number.remedies.remedies[0].experts == CHOSEN


def test_hidden_states_are_no_logits(plain):
    plain.head = nn.Identity()  # 16 numbers for 64 tokens
    result = tieline.inspect((plain, Bytes()), text="what is routed where " * 40, tokens=256)
    assert result.serving is None
    assert "not measured: the model gives no logits" in result.verdict


def test_a_plain_model_is_smoothed_and_restored(plain):
    with torch.no_grad():
        before = plain(batch())
        record = smooth_(plain, budget=2.5, calibration=calibrate(plain, [batch()]))
        assert not torch.equal(plain(batch()), before)
        with capture(plain) as recorder:
            plain(batch())
        assert recorder.trace().layers[0].used.float().mean() > CHOSEN
        record.undo()
        assert torch.equal(plain(batch()), before)


def test_a_plain_model_takes_the_experts_of_a_record(plain):
    with torch.no_grad(), capture(plain) as recorder:
        before = plain(batch())
    trace, last = recorder.trace(), plain.layers[1].gate
    chosen = trace.layers[1].experts[:, :CHOSEN].long().sort(dim=1).values
    routed = []
    last.register_forward_hook(lambda module, args, output: routed.append(on_cpu(output)))
    with torch.no_grad(), tieline.replay(plain, trace):
        assert torch.equal(plain(batch()), before)
    with torch.no_grad(), tieline.replay(plain, trace) as replayed:
        last.proj.weight.neg_()  # changes its own choice
        plain(batch())
    assert replayed.changed["layers.1.gate"] > 0
    assert torch.equal(routed[1]["ids"].sort(dim=1).values, chosen)
    weights = routed[1]["scores"].gather(1, routed[1]["ids"]).sigmoid()
    assert torch.allclose(routed[1]["weights"], weights)


def test_scores_alone_are_captured_and_the_record_says_what_it_lacks(registered):
    registered("ScoresGate", layout=ScoresLayout())
    model = PlainModel(ScoresGate).eval()
    with torch.no_grad(), capture(model) as recorder:
        model(batch())
    trace = recorder.trace()
    scores = model.layers[0].gate(model.embed(batch()).flatten(0, 1)).detach().cpu()
    assert torch.equal(trace.layers[0].experts[:, :CHOSEN].long(), scores.topk(CHOSEN).indices)
    assert torch.equal(trace.layers[0].weights, scores.sigmoid().topk(CHOSEN).values)
    lacks = "not where the router returns weights and expert ids"
    with pytest.raises(UnsupportedModelError, match=lacks):
        smooth_(model, epsilon=0.1)
    with pytest.raises(UnsupportedModelError, match=lacks), tieline.replay(model, trace):
        pass


class LinearMixture(nn.Module):
    """Two of four experts by a plain linear gate: the block itself chooses."""

    def __init__(self):
        super().__init__()
        self.gate, self.active = nn.Linear(16, 4, bias=False), CHOSEN
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        weights, ids = self.gate(x).topk(self.active)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-2)
        chosen = outputs.gather(-2, ids[..., None].expand(*ids.shape, 16))
        return x + (weights.softmax(-1)[..., None] * chosen).sum(-2)


@pytest.fixture
def linear_gates(registered):
    """A plain model whose gates are named by their block, and which returns a tuple."""
    record = {"combine": "softmax of chosen", "k": "active", "layout": ScoresLayout()}
    tieline.register_family(tieline.RouterFamily("ours", ("LinearMixture.gate",), **record))
    model = PlainModel()
    model.layers = nn.ModuleList(LinearMixture() for _ in range(2))
    model.register_forward_hook(lambda module, args, output: (output, None))
    return model.eval()


def test_a_linear_gate_is_named_by_its_block(linear_gates):
    assert list(find_routers(linear_gates)) == ["layers.0.gate", "layers.1.gate"]
    assert family_of(linear_gates.head) is None
    twin = deepcopy(linear_gates)
    twin.layers[1].active = 1
    with torch.no_grad(), capture(twin) as recorder:
        twin(batch())
    first, last = recorder.trace().layers
    scores = twin.layers[0].gate(twin.embed(batch()).flatten(0, 1)).cpu()
    assert torch.equal(first.experts[:, :CHOSEN].long(), scores.topk(CHOSEN).indices)
    assert (first.facts.k, last.facts.k) == (CHOSEN, 1)
    assert first.distance is not None


def test_what_replaces_the_choice_of_a_block_says_why_it_cannot(linear_gates):
    source, text = (linear_gates, Bytes()), "what is routed where " * 400
    result = tieline.inspect(source, text=text, tokens=256)
    assert result.noise.layers
    assert "not measured: the record of a router says only where its scores are" in result.verdict
    assert all("cannot be replaced" in layer.status for layer in result.jumps)
    for job in (tieline.audit, tieline.smooth):
        with pytest.raises(UnsupportedModelError, match="layout ScoresLayout"):
            job(source, text=text, tokens=256)
    assert not tieline.diff(source, source, text=text, tokens=256).causes.alarm


def test_a_record_that_does_not_fit_is_refused(registered):
    registered("Gate")  # says that the output is a tuple
    model = PlainModel()
    with pytest.raises(UnsupportedModelError, match="did not return"), capture(model):
        model(batch())


def test_weights_that_the_record_does_not_explain_are_not_smoothed(registered):
    layout = TupleLayout("scores", "weights", "ids")
    family = registered("Gate", layout=layout)
    FAMILIES["Gate"] = replace(family, renormalise="always")
    model = PlainModel().eval()
    smooth_(model, epsilon=0.1)
    with pytest.raises(UnsupportedModelError, match="does not explain the weights of Gate"):
        model(batch())


def test_incomplete_records_are_refused():
    for wrong in ({"ranked": "activation"}, {"activation": "act"}, {"routers": ()}):
        with pytest.raises(ParameterError):
            RouterFamily(**({"name": "own", "routers": ("R",)} | wrong))
    with pytest.raises(ParameterError, match="attribute or an argument"):
        RouterFamily("own", ("R",), bias="b", bias_argument="b")


@pytest.mark.usefixtures("no_axis_checks")
@pytest.mark.parametrize(
    "watch",
    [lambda model: capture(model).__enter__(), tieline.RoutingMonitor, find_routers],
    ids=["capture", "monitor", "find_routers"],
)
def test_what_is_no_module_is_refused_by_its_kind(watch):
    with pytest.raises(
        ParameterError, match=r"need a torch\.nn\.Module, got Model: give its `module`"
    ):
        watch(tieline.Model.open("demo"))
    with pytest.raises(ParameterError, match=r"need a torch\.nn\.Module, got NoneType"):
        watch(None)
