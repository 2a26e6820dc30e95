"""Laws of routers: shapes, gradients, symmetries and the values that define each."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.routing.zoo import all_routers
from tests.strategies import seeds
from tieline import CosineRouter, LinearRouter, QuadraticRouter, TielineError
from tieline.routing import Router

ROUTERS = {name: router.double() for name, router in all_routers().items()}
every_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())


@every_router
@given(seeds)
def test_permuting_experts_permutes_scores(router, seed):
    torch.manual_seed(seed)
    x, order = torch.randn(6, 5, dtype=torch.float64), torch.randperm(8)
    scores = router(x)
    state = {name: value.clone() for name, value in router.state_dict().items()}
    per_expert = {n: v[order] for n, v in state.items() if n != "projection"}
    router.load_state_dict({**state, **per_expert})
    permuted = router(x)
    router.load_state_dict(state)
    torch.testing.assert_close(permuted, scores[:, order])


@every_router
def test_scores_of_a_token_do_not_depend_on_the_batch(router):
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    alone = torch.stack([torch.stack([router(token) for token in row]) for row in x])
    torch.testing.assert_close(router(x), alone)


@every_router
def test_gradients_are_right(router):
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(router, (x,))


@every_router
def test_a_zero_token_gives_finite_scores_and_gradients(router):
    x = torch.zeros(2, 5, dtype=torch.float64, requires_grad=True)
    scores = router(x)
    scores.sum().backward()
    assert scores.isfinite().all()
    assert x.grad.isfinite().all()


@every_router
def test_bfloat16_tokens_leave_as_float32_scores(router):
    x = torch.randn(3, 5)
    half = router.bfloat16()(x.bfloat16())
    router.double()
    assert half.dtype == torch.float32


@given(seeds, st.floats(0.1, 10))
def test_cosine_scores_are_cosines_and_ignore_scale(seed, scale):
    torch.manual_seed(seed)
    router, x = CosineRouter(5, 4, temperature=0.5).double(), torch.randn(6, 5).double()
    expected = torch.nn.functional.cosine_similarity(x[:, None], router.weight[None], dim=-1)
    torch.testing.assert_close(router(x), expected / 0.5)
    torch.testing.assert_close(router(scale * x), router(x))


def test_the_perturbed_cosine_adds_tau_to_both_norms():
    router, x = CosineRouter(3, 2, tau=(0.3, 0.7)).double(), torch.randn(4, 3).double()
    w = router.weight
    norms = (w.norm(dim=-1) + 0.3)[None] * (x.norm(dim=-1) + 0.7)[:, None]
    torch.testing.assert_close(router(x), x @ w.T / norms)


def test_zero_vectors_score_zero_against_all():
    for tau in [(0.0, 0.0), (0.1, 0.1)]:
        router = CosineRouter(3, 2, tau=tau)
        assert (router(torch.zeros(2, 3)) == 0).all()
        with torch.no_grad():
            router.weight[0] = 0
        assert (router(torch.randn(4, 3))[:, 0] == 0).all()


@pytest.mark.parametrize("rank", [None, 2])
@pytest.mark.parametrize("kind", ["full", "partial"])
def test_quadratic_scores_use_the_symmetric_matrices(kind, rank):
    router = QuadraticRouter(4, 3, kind=kind, rank=rank).double()
    torch.nn.init.normal_(router.constant)
    x, a = torch.randn(5, 4).double(), router.matrices
    assert torch.equal(a, a.mT)
    expected = torch.stack([torch.stack([t @ m @ t for m in a]) for t in x]) + router.constant
    if kind == "full":
        expected = expected + x @ router.linear.T
    torch.testing.assert_close(router(x), expected)


def test_a_new_router_overrides_one_method():
    class Norm(Router):
        def score(self, x):
            return x.norm(dim=-1, keepdim=True).expand(*x.shape[:-1], self.n_experts)

    assert Norm(3, 4)(torch.ones(2, 3)).shape == (2, 4)


BAD = [
    (lambda: LinearRouter(0, 4), "d_model=0"),
    (lambda: CosineRouter(4, 4, temperature=0.0), "temperature must be positive"),
    (lambda: CosineRouter(4, 4, temperature=math.nan), "temperature must be positive"),
    (lambda: CosineRouter(4, 4, tau=(-0.1, 0.0)), "tau must be two finite numbers"),
    (lambda: CosineRouter(4, 4, d_proj=0), "d_proj must be >= 1"),
    (lambda: QuadraticRouter(4, 4, kind="half"), "kind must be 'full' or 'partial'"),
    (lambda: QuadraticRouter(4, 4, rank=5), "rank=5"),
    (lambda: LinearRouter(4, 2)(torch.zeros(3, 5)), r"floating \(..., 4\), got \(3, 5\)"),
    (lambda: LinearRouter(4, 2)(torch.zeros(3, 4).long()), "int64"),
]


@pytest.mark.usefixtures("no_axis_checks")
@pytest.mark.parametrize(("build", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_input_is_refused(build, message):
    with pytest.raises(TielineError, match=message):
        build()
