"""Projected top-k: the definition, its limits, its Lipschitz constant and its gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reference import quadratic_programme
from tests.routing.smooth_gates.test_smooth_topk import TIES, along
from tests.routing.zoo import EXPERTS, TOPK_VARIANTS, projected
from tests.strategies import score_matrices, seeds
from tieline import Groups, ProjectedTopK, SmoothTopK, TielineError, TopK, auxiliary_loss, moe
from tieline.core.ranking import gap
from tieline.lab.limits.continuity_cost import LaplaceTopK
from tieline.routing import collect_routing, projected_columns, seat_projection
from tieline.routing.smooth_gates import group_projection

K = 3
variants = pytest.mark.parametrize("name", TOPK_VARIANTS)
epsilons = st.sampled_from([0.125, 0.4, 1.0, 3.0])


def double(rows):
    return torch.tensor(rows, dtype=torch.float64)


def tied_scores(order, tokens=1):
    """Scores of 8 experts in which `order` more than one tie at the third place."""
    below = torch.linspace(-4, -3, EXPERTS - 3 - order + 1).double()
    row = torch.cat((double([3.0, 2.0]), double([1.0] * (order + 1)), below[: EXPERTS - 3 - order]))
    return row.repeat(tokens, 1)


def test_the_worked_example():
    share = ProjectedTopK(2, epsilon=0.1).share(double([[2, 1, 0.96, 0.905, -1]]))
    torch.testing.assert_close(share, double([[1, 0.7, 0.3, 0, 0]]), atol=1e-14, rtol=0)


@settings(deadline=None, max_examples=40)
@given(score_matrices(min_experts=3, max_experts=5, max_tokens=3), epsilons, st.data())
def test_shares_solve_the_quadratic_programme(scores, epsilon, data):
    k = data.draw(st.integers(1, scores.shape[1] - 1))
    caps = [1.0] * scores.shape[1]
    rows = [quadratic_programme(row, caps, k) for row in (scores / epsilon).tolist()]
    torch.testing.assert_close(
        seat_projection(scores, k, epsilon), double(rows), atol=1e-10, rtol=0
    )


@settings(deadline=None, max_examples=40)
@given(score_matrices(min_experts=4, max_experts=5, max_tokens=3), epsilons, st.data())
def test_capped_shares_solve_the_quadratic_programme(scores, epsilon, data):
    experts = scores.shape[1]
    entries = st.lists(st.integers(0, 8), min_size=experts, max_size=experts)
    caps = double(data.draw(entries.filter(lambda c: sum(c) >= 8))) / 8
    k = data.draw(st.integers(1, min(experts - 1, int(caps.sum()))))
    rows = [quadratic_programme(row, caps.tolist(), k) for row in (scores / epsilon).tolist()]
    shares = seat_projection(scores, k, epsilon, caps.expand_as(scores))
    torch.testing.assert_close(shares, double(rows), atol=1e-10, rtol=0)


@variants
@given(seeds)
def test_equals_topk_where_the_gaps_are_epsilon_or_more(name, seed):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    scores = torch.randn(64, EXPERTS, dtype=torch.float64, generator=generator)
    hard, gate = TopK(K, **TOPK_VARIANTS[name]), projected(name, epsilon=0.05)
    selection = hard.selection(scores)
    far = gap(hard._within_groups(selection), K) >= 0.05
    if hard.groups is not None:
        far &= gap(hard.groups.scores(selection), hard.groups.chosen) >= 0.05
    assert torch.equal(gate.share(selection)[far], hard.share(selection)[far])
    torch.testing.assert_close(gate(scores)[far], hard(scores)[far])
    assert ((gate(scores)[~far] != 0).sum(dim=-1) > K).all()
    torch.testing.assert_close(projected(name, epsilon=1e-13)(scores), hard(scores))


@variants
@given(seeds, epsilons)
def test_shares_sum_to_k_at_ties_of_every_kind(name, seed, epsilon):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    selection = torch.randint(-8, 9, (32, EXPERTS), generator=generator).double() / 8
    share = projected(name, epsilon=epsilon).share(selection)
    assert ((share >= 0) & (share <= 1)).all()
    torch.testing.assert_close(
        share.sum(dim=-1), torch.full((32,), 3.0).double(), atol=1e-12, rtol=0
    )
    single = projected(name, epsilon=epsilon).share(selection.float())
    torch.testing.assert_close(single.double(), share, atol=1e-5, rtol=0)


@given(seeds, st.integers(1, EXPERTS - 1), st.permutations(range(EXPERTS)))
def test_permuting_experts_permutes_shares_at_ties_too(seed, k, order):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    scores = torch.randint(-4, 5, (16, EXPERTS), generator=generator).double() / 8
    permuted, share = seat_projection(scores[:, order], k, 0.3), seat_projection(scores, k, 0.3)
    torch.testing.assert_close(permuted, share[:, order], atol=1e-14, rtol=0)
    equal = scores[:, :, None] == scores[:, None, :]
    assert (share[:, :, None] == share[:, None, :])[equal].all()


@pytest.mark.parametrize("order", range(1, 6))
@given(seeds)
@settings(deadline=None, max_examples=20)
def test_the_lipschitz_constant_is_one_over_epsilon_at_ties_of_every_order(order, seed):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    epsilon, point = 0.3, tied_scores(order)
    direction = torch.randn(1, EXPERTS, dtype=torch.float64, generator=generator)
    direction[:, :2] = direction[:, 3 + order :] = 0
    swap = torch.zeros_like(direction)
    swap[:, 2], swap[:, 3] = 1, -1
    t = torch.linspace(-1, 1, 4001, dtype=torch.float64)[:, None]
    ratios = []
    for way in (direction, swap):
        line = point + t * way
        steps = seat_projection(line, K, epsilon).diff(dim=0).norm(dim=-1)
        ratios.append((steps / line.diff(dim=0).norm(dim=-1)).max().item())
    assert ratios[0] <= (1 + 1e-9) / epsilon
    assert ratios[1] == pytest.approx(1 / epsilon, rel=1e-9)  # attained across the tie itself


@given(seeds, epsilons)
def test_no_two_points_are_further_apart_after_the_projection(seed, epsilon):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    x = torch.randn(2, 64, EXPERTS, dtype=torch.float64, generator=generator)
    x[1] = x[0] + x[1] * torch.logspace(-6, 1, 64, dtype=torch.float64)[:, None]
    moved = (seat_projection(x[1], K, epsilon) - seat_projection(x[0], K, epsilon)).norm(dim=-1)
    assert (moved <= (x[1] - x[0]).norm(dim=-1) / epsilon * (1 + 1e-9) + 1e-13).all()


@pytest.mark.parametrize("order", range(1, 6))
def test_the_jacobian_is_that_of_the_active_set(order):
    scores, n = tied_scores(order)[0], order + 1
    jacobian = torch.autograd.functional.jacobian(lambda c: seat_projection(c, K, 0.25), scores)
    expected = torch.zeros(EXPERTS, EXPERTS, dtype=torch.float64)
    expected[2 : 2 + n, 2 : 2 + n] = (torch.eye(n) - torch.full((n, n), 1 / n)) / 0.25
    torch.testing.assert_close(jacobian, expected)
    assert jacobian.abs().sum(dim=1).max().item() == pytest.approx((2 - 2 / n) / 0.25)


@pytest.mark.parametrize("groups", [None, Groups(4, 2, "max"), Groups(4, 2), Groups(2, 1)])
@given(seeds)
@settings(deadline=None, max_examples=10)
def test_gradients_inside_the_band_match_differences(groups, seed):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    selection = 0.4 * torch.randn(2, EXPERTS, dtype=torch.float64, generator=generator)

    def share(c, epsilon):
        return group_projection(c, K, epsilon, groups)

    width = double(0.37).requires_grad_()
    assert torch.autograd.gradcheck(share, (selection.requires_grad_(), width), atol=1e-6)


@variants
@pytest.mark.parametrize("tie", TIES)
def test_the_output_step_shrinks_with_the_input_step(name, tie):
    steps = along(projected(name), tie)
    lipschitz = max(step / h for h, step in steps.items() if h > 1e-4)
    for h, step in steps.items():
        assert step <= 1.5 * lipschitz * h + 1e-13


@given(score_matrices(min_experts=4, max_experts=8), epsilons, st.booleans())
def test_columns_are_the_shares_of_the_gate(scores, epsilon, grouped):
    groups = Groups(2, 1, "max") if grouped and scores.shape[1] % 2 == 0 else None
    columns = projected_columns(scores, 2, epsilon=epsilon, groups=groups)
    dense = torch.zeros_like(scores).scatter(1, columns.ids, columns.share)
    share = ProjectedTopK(2, epsilon=epsilon, groups=groups).share(scores)
    assert torch.equal(dense, share)
    assert columns.ids.shape[1] == (share != 0).sum(dim=-1).max()
    ranked = scores.gather(1, columns.ids)
    inside = (columns.share[:, 1:] > 0).logical_and(columns.share[:, :-1] > 0)
    assert (ranked.diff(dim=1)[inside] <= 0).all()


def test_columns_of_no_tokens_have_k_slots():
    assert projected_columns(torch.zeros(0, 6), 2, epsilon=0.1).ids.shape == (0, 2)


def test_many_tied_experts_share_alike_in_little_memory():
    share = seat_projection(torch.zeros(512, 256), 8, 0.1)
    assert torch.equal(share, torch.full_like(share, 8 / 256))


def test_far_scores_do_not_disturb_the_level():
    near = double([[0.02, 0.0, -0.01]])
    far = torch.cat((double([[1e12, 3e7]]), near, double([[-1e12, -math.inf]])), dim=1)
    share = seat_projection(far, 4, 0.1)
    torch.testing.assert_close(share[:, 2:5], seat_projection(near, 2, 0.1), atol=1e-14, rtol=0)
    assert share[:, [0, 1, 5, 6]].tolist() == [[1, 1, 0, 0]]


def test_a_score_that_is_not_a_number_reaches_the_weights():
    for rows in ([[math.nan, 1.0, 0.99, 0.0]], [[1.0, math.nan, 0.0, -4.0]], [[math.nan] * 4]):
        assert ProjectedTopK(2, epsilon=0.1)(double(rows)).isnan().any()
        assert ProjectedTopK(2, epsilon=0.1, renormalize=False)(double(rows)).isnan().any()


def test_a_learnable_epsilon_gets_a_gradient_and_is_driven_to_its_budget():
    torch.manual_seed(0)
    layer = moe(d_model=8, n_experts=8, k=2, d_hidden=4, gate="projected")
    x = torch.randn(256, 8)
    assert layer.gate.epsilon.item() == pytest.approx(0.05, rel=1e-6)
    optimiser = torch.optim.SGD([layer.gate.theta], lr=0.5)
    for _ in range(200):
        optimiser.zero_grad()
        with collect_routing(layer) as records:
            layer(x)
        auxiliary_loss(records, boundary=1.0).backward()
        optimiser.step()
    assert layer.route(x).active.double().mean().item() == pytest.approx(2.5, abs=0.05)
    layer.gate.theta.grad = None
    layer(x).square().sum().backward()
    assert layer.gate.theta.grad.abs() > 0


def test_a_detached_ramp_stops_the_gradient_through_the_shares_only():
    scores = double([[1.0, 0.5, 0.4, -2.0]]).requires_grad_()
    gate = ProjectedTopK(2, epsilon=0.2)
    (grad,) = torch.autograd.grad(gate(scores)[0, 2], scores)
    w = gate(scores).detach()[0]
    torch.testing.assert_close(grad[0], w[2] * (torch.eye(4).double()[2] - w))


def test_two_competitors_share_along_a_ramp_of_twice_the_width():
    gaps = torch.linspace(-0.3, 0.3, 25, dtype=torch.float64)
    scores = torch.stack((torch.full_like(gaps, 5), gaps, torch.zeros_like(gaps)), dim=1)
    expected = (0.5 + gaps / (2 * 0.2)).clamp(0, 1)
    torch.testing.assert_close(seat_projection(scores, 2, 0.2)[:, 1], expected)
    seats = SmoothTopK(2, epsilon=0.2).share(scores).sum(dim=1)
    assert seats.max() > 2.9  # the one-sided ramp adds an expert where this one shares a seat


@given(seeds, st.sampled_from([1e-3, 0.05, 0.5, 5.0]), st.integers(1, EXPERTS - 1))
def test_the_laplace_gate_has_the_shares_of_its_definition(seed, epsilon, k):
    generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
    scores = torch.randint(-16, 17, (16, EXPERTS), generator=generator).double() / 8
    share = LaplaceTopK(k, epsilon=epsilon).share(scores)
    torch.testing.assert_close(share.sum(dim=1), torch.full((16,), float(k)).double())
    argument = torch.where(share < 0.5, (2 * share).log(), -(2 * (1 - share)).log())
    readable = (share > 1e-6) & (
        share < 1 - 1e-6
    )  # where the argument of L can be read off its value
    level = (scores / epsilon - argument).masked_fill(~readable, math.nan)
    spread = level - level.nanmedian(dim=1, keepdim=True).values
    assert spread.nan_to_num().abs().max() < 1e-6 * (1 + 2 / epsilon)


def test_the_laplace_gate_tends_to_topk():
    scores = torch.randn(32, EXPERTS, dtype=torch.float64)
    torch.testing.assert_close(LaplaceTopK(3, epsilon=1e-5)(scores), TopK(3)(scores))


BAD = [
    (lambda: ProjectedTopK(2, epsilon=0.0), "epsilon must be positive and finite.*got 0.0"),
    (lambda: ProjectedTopK(2, epsilon=-1.0), "got -1.0"),
    (lambda: ProjectedTopK(2, epsilon=math.nan), "epsilon must be positive"),
    (lambda: ProjectedTopK(0, epsilon=0.1), "k must be an integer >= 1, got 0"),
    (lambda: ProjectedTopK(2, budget=1.5), "budget k\\* must be >= k, got 1.5"),
    (lambda: ProjectedTopK(4, epsilon=0.1)(torch.zeros(1, 4)), "1 <= k < number of experts.*k=4"),
    (lambda: ProjectedTopK(5, epsilon=0.1)(torch.zeros(1, 4)), "k=5 of 4"),
    (lambda: LaplaceTopK(2, epsilon=0.1, groups=Groups(2, 1)), "has no groups"),
]


@pytest.mark.parametrize(("build", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_refused(build, message):
    with pytest.raises(TielineError, match=message):
        build()
