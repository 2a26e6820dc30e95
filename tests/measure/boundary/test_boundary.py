"""Laws of the boundary masses, then the values and refusals that pin them down."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import dyadic_scores, seeds, widths
from tieline.core.ranking import gap
from tieline.core.statistics import binomial_band
from tieline.lab.geometry.masses import (
    ambiguity_mass,
    boundary_mass_pair,
    boundary_mass_top,
    pair_gap,
    top_gap,
)
from tieline.measure.boundary import boundary_mass, mass_profile


def mass(scores, width, k=1):
    return boundary_mass(gap(scores, k), width.reshape(-1)).mass


@given(seeds, widths)
def test_masses_match_their_definitions_by_brute_force(seed, width):
    scores = dyadic_scores(seed, tokens=7, experts=5)
    rows, w = [sorted(row) for row in scores.tolist()], width.item()
    pair = [any(y - x <= w for x, y in itertools.combinations(row, 2)) for row in rows]
    assert boundary_mass_pair(scores, width).value.item() == sum(pair) / len(rows)
    for k in range(1, 5):
        top = [row[-k] - row[-k - 1] <= w for row in rows]
        assert mass(scores, width, k) == (sum(top) / len(rows),)
        assert float(boundary_mass_top(scores, k, width.item())) == sum(top) / len(rows)


@given(seeds, widths, widths)
def test_masses_grow_with_width_and_pair_dominates_top(seed, width, extra):
    scores = dyadic_scores(seed, experts=4)
    both = torch.stack([width, width + extra])
    narrow, wide = boundary_mass(gap(scores, 2), both).mass
    assert 0 <= narrow <= wide <= boundary_mass_pair(scores, both).value[1] <= 1


@given(seeds, widths, st.permutations(range(8)), st.integers(-9, 9), st.sampled_from([0.25, 4.0]))
def test_masses_follow_relabelling_shift_and_scale(seed, width, order, shift, scale):
    scores = dyadic_scores(seed)
    moved = scale * scores[:, order] + shift
    assert mass(moved, scale * width, 3) == mass(scores, width, 3)
    assert torch.equal(pair_gap(moved), scale * pair_gap(scores))


@given(seeds, st.floats(1e-12, 0.49), st.floats(0.05, 20.0))
def test_ambiguity_lies_between_its_two_boundary_masses(seed, epsilon, tau):
    scores = dyadic_scores(seed, experts=5)
    inner = tau * (math.log1p(-epsilon) - math.log(epsilon))
    outer = inner + tau * math.log(4)
    ends = torch.tensor([inner * (1 - 1e-9), outer * (1 + 1e-9)], dtype=torch.float64)
    lower, upper = boundary_mass(gap(scores, 1), ends).mass
    assert lower <= float(ambiguity_mass(scores, epsilon, tau)) <= upper


@given(seeds, st.floats(0.01, 0.49))
def test_ambiguity_of_two_experts_is_a_boundary_mass(seed, epsilon):
    scores = dyadic_scores(seed, experts=2)
    width = torch.tensor([math.log1p(-epsilon) - math.log(epsilon)], dtype=torch.float64)
    assert boundary_mass(gap(scores, 1), width).mass[0] == float(ambiguity_mass(scores, epsilon))


@pytest.mark.parametrize(("near", "far", "epsilon"), [(1.0, 1.2, 0.25), (20.0, 30.0, 1e-10)])
def test_ambiguity_changes_at_logit_even_where_one_minus_eps_rounds(near, far, epsilon):
    half = ambiguity_mass(torch.tensor([[0.0, -near], [0.0, -far]]), epsilon)
    assert (half.value, half.stderr) == (0.5, 0.125**0.5)


def test_gaps_of_bfloat16_scores_are_not_rounded():
    scores = torch.tensor([[256.0, 1.5]], dtype=torch.bfloat16)  # 254.5 would round to 254
    assert mass(scores, torch.tensor(254.0)) == (0.0,)
    assert pair_gap(scores).item() == 254.5


def test_profile_carries_its_binomial_band():
    profile = boundary_mass(torch.tensor([0.0, 1.0, torch.inf, 1.0]), torch.tensor([0.5, 1.0]), 0.9)
    low, high = binomial_band(torch.tensor([1, 3]), 4, 0.9)
    assert profile.mass == (0.25, 0.75)
    assert (profile.low, profile.high) == (tuple(low.tolist()), tuple(high.tolist()))
    assert (profile.tokens, profile.confidence, profile.widths) == (4, 0.9, (0.5, 1.0))
    assert mass_profile(torch.tensor([1, 3]), 4, torch.tensor([0.5, 1.0]), 0.9) == profile


def test_pairs_are_far_denser_than_the_threshold():
    scores = torch.randn(4000, 16, dtype=torch.float64)
    width = torch.tensor([1e-4], dtype=torch.float64)
    assert boundary_mass_pair(scores, width).value[0] > 10 * mass(scores, width, 1)[0]


@pytest.mark.parametrize("shape", [(0, 3), (3, 1)])
def test_too_few_tokens_or_experts_are_refused(shape):
    with pytest.raises(ValueError, match="need a token"):
        boundary_mass_pair(torch.zeros(shape), torch.zeros(1))


@pytest.mark.parametrize("gaps", [torch.zeros(0), torch.tensor([-1.0]), torch.tensor([torch.nan])])
def test_what_is_no_gap_is_refused(gaps):
    with pytest.raises(ValueError, match=r"token|gap is >= 0"):
        boundary_mass(gaps, torch.zeros(1))


def test_masked_experts_are_refused():
    with pytest.raises(ValueError, match="finite"):
        boundary_mass_pair(torch.tensor([[0.0, -math.inf]]), torch.zeros(1))


@pytest.mark.parametrize(("epsilon", "tau"), [(0.0, 1.0), (1.0, 1.0), (0.1, 0.0)])
def test_senseless_ambiguity_is_refused(epsilon, tau):
    with pytest.raises(ValueError, match="epsilon"):
        ambiguity_mass(torch.zeros(1, 2), epsilon, tau)


def test_a_mass_has_the_shape_of_its_widths_and_a_binomial_error():
    scores = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]])
    mass = boundary_mass_top(scores, 1, torch.tensor([[0.5, 1.0], [3.5, 9.0]]))
    assert mass.value.tolist() == [[0.0, 0.25], [0.75, 1.0]]
    error = math.sqrt(0.25 * 0.75 / 4)
    assert mass.stderr.tolist() == [[0.0, error], [error, 0.0]]
    assert top_gap(scores).tolist() == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.parametrize("k", [0, 3])
def test_a_gap_needs_an_expert_on_either_side(k):
    with pytest.raises(ValueError, match=f"k={k}"):
        top_gap(torch.zeros(1, 3), k)


def test_negative_widths_are_refused():
    with pytest.raises(ValueError, match=r"-0\.5"):
        boundary_mass_top(torch.zeros(1, 3), 1, -0.5)
