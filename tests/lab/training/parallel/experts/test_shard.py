"""Training on a grid of ranks is training in one process, step by step."""

import pytest
import torch
import torch.nn.functional as F

from tests.lab.training.parallel.tasks import LOSSES, batch, fresh_model, optimiser, refusal, train
from tieline import auxiliary_loss, collect_routing

STEPS = 4


def one_process(n_experts, rows):
    """The same training with nothing of the parallel code: plain means and torch's own clipping."""
    model = fresh_model(n_experts)
    adam, told = optimiser(model), []
    for step in range(STEPS):
        adam.zero_grad()
        ids = batch(step, rows)
        with collect_routing(model) as records:
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss = loss + auxiliary_loss(records, **LOSSES)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
        adam.step()
        told.append((loss.item(), norm.item(), gradient))
    return told, {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_training(found, n_experts, rows):
    steps, parameters = one_process(n_experts, rows)
    for rank_steps, rank_parameters in found:
        for mine, plain in zip(rank_steps, steps, strict=True):
            assert mine[0] == pytest.approx(plain[0], abs=1e-5)
            assert mine[1] == pytest.approx(plain[1], abs=1e-5)
            for name, gradient in plain[2].items():
                torch.testing.assert_close(mine[2][name], gradient, rtol=0, atol=1e-6)
        # AdamW's first steps divide a gradient by its own size: rounding of tiny ones shows
        for name, parameter in parameters.items():
            torch.testing.assert_close(rank_parameters[name], parameter, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("expert_ranks", "n_experts", "rows"),
    [(2, 4, 5), (2, 5, 4), (1, 4, 5), (2, 4, 1)],
    ids=["experts over ranks", "uneven experts", "data over ranks", "a rank without tokens"],
)
def test_two_ranks_train_as_one_process(pair, expert_ranks, n_experts, rows):
    found = pair.run(train, STEPS, expert_ranks, n_experts, rows)
    assert_same_training(found, n_experts, rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "expert_ranks", "n_experts"),
    [(4, 2, 3), (3, 3, 4), (4, 4, 4)],
    ids=["two by two", "a rank without experts", "an expert each"],
)
def test_larger_grids_train_as_one_process(ranks, count, expert_ranks, n_experts):
    found = ranks(count).run(train, STEPS, expert_ranks, n_experts, 6)
    assert_same_training(found, n_experts, 6)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((3, 4, False), "expert_ranks must divide the number of ranks, 2, got 3"),
        ((2, 4, True), "spread over ranks already"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(pair, asked, words):
    for said in pair.run(refusal, *asked):
        assert words in said
