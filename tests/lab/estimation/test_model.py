"""Value and Jacobian of `lab.estimation.model` against plain sums and automatic derivatives."""

import math

import pytest
import torch
from torch.func import jacrev, vmap

from tests.lab.estimation.problems import MODELS, model_id, random_inputs, random_parameters
from tieline.core.errors import TielineError
from tieline.lab.estimation.model import MoEModel, MoEParameters, quadratic_blocks

ACTIVATION = {
    "linear": lambda u: u,
    "relu": lambda u: max(u, 0.0),
    "gelu": lambda u: u * 0.5 * (1 + math.erf(u / math.sqrt(2))),
    "tanh": math.tanh,
}


def plain_score(model, row, x):
    dot = sum(b * v for b, v in zip(row, x, strict=False))
    if model.gate == "linear":
        return dot
    if model.gate in ("cosine", "perturbed"):
        t1, t2 = model.tau if model.gate == "perturbed" else (0, 0)
        return dot / ((math.hypot(*row) + t1) * (math.hypot(*x) + t2))
    d = model.d
    square = sum(row[i * d + j] * x[i] * x[j] for i in range(d) for j in range(d))
    return square + sum(b * v for b, v in zip(row[d * d :], x, strict=False))


def plain_expert(model, eta, x):
    u = sum(a * v for a, v in zip(eta, x, strict=False)) + eta[model.d]
    if model.expert == "polynomial":
        return u**model.power
    if model.expert == "two_layer":
        return eta[-1] * ACTIVATION[model.activation](u)
    return ACTIVATION[model.expert](u)


def plain_regression(model, params, x):
    rows, offsets, experts = params.router.tolist(), params.bias.tolist(), params.experts.tolist()
    scores = [plain_score(model, row, x) + c for row, c in zip(rows, offsets, strict=True)]
    if model.link == "softmax":
        weights = [math.exp(s) / sum(math.exp(t) for t in scores) for s in scores]
    else:
        weights = [1 / (1 + math.exp(-s)) for s in scores]
    return sum(w * plain_expert(model, eta, x) for w, eta in zip(weights, experts, strict=True))


@pytest.mark.parametrize("model", MODELS, ids=model_id)
def test_regression_is_the_sum_that_the_papers_write(model):
    params, x = random_parameters(model), random_inputs(5, 2)
    plain = [plain_regression(model, params, point) for point in x.tolist()]
    assert model.regression(params, x).tolist() == pytest.approx(plain, rel=1e-12, abs=1e-13)


@pytest.mark.parametrize("model", MODELS, ids=model_id)
def test_jacobian_is_the_automatic_one(model):
    params, x = random_parameters(model, 2), random_inputs(2, 7, 2)

    def f(vector, inputs):
        return model.regression(model.unflatten(vector), inputs)

    automatic = vmap(jacrev(f))(params.flatten(), x)
    value, analytic = model.value_and_jacobian(params, x)
    torch.testing.assert_close(analytic, automatic, rtol=1e-11, atol=1e-12)
    assert torch.equal(value, model.regression(params, x))
    assert torch.equal(analytic, model.jacobian(params, x))


@pytest.mark.parametrize("model", MODELS[::5], ids=model_id)
def test_a_batch_is_its_problems_one_by_one(model):
    params, shared, separate = (
        random_parameters(model, 2, 3),
        random_inputs(4, 2),
        random_inputs(3, 4, 2),
    )
    together = model.jacobian(params, shared)
    with_separate = model.jacobian(params, separate)
    for i in range(2):
        for j in range(3):
            problem = params[i, j]
            torch.testing.assert_close(together[i, j], model.jacobian(problem, shared))
            torch.testing.assert_close(with_separate[i, j], model.jacobian(problem, separate[j]))


def test_weights_and_outputs_are_the_parts_of_the_regression():
    for model in MODELS[::7]:
        params, x = random_parameters(model, 2), random_inputs(6, 2)
        contributions = model.weights(params, x) * model.expert_outputs(params, x)
        torch.testing.assert_close(contributions.sum(-1), model.regression(params, x))


def test_a_zero_row_scores_zero_and_is_flat_under_the_vanilla_cosine():
    model = MoEModel(gate="cosine", link="softmax", expert="tanh", d=2, n_experts=2)
    params = MoEParameters([[0, 0], [1, 0]], [0.5, 0], [[1, 2, 3], [3, 2, 1]])
    x = random_inputs(4, 2)
    assert torch.equal(model.scores(params, x)[:, 0], torch.full((4,), 0.5, dtype=torch.float64))
    jacobian = model.jacobian(params, x)
    assert torch.equal(jacobian[:, :2], torch.zeros(4, 2, dtype=torch.float64))
    assert jacobian.isfinite().all()


def test_vectors_and_parameters_are_one_to_one():
    for model in MODELS[::9]:
        params = random_parameters(model, 3)
        vector = params.flatten()
        assert vector.shape == (3, model.n_parameters)
        assert torch.equal(model.unflatten(vector).flatten(), vector)
        assert torch.equal(params.like(vector).experts, params.experts)


def test_chunks_cover_the_samples_once():
    model = MODELS[0]
    slices = list(model.chunks(103, batch=2, limit=model.n_parameters * 20))
    assert [i for s in slices for i in range(103)[s]] == list(range(103))
    assert max(s.stop - s.start for s in slices) == 10


def test_repetitions_depend_on_their_own_seed_alone():
    model = MODELS[0]
    params = random_parameters(model)
    several = model.simulate(params, 50, [5, 6, 7], noise=0.2)
    alone = model.simulate(params, 50, 6, noise=0.2)
    assert torch.equal(several.x[1], alone.x)
    torch.testing.assert_close(several.y[1], alone.y)
    assert not torch.equal(several.x[0], several.x[1])


def test_simulated_noise_has_the_stated_deviation_and_inputs_fill_the_cube():
    model = MODELS[0]
    params = random_parameters(model)
    sample = model.simulate(params, 20_000, 3, noise=0.1)
    residual = sample.y - model.regression(params, sample.x)
    assert residual.std().item() == pytest.approx(0.1, rel=0.03)
    assert residual.mean().abs().item() < 0.003
    assert (sample.x >= -1).all()
    assert (sample.x < 1).all()
    assert sample.x.square().mean().item() == pytest.approx(1 / 3, rel=0.02)
    normal = model.simulate(params, 20_000, 3, law="normal").x
    assert normal.std().item() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize(
    "change",
    [
        {"gate": "quartic"},
        {"link": "probit"},
        {"expert": "sine"},
        {"d": 0},
        {"tau": (-0.1, 0.1)},
        {"expert": "polynomial", "power": 0},
        {"expert": "two_layer", "activation": "sine"},
    ],
)
def test_unknown_parts_are_refused(change, no_axis_checks):
    right = {"gate": "linear", "link": "softmax", "expert": "relu", "d": 2, "n_experts": 3}
    with pytest.raises(TielineError, match=r"must be|need|two numbers"):
        MoEModel(**(right | change))


def test_parameters_of_another_model_are_refused(no_axis_checks):
    wrong = random_parameters(MODELS[0].with_experts(4))
    with pytest.raises(TielineError, match="lengths"):
        MODELS[0].regression(wrong, random_inputs(3, 2))
    with pytest.raises(TielineError, match="float64"):
        MODELS[0].regression(random_parameters(MODELS[0]), random_inputs(3, 2).float())


def test_parameters_take_lists_float32_and_matrices():
    lists = MoEParameters(router=[[0.1, 0.2]], bias=[0.3], experts=[[1, 2, 3]])
    assert lists.router.dtype == torch.float64
    assert lists.router[0, 0].item() == 0.1
    single = torch.tensor([[0.1, 0.2]])
    assert torch.equal(MoEParameters(single, [0.3], [[1]]).router, single.double())
    matrix = MoEParameters([[[1, 2], [3, 4]]], [0], [[1]])
    assert matrix.router.tolist() == [[1, 2, 3, 4]]
    bordered = MoEParameters([[[1, 2, 5], [3, 4, 6]]], [0], [[1]])
    assert bordered.router.tolist() == [[1, 2, 3, 4, 5, 6]]
    A, b = quadratic_blocks(bordered.router, full=True)
    assert A.tolist() == [[[1, 2], [3, 4]]]
    assert b.tolist() == [[5, 6]]


@pytest.mark.parametrize(
    ("router", "bias", "experts"),
    [
        ([[1.0]], 0.0, [[1.0]]),
        ([[1.0], [2.0]], [0.0], [[1.0]]),
        ([[1.0]], [0.0], [1.0]),
        ([[[1.0, 2.0, 3.0]]], [0.0], [[1.0]]),
        ([[1.0], [2.0, 3.0]], [0.0, 0.0], [[1.0], [1.0]]),
    ],
)
def test_ragged_parameters_are_refused(router, bias, experts):
    with pytest.raises(TielineError):
        MoEParameters(router, bias, experts)
