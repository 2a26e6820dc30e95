"""Plans: keys, blocks, and estimates of time."""

from dataclasses import replace

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.rate_plan import RatePlan, estimate_seconds, plan_blocks

MODEL = MoEModel("linear", "softmax", "tanh", d=1, n_experts=2)


def plan(**changes):
    generator = torch.Generator().manual_seed(0)
    truth = MODEL.unflatten(torch.randn(8, dtype=torch.float64, generator=generator))
    options = {"sizes": (50, 100), "repetitions": 3, **changes}
    return RatePlan("tiny", MODEL, MODEL, truth, truth, **options)


def test_the_key_is_that_of_the_results_and_not_of_the_grid():
    first = plan()
    assert first.key == plan().key
    assert first.key == plan(sizes=(50, 900), repetitions=9, radii=(0.3,)).key
    others = [{"noise": 0.2}, {"seed": 1}, {"shrink": True}, {"starts": 2}, {"method": "sgd"}]
    keys = {plan(**change).key for change in [*others, {"loss": "L2"}, {"law": "normal"}]}
    assert len(keys | {first.key}) == 8
    moved = replace(first, truth=MODEL.unflatten(first.truth.flatten() + 1e-9))
    assert moved.key != first.key


def test_blocks_hold_everything_once_largest_first_and_skip_what_is_done():
    study_plan = plan(radii=(0.1, 0.5))
    blocks = plan_blocks(study_plan, most=8 * 120)
    cells = [(b.n, b.radius, r) for b in blocks for r in b.repetitions]
    assert len(cells) == len(set(cells)) == 12
    assert [b.rows for b in blocks] == sorted((b.rows for b in blocks), reverse=True)
    assert max(b.rows for b in blocks) <= 120
    left = plan_blocks(study_plan, done=[(50, 0.1, 0), (50, 0.1, 2), (100, 0.5, 1)])
    cells = {(b.n, b.radius, r) for b in left for r in b.repetitions}
    assert len(cells) == 9
    assert (50, 0.1, 1) in cells


def test_a_repetition_has_the_same_seed_in_every_block_and_for_every_radius():
    study_plan = plan(radii=(0.1, 0.5))
    large, small = plan_blocks(study_plan), plan_blocks(study_plan, most=1)
    seeds = {
        (b.n, r): s for b in large for r, s in zip(b.repetitions, b.seeds(study_plan), strict=True)
    }
    for block in small:
        assert block.seeds(study_plan) == [seeds[block.n, block.repetitions[0]]]
    assert len(set(seeds.values())) == 6


def test_time_grows_with_the_work_and_is_none_for_none():
    study_plan = plan(sizes=(5000, 50_000))
    blocks = plan_blocks(study_plan)
    assert estimate_seconds(study_plan, [], 1) == 0
    assert estimate_seconds(study_plan, blocks, 1) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": ()}, "sample sizes grow"),
        ({"sizes": (100, 50)}, "sample sizes grow"),
        ({"repetitions": 1}, "repetitions >= 2, got 1"),
        ({"starts": 0}, "starts >= 1"),
        ({"radii": (-0.1,)}, "not negative"),
        ({"radii": (0.1, 0.1)}, "different"),
        ({"method": "em"}, "method must be one of"),
    ],
)
@pytest.mark.usefixtures("no_axis_checks")
def test_senseless_plans_are_refused(change, message):
    with pytest.raises(TielineError, match=message):
        plan(**change)


def test_a_sample_size_is_emulated_by_the_noise():
    emulated = plan(sizes=(100, 10**12), samples=100, noise=0.3)
    assert emulated.drawn(100) == (100, 0.3)
    assert emulated.drawn(10**12) == (100, pytest.approx(0.3e-5))
    assert plan().drawn(50) == (50, plan().noise)
    assert emulated.key != plan(sizes=(100, 10**12), noise=0.3).key
    with pytest.raises(TielineError, match="emulate sizes of at least 100"):
        plan(samples=100)
