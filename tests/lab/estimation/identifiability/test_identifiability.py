"""Derivatives against automatic ones; the tests of identifiability against their known answers."""

import json

import numpy as np
import pytest
import torch
from torch.func import jacrev, vmap

from tests.lab.estimation.problems import MODELS, model_id, random_inputs
from tieline.core.errors import TielineError
from tieline.lab.estimation import MoEModel, identifiability
from tieline.lab.estimation.derivative_tests import (
    Atom,
    atom_jet,
    generic_atoms,
    rank_of_functions,
    rank_test,
    row_size,
    split_test,
    witness_atoms,
)
from tieline.lab.estimation.fit import fit, near_truth
from tieline.lab.estimation.identifiability import cramer_rao
from tieline.lab.estimation.losses import expert_distance
from tieline.lab.estimation.rate_plan import well_conditioned


def gated(model, theta, point):
    """The numerator of one expert, from the model itself."""
    w = row_size(model)
    row, bias, eta = theta[:w], theta[w], theta[w + 1 :]
    if model.gate in ("quadratic", "partial"):
        d = model.d
        u, v = torch.triu_indices(d, d)
        products = torch.cat((point[u] * point[v], point))[: row.numel()]
        score = row @ products
    elif model.gate == "linear":
        score = row @ point
    else:
        t1, t2 = model.tau if model.gate == "perturbed" else (0.0, 0.0)
        score = row @ point / ((row.norm() + t1) * (point.norm() + t2))
    gate = (score + bias).exp() if model.link == "softmax" else (score + bias).sigmoid()
    h = model.ridge.value(eta[: model.d] @ point + eta[model.d])
    return gate * (h * eta[-1] if model.expert == "two_layer" else h)


@pytest.mark.parametrize("model", MODELS[1::4], ids=model_id)
def test_jets_are_the_automatic_derivatives(model):
    atom, x = generic_atoms(model, 1, seed=3)[0], random_inputs(4, 2)
    theta = torch.cat((atom.row, atom.bias.reshape(1), atom.expert))
    jet = atom_jet(model, atom, x)

    def f(parameters, point):
        return gated(model, parameters, point)

    first = vmap(jacrev(f), (None, 0))(theta, x)
    second = vmap(jacrev(jacrev(f)), (None, 0))(theta, x)
    torch.testing.assert_close(jet.first, first, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(jet.second, second, rtol=1e-9, atol=1e-9)


def test_rank_counts_dependent_and_zero_functions():
    x = random_inputs(50, 1)
    columns = torch.cat((x, x**2, 3 * x - x**2, 0 * x), dim=1)
    rank_test = rank_of_functions(columns, ["x", "x²", "both", "nothing"], "test")
    assert (rank_test.functions, rank_test.rank, rank_test.zero) == (3, 2, ("nothing",))
    assert not rank_test.independent
    assert rank_of_functions(columns[:, :2], ["x", "x²"], "test").independent


def test_the_literal_definitions_fail_for_every_ridge_expert():
    x = random_inputs(400, 2)
    for model in MODELS:
        if model.gate == "perturbed" and model.link == "softmax":
            assert not rank_test(model, witness_atoms(model), "weak", x).independent
            strong = rank_test(model, generic_atoms(model, 2), "strong", x)
            assert strong.rank < strong.functions


def test_weak_identifiability_holds_generically_where_no_degree_forbids_it():
    x = random_inputs(400, 2)
    for expert, holds in (("tanh", True), ("gelu", True), ("relu", False), ("polynomial", False)):
        model = MoEModel("perturbed", "softmax", expert, 2, 2)
        assert rank_test(model, generic_atoms(model, 2), "weak", x).independent is holds


@pytest.mark.parametrize(
    ("gate", "link", "expert", "verdict"),
    [
        ("linear", "softmax", "linear", "not identifiable"),
        ("linear", "softmax", "tanh", "identifiable"),
        ("perturbed", "softmax", "gelu", "identifiable"),
        ("perturbed", "softmax", "relu", "up to scale"),
        ("perturbed", "softmax", "polynomial", "up to scale"),
        ("cosine", "softmax", "tanh", "not identifiable"),
        ("partial", "sigmoid", "tanh", "identifiable"),
        ("partial", "sigmoid", "relu", "up to scale"),
        ("quadratic", "sigmoid", "gelu", "not identifiable"),
        ("perturbed", "softmax", "two_layer", "up to scale"),
    ],
)
def test_split_verdicts(gate, link, expert, verdict):
    model = MoEModel(gate, link, expert, 2, 2, activation="tanh")
    report = identifiability(model, draws=1, n=500)
    assert report.verdict == verdict
    assert report.nullity == report.symmetry
    if verdict == "not identifiable":
        assert report.split.up_to_scale < 1e-9
    json.dumps(report.to_dict())


def test_the_invisible_split_of_the_full_quadratic_score_is_one_of_b():
    model = MoEModel("quadratic", "sigmoid", "tanh", 2, 2)
    split = split_test(model, generic_atoms(model, 2), random_inputs(600, 2))
    assert np.hypot(split.direction["b1"], split.direction["b2"]) == pytest.approx(1, abs=1e-6)


def test_the_split_function_is_the_quadratic_form_of_the_jet():
    """Compare f of a split model, off the tangent and over ε², with the form at the same δ."""
    model = MoEModel("perturbed", "softmax", "tanh", 2, 2)
    x, atoms = random_inputs(800, 2), generic_atoms(model, 2, seed=5)
    split = split_test(model, atoms, x)
    delta = torch.tensor(list(split.direction.values()), dtype=torch.float64)
    first, other = atoms
    eps = 1e-3

    def moved(sign):
        step = sign * eps * delta
        return Atom(
            first.row + step[:2], first.bias - torch.tensor(2.0).log(), first.expert + step[2:]
        )

    def f(mixture):
        jets = [atom_jet(model, atom, x) for atom in mixture]
        return sum(j.value for j in jets) / sum(j.gate for j in jets)

    jets = [atom_jet(model, atom, x) for atom in atoms]
    total, truth = sum(j.gate for j in jets), f(atoms)
    tangent = torch.cat(
        [(j.first - truth[:, None] * j.gate_first) / total[:, None] for j in jets], 1
    )
    change = f([moved(1), moved(-1), other]) - truth
    basis = torch.linalg.svd(tangent, full_matrices=False)
    u = basis.U[:, 1e-9 * basis.S[0] < basis.S]
    left = (change - u @ (u.T @ change)).norm() / len(x) ** 0.5 / eps**2
    assert left.item() == pytest.approx(split.minimum, rel=0.02)


def test_what_cannot_be_split_is_said():
    model = MoEModel("cosine", "sigmoid", "tanh", 2, 2)
    report = identifiability(model, draws=1, n=300)
    assert report.split is None
    assert report.strong is None
    assert "no zero row" in report.verdict
    with pytest.raises(TielineError, match="zero row"):
        split_test(model, generic_atoms(model, 2), random_inputs(100, 2))


def test_errors_of_many_fits_reach_the_cramer_rao_limits():
    model = MoEModel("cosine", "softmax", "tanh", 2, 2)
    truth, n, noise = well_conditioned(model, draws=20).truth, 400, 1e-4
    sample = model.simulate(truth, n, list(range(150)), noise=noise)
    fits = fit(model, sample.x, sample.y, near_truth(truth, 0.0, list(range(150))))
    limits = cramer_rao(model, truth)
    assert limits.function == model.n_parameters - 3  # two lengths of rows, one common bias
    experts = expert_distance(model, fits.best().params, truth)
    ratio = n * experts.square().mean().item() / noise**2 / limits.experts
    assert 0.75 < ratio < 1.3


def test_an_expert_that_a_flat_direction_moves_has_no_limit():
    model = MoEModel("quadratic", "sigmoid", "linear", 2, 2)
    truth = well_conditioned(model, draws=20).truth
    assert np.isfinite(cramer_rao(model, truth).experts)
    rows = truth.router.clone()
    rows[0] = 0  # mass against scale
    flat = type(truth)(rows, truth.bias, truth.experts)
    assert cramer_rao(model, flat).experts == float("inf")
