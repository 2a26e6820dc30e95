"""Auxiliary losses at values known in closed form, and their collection over a model."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tieline import SmoothTopK, TielineError, auxiliary_loss, collect_routing, moe
from tieline.routing import balance_loss, boundary_loss, router_z_loss, sparsity_loss
from tieline.routing.losses import Counts


def test_balance_is_one_when_uniform_and_the_number_of_experts_when_collapsed():
    uniform = torch.zeros(8, 4, dtype=torch.float64)
    assert balance_loss(uniform, torch.eye(4).double().repeat(2, 1)).item() == 1
    collapsed = torch.tensor([[50.0, 0, 0, 0]]).repeat(8, 1).double()
    assert balance_loss(collapsed, torch.eye(4).double()[:1].repeat(8, 1)).item() == pytest.approx(
        4
    )


def test_the_balance_gradient_flows_through_probabilities_only():
    scores = torch.randn(8, 4, requires_grad=True)
    weights = torch.rand(8, 4, requires_grad=True)
    balance_loss(scores, weights).backward()
    assert scores.grad.abs().sum() > 0
    assert weights.grad is None


def test_router_z_is_the_mean_square_of_the_log_sum():
    scores = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    ln2 = torch.log(torch.tensor(2.0, dtype=torch.float64))
    torch.testing.assert_close(router_z_loss(scores), (ln2**2 + (1 + ln2) ** 2) / 2)


def test_the_gradient_of_the_boundary_loss_is_the_excess_over_the_budget():
    epsilon = torch.tensor(0.3, requires_grad=True)
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.4, 0.4]])
    loss = boundary_loss(epsilon, weights, budget=2.25)
    loss.backward()
    assert loss.item() == pytest.approx(0.3 * 0.25)
    assert epsilon.grad.item() == pytest.approx(0.25)


def test_descent_on_the_boundary_loss_meets_the_budget():
    gate, scores = SmoothTopK(2), torch.randn(512, 16)
    optimiser = torch.optim.SGD(gate.parameters(), lr=1.0)
    for _ in range(600):
        optimiser.zero_grad()
        boundary_loss(gate.epsilon, gate(scores), gate.budget).backward()
        optimiser.step()
    active = (gate(scores) != 0).sum(-1).float().mean().item()
    assert active == pytest.approx(2.5, abs=0.02)


def test_sparsity_is_the_mean_l1_norm():
    assert sparsity_loss(torch.tensor([[1.0, -2.0], [0.0, 0.5]])).item() == 1.75


def test_a_loss_of_no_tokens_is_refused():
    with pytest.raises(TielineError, match="at least one token"):
        router_z_loss(torch.zeros(0, 4))


class Stack(torch.nn.Module):
    """Two layers, the second under activation checkpointing of the asked kind."""

    def __init__(self, reentrant):
        super().__init__()
        self.first = moe(d_model=6, n_experts=4, k=2, d_hidden=5, gate="smooth")
        self.second = moe(d_model=6, n_experts=4, k=2, d_hidden=5)
        self.reentrant = reentrant

    def forward(self, x):
        x = x + self.first(x)
        if self.reentrant is None:
            return x + self.second(x)
        return x + checkpoint(self.second, x, use_reentrant=self.reentrant)


def gradients(reentrant, backward_inside):
    torch.manual_seed(0)
    model, x = Stack(reentrant), torch.randn(5, 7, 6)
    with collect_routing(model) as routing:
        loss = model(x).square().mean()
        if backward_inside:
            total = loss + auxiliary_loss(routing, balance=0.1, router_z=0.01, boundary=0.1)
            total.backward()
    count = len(routing)
    if not backward_inside:
        (loss + auxiliary_loss(routing, balance=0.1, router_z=0.01, boundary=0.1)).backward()
    return count, [record.name for record in routing], [p.grad for p in model.parameters()]


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("reentrant", [None, False])
def test_each_layer_is_counted_once_also_under_checkpointing(reentrant, backward_inside):
    count, names, grads = gradients(reentrant, backward_inside)
    assert count == 2
    assert names == ["first", "second"]
    for mine, plain in zip(grads, gradients(None, False)[2], strict=True):
        torch.testing.assert_close(mine, plain)


def test_reentrant_checkpointing_is_refused_in_words():
    with pytest.raises(TielineError, match="use_reentrant=False"):
        gradients(True, False)


def test_a_model_without_layers_has_no_auxiliary_loss():
    with (
        pytest.raises(TielineError, match="ran no MoE layer"),
        collect_routing(torch.nn.Linear(2, 2)) as routing,
    ):
        auxiliary_loss(routing, balance=1.0)


def test_nothing_stays_attached_to_the_model():
    model = Stack(None)
    with collect_routing(model):
        pass
    assert not model.first.gate._forward_hooks


def test_parts_of_a_batch_add_up_to_its_losses_and_gradients():
    torch.manual_seed(3)
    gate, scores = SmoothTopK(2), torch.randn(9, 4, requires_grad=True)
    counts = Counts.from_weights(gate(scores).detach())

    def losses(z, over):
        w = gate(z)
        return torch.stack(
            [
                balance_loss(z, w, over),
                router_z_loss(z, over),
                boundary_loss(gate.epsilon, w, gate.budget, over),
                sparsity_loss(w, over),
            ]
        )

    full = losses(scores, None)
    summed = sum(losses(part, counts) for part in scores.split([4, 0, 5]))
    torch.testing.assert_close(summed, full)
    inputs = [scores, gate.theta]
    mine, plain = (torch.autograd.grad(total.sum(), inputs) for total in (summed, full))
    torch.testing.assert_close(mine, plain)
