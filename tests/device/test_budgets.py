"""How often the host waits for an accelerator, held to a number; results equal those of the CPU."""

from copy import deepcopy
from importlib import import_module

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.device.pretended import counting
from tests.routing.zoo import EXPERTS, all_gates
from tieline import Model, RoutingMonitor, auxiliary_loss, capture, collect_routing, moe, replay
from tieline.core.errors import TielineError
from tieline.models import find_routers
from tieline.routing.activations import ACTIVATIONS
from tieline.routing.dispatch import StaticRows
from tieline.routing.gates import ExpertChoice, GShardTopK

DISPATCH = import_module("tieline.routing.dispatch")  # the package has a function of that name
SIZES = {"d_model": 32, "n_experts": 8, "k": 2, "d_hidden": 16}
GATES = {
    "topk": ("topk", {}),
    "smooth": ("smooth", {}),
    "smooth, at most 4": ("smooth", {"k_max": 4}),
    "smooth, fixed": ("smooth", {"epsilon": 0.2}),
    "projected": ("projected", {}),
    "projected, fixed": ("projected", {"epsilon": 0.2}),
}
LOSSES = {"balance": 0.01, "boundary": 1.0, "router_z": 0.1, "sparsity": 0.1}


def training_step(layer, x):
    """Output, loss and gradients of one step with all auxiliary losses."""
    with collect_routing(layer) as records:
        y = layer(x)
    loss = y.float().square().mean() + auxiliary_loss(records, **LOSSES)
    loss.backward()
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]


def make(gate, dtype, device, **changes):
    """A layer and 64 tokens on a device, the same on each."""
    name, options = GATES[gate]
    torch.manual_seed(0)
    layer = moe(**SIZES, gate=name, gate_options=options, **changes).to(dtype).to(device)
    return layer, torch.randn(64, 32, device="cpu").to(dtype).to(device).requires_grad_()


@pytest.mark.parametrize("more", [{}, {"bias": True, "shared_hidden": 16}], ids=["plain", "bias"])
@pytest.mark.parametrize("gate", GATES)
def test_a_training_step_in_bfloat16_waits_for_nothing(fake, gate, more):
    layer, x = make(gate, torch.bfloat16, fake, **more)
    with counting() as traffic:
        training_step(layer, x)
    assert traffic.waits == 0, traffic


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gate", GATES)
def test_outputs_and_gradients_are_those_of_the_cpu(fake, gate, activation):
    changes = {"activation": activation, "bias": True, "shared_hidden": 16}
    there, here = (
        training_step(*make(gate, torch.float32, device, **changes)) for device in (fake, "cpu")
    )
    for ours, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=2e-6)


def test_in_float32_only_the_grouped_products_read_their_offsets(fake):
    layer, x = make("topk", torch.float32, fake)
    with counting() as traffic:
        training_step(layer, x)
    assert set(traffic.reads) == {"offsets of grouped_mm, not in bfloat16"}
    assert traffic.waits == 6  # two products, and two of each in the backward pass


def test_launches_do_not_grow_with_the_number_of_experts(fake):
    counts = []
    for experts in (4, 64):
        layer = moe(**(SIZES | {"n_experts": experts})).bfloat16().to(fake)
        x = torch.randn(64, 32, device="cpu").bfloat16().to(fake).requires_grad_()
        with counting() as traffic:
            training_step(layer, x)
        counts.append(traffic.launches.total())
    assert counts[0] == counts[1]


def test_many_rows_without_a_bound_are_counted_once(fake, monkeypatch):
    monkeypatch.setattr(DISPATCH, "MAX_STATIC_ELEMENTS", 1)
    layer, x = make("smooth", torch.bfloat16, fake)
    with counting() as traffic:
        training_step(layer, x)
    assert dict(traffic.reads) == {"nonzero": 1}
    assert traffic.waits == 1
    there = training_step(*make("smooth", torch.float32, fake, bias=True))
    here = training_step(*make("smooth", torch.float32, "cpu", bias=True))
    for ours, theirs in zip(there, here, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=2e-6)


def test_a_bounded_gate_needs_no_count_however_many_rows_there_are(fake, monkeypatch):
    monkeypatch.setattr(DISPATCH, "MAX_STATIC_ELEMENTS", 1)
    for gate in ("topk", "smooth, at most 4"):
        layer, x = make(gate, torch.bfloat16, fake)
        with counting() as traffic:
            training_step(layer, x)
        assert traffic.waits == 0, (gate, traffic)


EVERY_GATE = {**all_gates(), "gshard": GShardTopK(2, noise=0.0), "expert choice": ExpertChoice(2)}


@pytest.mark.parametrize("name", EVERY_GATE)
def test_every_gate_gives_the_weights_and_gradients_of_the_cpu(fake, name):
    results = []
    for device in ("cpu", fake):
        gate = deepcopy(EVERY_GATE[name]).to(device).eval()
        scores = torch.randn(40, EXPERTS, generator=torch.Generator().manual_seed(1), device="cpu")
        scores = scores.to(device).requires_grad_()
        weights = gate(scores)
        results.append([weights.detach().cpu()])
        if weights.requires_grad:
            weights.square().sum().backward()
            results[-1].append(scores.grad.cpu())
    for here, there in zip(*results, strict=True):
        torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)


@given(st.integers(0, 10_000), st.sampled_from([None, 1, 2, 5]), st.booleans())
def test_padding_reaches_no_result(seed, most, some_without):
    """Rows by brute force, with padding that is no number."""
    draw = torch.Generator().manual_seed(seed)
    weights = torch.rand(7, 5, generator=draw)
    keep = most or 5
    mask = torch.rand(7, 5, generator=draw).argsort(1) < keep
    weights = torch.where(mask, weights, 0.0)
    if some_without:
        weights[::2] = 0
    rows = StaticRows.from_weights(weights, most, 4)
    x = torch.randn(7, 4, generator=draw, requires_grad=True)
    taken = rows.take(x)
    for row, (token, used) in enumerate(zip(rows.token, rows.used, strict=True)):
        assert not used or torch.equal(taken[row], x[token])
    ends = rows.offsets.tolist()
    for expert, (low, high) in enumerate(zip([0, *ends], ends, strict=False)):
        tokens = weights[:, expert].nonzero().squeeze(1)
        assert torch.equal(rows.token[low:high], tokens)
        assert bool((rows.expert[low:high] == expert).all())
    assert rows.used.squeeze(1).tolist() == [row < ends[-1] for row in range(len(rows.used))]
    spoiled = torch.where(rows.used, taken, torch.nan)
    total = rows.sum_by_token(spoiled)
    assert torch.equal(total, (weights != 0).sum(1, keepdim=True) * x) or torch.allclose(
        total, (weights != 0).sum(1, keepdim=True) * x, atol=1e-6
    )
    (grad,) = torch.autograd.grad(
        rows.take(x), x, torch.where(rows.used, 1.0, torch.nan).expand(-1, 4)
    )
    assert torch.equal(grad, (weights != 0).sum(1, keepdim=True).float().expand(-1, 4))
    gates = rows.gate(weights)
    assert torch.equal(gates.squeeze(1)[rows.used.squeeze(1)], weights.T[weights.T != 0])
    assert not gates[~rows.used].any()


@pytest.mark.parametrize("name", all_gates())
def test_no_token_has_more_experts_than_the_gate_says(name):
    gate = all_gates()[name].eval()
    scores = torch.randint(-3, 4, (200, EXPERTS)).float()  # many ties
    most = gate.most_active
    assert most is None or bool(((gate(scores) != 0).sum(dim=1) <= most).all())


def test_the_monitor_waits_at_logged_steps_only(fake):
    layer = moe(**SIZES).bfloat16().to(fake)
    waits = []
    with RoutingMonitor(layer, every=3) as monitor, collect_routing(layer) as records:
        for _ in range(7):
            x = torch.randn(64, 32, device=fake, dtype=torch.bfloat16)
            records.clear()
            with counting() as traffic:
                y = layer(x).float().square().mean()
                (y + auxiliary_loss(records, balance=0.01)).backward()
                monitor.step()
            waits.append(traffic.waits)
    assert [n > 0 for n in waits] == [step % 3 == 0 for step in range(7)]
    assert max(waits) == 3, waits


def demo_on(device, dtype=torch.float32):
    """The demo model on a device, its input, and how often its own forward pass waits."""
    model = Model.open("demo").module.to(dtype).to(device).eval()
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 512, (2, 24), generator=draw, device="cpu").to(device)
    with torch.no_grad(), counting() as plain:
        model(input_ids=ids)
    return model, ids, plain.waits


def test_capture_copies_ids_and_one_block_per_pass(fake):
    model, ids, plain = demo_on(fake)
    with torch.no_grad(), capture(model) as recorder, counting() as traffic:
        for _ in range(3):
            model(input_ids=ids)
    assert traffic.waits - 3 * plain == 2 * 3, traffic
    there = recorder.trace()
    model.to("cpu")
    with torch.no_grad(), capture(model) as recorder:
        for _ in range(3):
            model(input_ids=ids.cpu())
    for ours, theirs in zip(there.layers, recorder.trace().layers, strict=True):
        for name, values in theirs.tensors().items():
            copy = ours.tensors()[name]
            assert copy.device.type == "cpu"
            torch.testing.assert_close(copy, values, rtol=1e-5, atol=1e-5)
        assert torch.equal(ours.experts, theirs.experts)


def test_a_padded_batch_costs_one_more_copy(fake):
    model, ids, _ = demo_on(fake)
    mask = torch.ones_like(ids)
    mask[0, -5:] = 0
    with torch.no_grad(), counting() as masked:
        model(input_ids=ids, attention_mask=mask)
    with torch.no_grad(), capture(model) as recorder, counting() as traffic:
        model(input_ids=ids, attention_mask=mask)
    assert traffic.waits - masked.waits <= 4  # ids, mask, the rows that are kept, the records
    assert recorder.trace().n_tokens == 43


def test_checks_of_a_pass_on_the_device_are_made_when_it_ends(fake):
    model, ids, _ = demo_on(fake)
    with torch.no_grad():
        next(iter(find_routers(model).values())).weight[3] = torch.nan
    with (
        torch.no_grad(),
        pytest.raises(TielineError, match="NaN or infinite, first at token 0 of document 0"),
        capture(model),
    ):
        model(input_ids=ids)


def test_replay_waits_once_per_layer(fake):
    model, ids, plain = demo_on(fake)
    with torch.no_grad(), capture(model) as recorder:
        model(input_ids=ids)
    trace = recorder.trace()
    with torch.no_grad(), replay(model, trace) as replayed:
        model(input_ids=ids)  # brings the record to the device
    with torch.no_grad(), replay(model, trace) as replayed, counting() as first:
        model(input_ids=ids)
    layers = len(trace.layers)
    brought = 3 * layers  # experts, their sets and which are sent, once per block
    assert first.waits - plain == layers + brought + 2  # ids to the CPU, rows to the device
    assert replayed.changed == dict.fromkeys(replayed.changed, 0)
