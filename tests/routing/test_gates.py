"""The laws of gates, each written once and run over every gate that claims it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.reference import group_limited, smooth_weights, topk_weights
from tests.routing.zoo import BIAS, EXPERTS, TOPK_VARIANTS, all_gates, smooth
from tests.strategies import distinct_scores, dyadic_scores, score_matrices, seeds
from tieline import Groups, Hard, SmoothTopK, Softmax, TielineError, TopK
from tieline.core.ranking import gap
from tieline.routing import Law

GATES = all_gates()
eight_scores = seeds.map(dyadic_scores)
distinct = seeds.map(distinct_scores)


def claiming(law):
    return pytest.mark.parametrize(
        "gate", [pytest.param(g, id=name) for name, g in GATES.items() if law in g.laws]
    )


every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())


@every_gate
@given(eight_scores)
def test_weights_are_nonnegative_finite_and_of_the_shape_of_the_scores(gate, scores):
    weights = gate(scores)
    assert weights.shape == scores.shape
    assert weights.dtype == scores.dtype
    assert (weights >= 0).all()
    assert weights.isfinite().all()


@claiming(Law.SUMS_TO_ONE)
@given(eight_scores)
def test_weights_sum_to_one(gate, scores):
    torch.testing.assert_close(gate(scores).sum(-1), torch.ones(len(scores), dtype=torch.float64))


@claiming(Law.SHIFT_INVARIANT)
@given(eight_scores, st.integers(-80, 80))
def test_a_common_shift_changes_nothing(gate, scores, shift):
    # at a tie the softmax scores of a shifted row may round apart, so compare off exact ties
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(gate(scores + shift / 8), gate(scores), **close)


@claiming(Law.EQUIVARIANT)
@given(distinct, st.permutations(range(EXPERTS)))
def test_permuting_experts_permutes_weights(gate, scores, order):
    # rounding of sums depends on the order of their terms
    torch.testing.assert_close(gate(scores[:, order]), gate(scores)[:, order])


@claiming(Law.SYMMETRIC)
@given(eight_scores, st.integers(0, EXPERTS - 1), st.integers(0, EXPERTS - 1))
def test_equal_scores_have_equal_weights(gate, scores, i, j):
    scores[:, i] = scores[:, j]
    weights = gate(scores)
    assert torch.equal(weights[:, i], weights[:, j])


@every_gate
@given(eight_scores)
def test_a_token_is_gated_alike_alone_and_in_a_batch(gate, scores):
    alone = torch.cat([gate(row[None]) for row in scores])
    torch.testing.assert_close(alone, gate(scores), rtol=1e-14, atol=1e-15)


@every_gate
@pytest.mark.parametrize("shape", [(0, EXPERTS), (2, 3, EXPERTS), (EXPERTS,)])
def test_any_batch_shape_is_fine(gate, shape):
    assert gate(torch.randn(shape)).shape == shape


@every_gate
def test_half_precision_scores_are_gated_in_float32(gate):
    scores = torch.randn(4, EXPERTS).bfloat16()
    assert gate(scores).dtype == torch.float32
    torch.testing.assert_close(gate(scores), gate(scores.float()))


@every_gate
def test_gradients_are_right_away_from_kinks(gate):
    scores = torch.linspace(-1, 2, EXPERTS, dtype=torch.float64)[torch.randperm(EXPERTS)]
    scores = torch.stack([scores, scores.flip(0) + 0.013]).requires_grad_()
    assert torch.autograd.gradcheck(gate, (scores,), atol=1e-6)


@given(score_matrices(), st.data())
def test_topk_is_softmax_over_the_best(scores, data):
    k = data.draw(st.integers(1, scores.shape[1]))
    expected = torch.tensor([topk_weights(row, k) for row in scores.tolist()], dtype=torch.float64)
    torch.testing.assert_close(TopK(k)(scores), expected)


@given(score_matrices(), st.floats(0.01, 8), st.floats(0.3, 4), st.floats(0.3, 50), st.data())
def test_smooth_topk_is_softmax_of_scores_plus_log_smoothstep(scores, epsilon, a, b, data):
    k = data.draw(st.integers(1, scores.shape[1]))
    gate = SmoothTopK(k, epsilon=epsilon, a=a, b=b)
    rows = [smooth_weights(row, k, epsilon, a, b) for row in scores.tolist()]
    torch.testing.assert_close(gate(scores), torch.tensor(rows, dtype=torch.float64))


@given(
    score_matrices(min_experts=8, max_experts=8),
    st.sampled_from([(4, 2, 3), (2, 1, 4), (4, 4, 5), (2, 2, 1)]),
    st.sampled_from(["max", "top2sum"]),
)
def test_group_limited_choice_matches_its_definition(scores, sizes, group_score):
    count, chosen, k = sizes
    # order="after" ranks the exact dyadic logits, so that the reference can tie as they do
    gate = TopK(k, order="after", groups=Groups(count, chosen, group_score))
    for row, weights in zip(scores.tolist(), gate(scores), strict=True):
        expected = group_limited(row, count, chosen, k, group_score)
        assert set(weights.nonzero().flatten().tolist()) == set(expected)


def test_a_selection_bias_moves_the_choice_and_not_the_weight():
    scores = torch.tensor([[2.0, 1.0, 0.0, -1.0]], dtype=torch.float64)
    bias = torch.tensor([0.0, 0.0, 0.0, 5.0], dtype=torch.float64)
    weights = TopK(2, order="after", selection_bias=bias)(scores)
    torch.testing.assert_close(
        weights, scores[:, [0, 3]].softmax(-1) @ torch.eye(4).double()[[0, 3]]
    )


def test_published_routers_match_the_formulas_of_their_models():
    z = torch.randn(16, EXPERTS, dtype=torch.float64)
    p, top = z.softmax(-1), z.topk(3)
    dense = torch.zeros_like(z)
    torch.testing.assert_close(
        TopK(3, renormalize=False)(z), dense.scatter(1, top.indices, p.gather(1, top.indices))
    )
    torch.testing.assert_close(
        TopK(3, order="after")(z), dense.scatter(1, top.indices, top.values.softmax(-1))
    )
    score = z.sigmoid()
    chosen = (score + BIAS).topk(3).indices
    kept = score.gather(1, chosen)
    gate = TopK(3, scoring="sigmoid", selection_bias=BIAS, scale=2.5)
    torch.testing.assert_close(
        gate(z), dense.scatter(1, chosen, 2.5 * kept / kept.sum(-1, keepdim=True))
    )


@pytest.mark.parametrize("name", TOPK_VARIANTS)
@given(seeds)
def test_smooth_topk_equals_topk_outside_the_band_and_as_epsilon_vanishes(name, seed):
    torch.manual_seed(seed)
    scores = torch.randn(32, EXPERTS, dtype=torch.float64)
    hard, tiny = TopK(3, **TOPK_VARIANTS[name]), smooth(name, epsilon=1e-13)
    torch.testing.assert_close(tiny(scores), hard(scores))
    if "groups" not in TOPK_VARIANTS[name]:
        far = gap(hard.selection(scores), 3) >= 0.05
        narrow = smooth(name, epsilon=0.05)
        torch.testing.assert_close(narrow(scores[far]), hard(scores[far]))
        assert ((narrow(scores[~far]) != 0).sum(-1) > 3).all()


@pytest.mark.parametrize("name", TOPK_VARIANTS)
def test_smooth_topk_is_symmetric_in_tied_experts(name):
    options = {**TOPK_VARIANTS[name], "selection_bias": None}
    gate = SmoothTopK(3, epsilon=0.2, **options)
    scores = torch.tensor([[5.0, 1, 1, 1, 1, -4, -4, -4]], dtype=torch.float64)
    weights = gate(scores)[0]
    if "groups" in options and options["groups"] is not None:
        assert (weights[1:4] == weights[1]).all()
    else:
        assert (weights[1:5] == weights[1]).all()
        assert (weights[1:5] > 0).all()


@given(score_matrices(min_experts=5, max_experts=8), st.integers(2, 5), st.floats(0.1, 9))
def test_k_max_bounds_the_experts_of_every_token_ties_included(scores, k_max, epsilon):
    gate = SmoothTopK(2, epsilon=epsilon, k_max=k_max)
    active = (gate(scores) != 0).sum(-1)
    assert (active >= 2).all()
    assert (active <= k_max).all()


def test_a_learnable_epsilon_starts_at_its_default_and_gets_a_gradient():
    gate = SmoothTopK(2)
    assert gate.epsilon.item() == pytest.approx(0.05, rel=1e-6)
    gate(torch.tensor([[1.0, 0.5, 0.48, -2.0]]))[0, 2].backward()
    assert gate.theta.grad.abs() > 0


def test_a_detached_ramp_stops_the_gradient_through_u_only():
    scores = torch.tensor([[1.0, 0.5, 0.4, -2.0]], dtype=torch.float64, requires_grad=True)
    gate = SmoothTopK(2, epsilon=0.2)
    (grad,) = torch.autograd.grad(gate(scores)[0, 2], scores)
    w = gate(scores).detach()[0]
    torch.testing.assert_close(grad[0], w[2] * (torch.eye(4).double()[2] - w))


def test_softmax_tends_to_hard():
    scores = torch.randn(64, EXPERTS, dtype=torch.float64)
    torch.testing.assert_close(Softmax(1e-6)(scores), Hard()(scores), atol=1e-9, rtol=0)


@pytest.mark.parametrize(
    "name", ["topk mixtral", "topk sigmoid", "smooth sigmoid", "smooth mixtral"]
)
def test_extreme_scores_neither_overflow_nor_vanish(name):
    scores = torch.tensor([[-2000.0] * 7 + [-1999.0], [3000.0] * 4 + [-3000.0] * 4])
    weights = GATES[name](scores)
    assert weights.isfinite().all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2))


def test_a_score_that_is_not_a_number_reaches_the_weights():
    scores = torch.zeros(1, 4)
    scores[0, 2] = math.nan
    for gate in (TopK(1), TopK(2, renormalize=False), SmoothTopK(2, epsilon=0.1), Softmax()):
        assert gate(scores).isnan().any()


BAD = [
    (lambda: TopK(0), "k must be an integer >= 1, got 0"),
    (lambda: TopK(2.0), "k must be an integer"),
    (lambda: TopK(2, scoring="linear"), "unknown scoring 'linear'"),
    (lambda: TopK(2, order="during"), "order must be"),
    (lambda: TopK(2, scale=0.0), "scale must be positive"),
    (lambda: TopK(2, selection_bias=torch.zeros(4, dtype=torch.int64)), "finite floating vector"),
    (lambda: TopK(2, selection_bias=torch.tensor([0.0, math.nan])), "finite floating vector"),
    (lambda: SmoothTopK(2, epsilon=0.0), "epsilon must be positive"),
    (lambda: SmoothTopK(2, epsilon=-1.0), "got -1.0"),
    (lambda: SmoothTopK(2, epsilon=math.nan), "epsilon must be positive"),
    (lambda: SmoothTopK(2, a=0.0), "a and b must be positive"),
    (lambda: SmoothTopK(2, k_max=1), "k_max must be >= k, got 1"),
    (lambda: SmoothTopK(2, budget=1.0), "budget"),
    (lambda: Softmax(0.0), "temperature must be positive"),
    (lambda: Groups(4, 5), "5 of 4"),
    (lambda: Groups(4, 2, "mean"), "unknown group score 'mean'"),
    (
        lambda: TopK(2, groups=Groups(3, 2), selection_bias=torch.zeros(8)),
        "3 groups scored by top2sum do not divide 8 experts",
    ),
]


@pytest.mark.parametrize(("build", "message"), BAD, ids=[m for _, m in BAD])
@pytest.mark.usefixtures("no_axis_checks")
def test_bad_parameters_are_refused_at_construction(build, message):
    with pytest.raises(TielineError, match=message):
        build()


@pytest.mark.parametrize(
    ("gate", "experts", "message"),
    [
        (TopK(5), 4, "k=5 of 4"),
        (TopK(2, selection_bias=torch.zeros(8)), 4, "8 entries for 4 experts"),
        (TopK(2, groups=Groups(3, 2)), 8, "do not divide 8 experts"),
        (TopK(5, groups=Groups(4, 2)), 8, "k = 5 exceeds the 4 experts"),
    ],
)
def test_scores_that_do_not_fit_are_refused(gate, experts, message):
    with pytest.raises(TielineError, match=message):
        gate(torch.zeros(2, experts))


@pytest.mark.usefixtures("no_axis_checks")
def test_integer_scores_are_refused():
    with pytest.raises(TielineError, match="scores must be floating"):
        TopK(1)(torch.zeros(2, 4, dtype=torch.int64))
