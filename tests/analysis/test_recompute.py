"""Verdicts against planted causes: ties, near-ties, noise, dropout, a broken router."""

import itertools

import pytest
import torch
from torch import nn

from tests.models.tiny import batch, lively, tiny_model
from tieline import gap, moe
from tieline.analysis.recompute import recompute_check
from tieline.core.errors import TielineError
from tieline.models import find_routers

WIDTH, EXPERTS, K = 8, 6, 2
ALONE = ("recompute",)


def block():
    return moe(d_model=WIDTH, n_experts=EXPERTS, k=K, d_hidden=4)


def walls(layer, tokens, rows, off=0.0):
    """Tokens of which some rows lie on the wall between ranks k and k + 1, up to rounding."""
    x = torch.randn(tokens, WIDTH, dtype=torch.float64)
    weight = layer.router.weight.detach().double()
    scores = x @ weight.T
    order = scores.argsort(dim=1, descending=True)
    normal = weight[order[:, K - 1]] - weight[order[:, K]]
    distance = (gap(scores, K) - off) / normal.square().sum(dim=1)
    x[rows] = (x - distance[:, None] * normal)[rows]
    return x.float()


class Flicker(nn.Module):
    """A block after a step whose result varies between calls without torch's generator."""

    def __init__(self, inner, changes):
        super().__init__()
        self.inner, self.changes = inner, itertools.cycle(changes)

    def forward(self, x):
        return self.inner(x + next(self.changes))


def flicker(layer, size):
    """Every second pass is shifted along a fixed direction by a relative `size`."""
    direction = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3)) * size
    return Flicker(layer, [torch.zeros(WIDTH), torch.zeros(WIDTH), direction])


def test_a_deterministic_block_is_identical_and_left_as_it_was():
    layer, x = block(), torch.randn(3, 10, WIDTH)
    state = torch.get_rng_state()
    report = recompute_check(layer, x, kinds=ALONE)
    assert (report.verdict, report.tokens, report.layers) == ("identical", 30, ("",))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in layer.parameters())
    assert not any(m._forward_hooks for m in layer.modules())
    assert report.repetitions[0].score_change == report.repetitions[0].output_change == 0


def test_near_tie_flips_are_found_at_the_planted_tokens():
    layer = block()
    rows = torch.tensor([3, 11, 40])
    x = walls(layer, 64, rows, off=1e-7)
    report = recompute_check(flicker(layer, 1e-5), x, kinds=ALONE)
    (only,) = report.repetitions
    assert report.verdict == only.verdict == "near-tie flip"
    flipped = {flip.token for flip in only.flips}
    assert flipped
    assert flipped <= set(rows.tolist())
    assert only.flipped == len(only.flips)
    for flip in only.flips:
        assert 0 < flip.gap < 1e-5
        assert flip.gap <= 2 * flip.moved
        assert len(flip.left) == len(flip.entered) == 1
        assert not flip.follows
    assert "near-ties" in only.explanation


def test_exact_ties_of_a_transformers_router():
    model = lively(tiny_model("mixtral")).requires_grad_(True)
    (name, router), *_ = find_routers(model).items()
    with torch.no_grad():
        router.weight.copy_(router.weight[:1].expand_as(router.weight))
    plain, calls = router.forward, itertools.count()

    def forward(hidden):
        logits, weights, ids = plain(hidden)
        return logits, weights, (ids + next(calls) % 2) % logits.shape[-1]

    router.forward = forward
    report = recompute_check(model, batch())
    assert report.verdict == "exact tie"
    worst = next(
        repetition for repetition in report.repetitions if repetition.verdict == "exact tie"
    )
    assert worst.flips[0].layer == name
    assert worst.flips[0].gap == 0
    assert all(flip.follows == (flip.layer != name) for flip in worst.flips)


def test_large_noise_is_not_blamed_on_routing():
    layer, x = block(), torch.randn(64, WIDTH)
    report = recompute_check(flicker(layer, 0.5), x, kinds=ALONE)
    assert report.verdict == "differs, but not by routing"
    assert "scores differ beforehand" in report.explanation


def test_another_output_of_the_same_choice_is_not_blamed_on_routing():
    layer, x = block(), torch.randn(64, WIDTH)

    class After(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.signs = layer, itertools.cycle([1.0, 1.0, -1.0])

        def forward(self, x):
            return self.inner(x) * next(self.signs)

    report = recompute_check(After(), x, kinds=ALONE)
    assert report.verdict == "differs, but not by routing"
    assert report.repetitions[0].flipped == 0
    assert report.repetitions[0].output_change == pytest.approx(2.0)


def test_dropout_draws_the_same_numbers_again():
    layer = nn.Sequential(nn.Dropout(0.5), block())
    assert recompute_check(layer, torch.randn(30, WIDTH), kinds=ALONE).verdict == "identical"


def test_a_choice_that_the_scores_do_not_explain():
    model = lively(tiny_model("mixtral")).requires_grad_(True)
    router = next(iter(find_routers(model).values()))
    plain, calls = router.forward, itertools.count()

    def forward(hidden):  # logits are exchanged together with the choice in every third pass
        logits, weights, ids = plain(hidden)
        if next(calls) % 3 == 2:
            logits = logits.roll(1, dims=-1)
            ids = (ids + 1) % logits.shape[-1]
        return logits, weights, ids

    router.forward = forward
    report = recompute_check(model, batch(), kinds=ALONE)
    assert report.verdict == "differs, but not by routing"


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_models_route_alike_in_every_way(family):
    model = lively(tiny_model(family))
    report = recompute_check(model, {"input_ids": batch(4, 6)})
    assert [repetition.way for repetition in report.repetitions] == [
        "recompute",
        "split",
        "threads",
    ]
    assert all(repetition.flipped == 0 for repetition in report.repetitions)
    assert report.repetitions[0].verdict == "identical"
    assert report.tokens == 24
    assert report.to_dict()["verdict"] == report.verdict


def test_compiled_against_eager():
    block = lively(tiny_model("mixtral")).model.layers[0].mlp
    report = recompute_check(block, torch.randn(2, 6, 32), kinds=("compiled",), backend="aot_eager")
    assert report.repetitions[0].way == "compiled"
    assert report.repetitions[0].flipped == 0
    assert report.repetitions[0].output_change is not None


def test_a_batch_of_one_row_has_no_parts():
    report = recompute_check(block(), torch.randn(1, WIDTH))
    assert list(report.left_out) == ["split"]
    assert [repetition.way for repetition in report.repetitions] == ["recompute", "threads"]


def test_listed_flips_are_limited_and_counted():
    layer = block()
    x = walls(layer, 64, torch.arange(64))
    report = recompute_check(flicker(layer, 1e-5), x, kinds=ALONE, most_flips=2)
    assert len(report.repetitions[0].flips) == 2 < report.repetitions[0].flipped


def test_bad_arguments_are_refused():
    layer, x = block(), torch.randn(4, WIDTH)
    with pytest.raises(TielineError, match="kinds"):
        recompute_check(layer, x, kinds=("again",))
    with pytest.raises(TielineError, match="splits=1"):
        recompute_check(layer, x, splits=1)
    with pytest.raises(TielineError, match="no tensor"):
        recompute_check(layer, ())
