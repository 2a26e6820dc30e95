"""Recorded experts in a model: bit for bit, in training, under generate, checkpointing, in part."""

import os
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tieline as tl
from tests.models.tiny import SUPPORTED, batch, lively, tiny_model
from tieline.core.errors import TielineError
from tieline.models import capture, family_of
from tieline.models.class_changes import swapped_class, wrapped_class
from tieline.models.emulate import emulate
from tieline.models.replay import ReplayWarning, live_choice, replay
from tieline.models.router_output import Choice, override_choice
from tieline.trace import import_trace, save_trace, select_tokens

PATTERNS = ["dbrx", "deepseek_v3", "gemma4", "inkling", "jetmoe", "llama4", "olmoe", "zaya"]
ALL = [
    pytest.param(name, marks=[] if name in PATTERNS else [pytest.mark.slow]) for name in SUPPORTED
]


def states(output):
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def recorded(model, ids=None, **options):
    with torch.no_grad(), capture(model, **options) as recorder:
        output = states(model(input_ids=batch() if ids is None else ids))
    return recorder.trace(), output


def used(model, trace):
    """Contexts that note the sets of experts which each router hands on, and the notes."""
    notes, stack = {}, ExitStack()
    for layer in trace.layers:
        router = model.get_submodule(layer.name)
        family, experts = family_of(router), layer.facts.n_experts

        def note(router, call, output, name=layer.name, family=family, experts=experts):
            choice = live_choice(family, output, trace.layers[0].facts.k, experts)
            notes[name] = choice.ids.sort(dim=1).values.cpu()
            return output

        stack.enter_context(swapped_class(router, wrapped_class(type(router), family.method, note)))
    return stack, notes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ALL)
def test_own_routes_give_the_own_output_bit_for_bit(family):
    model = lively(tiny_model(family))
    trace, plain = recorded(model)
    for weights in ("recorded", "live"):
        with torch.no_grad(), replay(model, trace, weights) as replayed:
            again = states(model(input_ids=batch()))
        assert torch.equal(again, plain), weights
        assert set(replayed.changed.values()) == {0}
        assert replayed.recorded == replayed.tokens == 24


@contextmanager
def low_precision(model, family):
    """Everything in emulated bfloat16; weights alone where the router is no module of its own."""
    if family != "dbrx":
        with emulate(model, "bf16", "all"):
            yield
        return
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16().float())
    yield
    model.load_state_dict(before)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ALL)
def test_routes_of_another_precision_leave_no_flip(family):
    model = lively(tiny_model(family))
    trace, _ = recorded(model)
    for weights in ("recorded",) if family == "phimoe" else ("live", "recorded"):
        with torch.no_grad(), low_precision(model, family), replay(model, trace, weights):
            noted, notes = used(model, trace)
            with noted:
                model(input_ids=batch())
        for layer in trace.layers:
            expected = layer.experts[:, : layer.facts.k].long().sort(dim=1).values
            assert torch.equal(notes[layer.name], expected)


def other_trace(model, ids=None):
    """A record that chooses the next experts in every layer, with the weights of this choice."""
    trace, _ = recorded(model, ids)
    layers = []
    for layer in trace.layers:
        k, experts = layer.facts.k, layer.facts.n_experts
        moved = (layer.experts[:, :k].long() + 1) % experts
        layers.append(type(layer)(layer.name, layer.facts, moved, weights=layer.weights))
    return type(trace)(layers, trace.tokens, trace.documents, trace.positions)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", PATTERNS)
def test_live_weights_are_those_of_the_family(family):
    """Weights of forced experts equal the router's own rule, and gradients reach the router."""
    model = lively(tiny_model(family))
    trace = other_trace(model)
    model.requires_grad_(True)
    with replay(model, trace) as replayed:
        states(model(input_ids=batch())).float().square().sum().backward()
    assert sum(replayed.changed.values()) > 0
    for layer in trace.layers:
        router = model.get_submodule(layer.name)
        parameters = [p for p in router.parameters() if p.grad is not None]
        if parameters:
            assert any(bool(p.grad.abs().sum() > 0) for p in parameters)


def test_a_training_step_has_the_gradient_of_a_router_that_chose_so():
    """A bias on the selection makes another router choose the record by itself."""
    model = lively(tiny_model("deepseek_v3", n_group=1, topk_group=1)).requires_grad_(True)
    routers = [m for m in model.modules() if family_of(m) is not None]
    before = [r.e_score_correction_bias.clone() for r in routers]
    for router in routers:
        router.e_score_correction_bias.copy_(torch.randn(8) * 2)
    trace, _ = recorded(model)

    def gradients():
        model.zero_grad()
        states(model(input_ids=batch())).square().sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    for router, bias in zip(routers, before, strict=True):
        router.e_score_correction_bias.copy_(bias)
    free = gradients()
    with replay(model, trace) as replayed:
        replayed_gradients = gradients()
    assert sum(replayed.changed.values()) > 0
    assert any(not torch.allclose(free[n], expected[n], rtol=1e-3) for n in expected)
    for name in expected:
        scale = float(expected[name].abs().max())
        assert torch.allclose(
            replayed_gradients[name], expected[name], rtol=1e-4, atol=1e-5 * scale
        ), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_the_record(reentrant):
    model = lively(tiny_model("olmoe")).requires_grad_(True)
    ids = [batch(), batch().flip(1)]
    trace = other_trace(model, torch.cat(ids))

    def step():
        model.zero_grad()
        losses = [states(model(input_ids=part)).square().mean() for part in ids]
        losses[0].backward()  # not in reverse: passes are found by their logits
        losses[1].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    model.train()
    with replay(model, trace):
        plain = step()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with replay(model, trace):
        again = step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, again, strict=True))


def test_generate_takes_what_is_recorded_and_goes_on_by_itself():
    model = lively(tiny_model("olmoe"))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        with capture(model) as recorder:
            plain = model.generate(batch(), **options)
        trace = recorder.trace()
        with replay(model, trace) as replayed:
            again = model.generate(batch(), **options)
        assert replayed.recorded == replayed.tokens == trace.n_tokens
        short = select_tokens(trace, trace.positions < 12)
        with replay(model, short) as part:
            model.generate(batch(), **options)
    assert torch.equal(plain, again)
    assert (part.recorded, part.tokens) == (24, trace.n_tokens)


def test_padding_and_tokens_without_a_record_go_by_the_live_router():
    model = lively(tiny_model("olmoe"))
    ids, mask = batch(), torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    with torch.no_grad(), capture(model) as recorder:
        plain = states(model(input_ids=ids, attention_mask=mask))
    trace = recorder.trace()
    part = select_tokens(trace, torch.arange(trace.n_tokens, device="cpu") % 3 != 0)
    for routes in (trace, part):
        with torch.no_grad(), replay(model, routes, "recorded") as replayed:
            again = states(model(input_ids=ids, attention_mask=mask))
        assert torch.equal(again, plain)
        assert replayed.tokens == 20
        assert replayed.recorded == routes.n_tokens


def test_near_ties_alone_are_replayed():
    model = lively(tiny_model("olmoe"))
    trace, _ = recorded(model)
    expected = {layer.name: int((layer.gap < 0.2).sum()) for layer in trace.layers}
    with torch.no_grad(), replay(model, trace, only=0.2) as part:
        model(input_ids=batch())
    assert part.replayed == expected
    sent = sum(expected.values()) * (2 + 4)
    assert part.saved == pytest.approx(1 - sent / (2 * 24 * 2))
    with torch.no_grad(), replay(model, trace, only="near-ties") as near, emulate(model, "bf16"):
        model(input_ids=batch())
    assert sum(near.replayed.values()) < 48


def test_layers_match_by_name_by_number_or_in_order():
    model = lively(tiny_model("olmoe"))
    trace = other_trace(model)
    array = np.stack([layer.experts.numpy() for layer in trace.layers], 1)
    outputs = []
    for routes in (trace, array.reshape(2, 12, 2, 2)):
        with torch.no_grad(), replay(model, routes):
            outputs.append(states(model(input_ids=batch())))
    one_request = import_trace({"routed_experts": array[None]})
    warned = pytest.warns(ReplayWarning, match="1 of 2 documents")
    with warned, torch.no_grad(), replay(model, one_request):
        outputs.append(states(model(input_ids=batch())))
    assert torch.equal(outputs[0], outputs[1])
    with pytest.raises(TielineError, match="neither names nor numbers match"):
        replay(model, array[:, :1].repeat(3, axis=1)[:, [0, 1, 2]]).__enter__()
    first = [layer.name for layer in trace.layers][:1]
    with torch.no_grad(), replay(model, trace, layers=first) as replayed:
        model(input_ids=batch())
    assert list(replayed.changed) == first


def test_other_tokens_are_refused_with_their_place():
    model = lively(tiny_model("olmoe"))
    trace, _ = recorded(model)
    ids = batch()
    ids[1, 7] += 1
    message = r"document 1, position 7 has token \d+, the record \d+"
    with pytest.raises(TielineError, match=message), replay(model, trace), torch.no_grad():
        model(input_ids=ids)
    assert type(model.model.layers[0].mlp.gate).__mro__[0].__name__ == "OlmoeTopKRouter"


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda t: t, {"weights": "all"}, "live"),
        (lambda t: t, {"only": -1.0}, "above 0"),
        (lambda t: np.zeros((24, 2, 3), int) + np.arange(3), {}, "chooses 2 experts, the record 3"),
        (lambda t: np.zeros((24, 2, 2), int) + np.arange(2), {"weights": "recorded"}, "no combine"),
        (lambda t: np.zeros((24, 2, 2), int) + np.arange(2), {"only": 0.1}, "no scores beside"),
        (lambda t: np.zeros((24, 2, 2), int) + np.arange(2) * 9, {}, "the record names 9"),
    ],
)
def test_records_that_do_not_fit_are_refused(no_axis_checks, change, options, message):
    model = lively(tiny_model("olmoe"))
    trace, _ = recorded(model)
    with pytest.raises(TielineError, match=message), replay(model, change(trace), **options):
        model(input_ids=batch())


def test_smoothed_models_and_replays_inside_replays_are_refused():
    model = lively(tiny_model("olmoe"))
    trace, _ = recorded(model)
    with replay(model, trace), pytest.raises(TielineError, match="under replay already"):
        replay(model, trace).__enter__()
    part = model.model.layers[0].mlp.gate
    with replay(model, trace), pytest.raises(TielineError, match="outside the forward pass"):
        part(torch.zeros(3, 32))


def test_forced_experts_are_those_of_an_override():
    """The output equals that of `override_choice` with the same choice."""
    model = lively(tiny_model("olmoe"))
    trace = other_trace(model)
    with torch.no_grad(), replay(model, trace, "recorded"):
        replayed_states = states(model(input_ids=batch()))
    with torch.no_grad(), ExitStack() as stack:
        for layer in trace.layers:
            choice = Choice(layer.weights, layer.experts.long())
            router = model.get_submodule(layer.name)
            stack.enter_context(override_choice(router, lambda _, choice=choice: choice))
        expected = states(model(input_ids=batch()))
    assert torch.allclose(replayed_states, expected, atol=1e-6)
    assert tl.replay is replay


ROOT = Path(__file__).parents[3]
LIMIT = 400.0  # seconds; only a hang takes so long


@pytest.fixture(params=["mixtral", "deepseek_v3", "gpt_oss"])
def single_process(request, tmp_path):
    """A saved model, routes of its int4 routers, and the results of a single process."""
    model = lively(tiny_model(request.param)).eval()
    model.save_pretrained(tmp_path / "model")
    save_file({"ids": batch()}, tmp_path / "ids.safetensors")
    tensors = {}
    with torch.no_grad():
        with emulate(model, "int4", "router"), capture(model) as recorder:
            model(input_ids=batch())
        save_trace(recorder.trace(), tmp_path / "trace")
        tensors["plain"] = model(input_ids=batch()).logits
        for weights in ("live", "recorded"):
            with replay(model, recorder.trace(), weights) as replayed:
                tensors[weights] = model(input_ids=batch()).logits
    tensors["changed"] = torch.tensor(list(replayed.changed.values()))
    n_parameters = sum(weight.numel() for weight in model.parameters())
    return tmp_path, tensors, n_parameters


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("cut", ["tensor", "expert"])
def test_two_ranks_replay_as_one_process_does(single_process, cut):
    folder, expected, n_parameters = single_process
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.models.replay_ranks", str(folder), cut]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        tensors = load_file(folder / f"{cut}-{rank}.safetensors")
        assert tensors["local"] < n_parameters  # it is cut
        assert torch.equal(tensors["changed"], expected["changed"])
        assert expected["changed"].sum() > 0
        for name in ("plain", "live", "recorded"):
            torch.testing.assert_close(tensors[name], expected[name], rtol=1e-5, atol=1e-6)
        assert (tensors["plain"] - tensors["live"]).abs().max() > 1e-4
