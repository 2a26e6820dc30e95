"""Expected counts of Gaussian routers: sum rules that are exact, simulation, exact counts."""

import math

import numpy as np
import pytest

from tieline.core.errors import ParameterError
from tieline.lab.geometry import gaussian_gap_density
from tieline.lab.tropical import (
    count_cells,
    count_regions,
    expected_cells,
    expected_regions,
    log_expected_cells,
    log_expected_regions,
    pooled_block,
    wall_density,
    zaslavsky,
)
from tieline.lab.tropical.capacity import log_pooling_chance

CELLS = [(16, 4, 2), (16, 4, 3), (10, 3, 4)]
REGIONS = [
    (4, 1, 3, 2),
    (8, 3, 4, 2),
    (16, 4, 8, 2),
    (6, 2, 2, 3),
    (8, 2, 4, 3),
    (12, 4, 2, 3),
    (6, 2, 2, 4),
    (5, 2, 2, 5),
]


def layer(seed, n, width, dim):
    r = np.random.default_rng(seed)
    W, b = r.standard_normal((n, dim)), r.standard_normal(n)
    return W, b, r.standard_normal((n, width, dim)), r.standard_normal((n, width))


def deviation(counts, expected):
    counts = np.array(counts, dtype=float)
    return (counts.mean() - expected) / (counts.std(ddof=1) / math.sqrt(len(counts)))


def test_the_stated_numbers():
    expectations = [expected_cells(16, 4, d) for d in (2, 3, 5, 8)]
    assert [round(x, 1) for x in expectations] == [47.7, 158.8, 725.5, 1654.8]
    assert round(expected_regions(16, 4, 5, 5)) == 154_641


@pytest.mark.parametrize(("n", "k"), [(2, 1), (5, 2), (16, 4), (33, 17), (64, 8)])
def test_the_law_of_the_block_is_a_law(n, k):
    p = np.exp(pooled_block(n, k, n))
    assert p.sum() == pytest.approx(1, abs=1e-12)
    assert p[0] == pytest.approx(1 / math.comb(n, k), rel=1e-12)
    # as many faces of even as of odd dimension: the Gauss-Bonnet relation of cones
    assert p[::2].sum() == pytest.approx(0.5, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), [(256, 32), (512, 8), (512, 500)])
def test_the_law_of_the_block_is_a_law_for_hundreds_of_experts(n, k):
    assert np.exp(pooled_block(n, k, n)).sum() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(("n", "dim"), [(3, 1), (6, 2), (9, 3), (12, 5), (6, 8)])
def test_cells_of_all_k_add_up(n, dim):
    total = sum(expected_cells(n, k, dim) for k in range(n + 1))
    assert total == pytest.approx(zaslavsky(n, dim + 1), rel=1e-11)
    cones = sum(expected_cells(n, k, dim, bias=False) for k in range(1, n))
    # those of k = 0 and k = N are the whole space, once each
    expected = 2 * sum(math.comb(n - 1, j) for j in range(dim + 1)) - 2
    if dim < n:
        assert cones == pytest.approx(expected, rel=1e-11)


def test_cells_of_all_k_add_up_for_512_experts():
    total = sum(expected_cells(512, k, 1) for k in range(513))
    assert total == pytest.approx(zaslavsky(512, 2), rel=1e-11)


@pytest.mark.parametrize(("n", "k", "dim"), [(5, 2, 4), (5, 2, 7), (6, 3, 5)])
def test_every_coalition_is_met_from_dimension_n_minus_1_on(n, k, dim):
    assert expected_cells(n, k, dim) == pytest.approx(math.comb(n, k), rel=1e-12)
    if dim >= n:
        cones = expected_cells(n, k, dim, bias=False)
        assert cones == pytest.approx(math.comb(n, k), rel=1e-12)


def pooled_size(g, k):
    """Size of the block that pools when g is projected on {min of the first k >= max of the rest}.

    The projection lowers the first k to at least c and raises the rest to at most c; c balances.
    """
    above, below = sorted(g[:k]), sorted(g[k:], reverse=True)
    if above[0] >= below[0]:
        return 1
    a, b = 1, 1
    while True:
        level = (sum(above[:a]) + sum(below[:b])) / (a + b)
        if a < k and above[a] < level:
            a += 1
        elif b < len(below) and below[b] > level:
            b += 1
        else:
            return a + b


def test_the_law_of_the_block_by_simulation():
    r, n, k, draws = np.random.default_rng(5), 7, 3, 20_000
    sizes = np.array([pooled_size(r.standard_normal(n), k) for _ in range(draws)])
    for m, p in enumerate(np.exp(pooled_block(n, k, n)), 1):
        share = (sizes == m).mean()
        assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / draws)


def test_two_scores_pool_with_probability_one_half_and_sides_are_alike():
    assert math.exp(log_pooling_chance(1, 1)) == pytest.approx(0.5, abs=1e-14)
    assert log_pooling_chance(7, 3) == pytest.approx(log_pooling_chance(3, 7), abs=1e-12)
    assert math.isfinite(log_pooling_chance(500, 12))


@pytest.mark.parametrize(("n", "k"), [(2, 1), (16, 4), (64, 8), (512, 8), (512, 256)])
def test_walls_per_half_circle_are_the_density_of_ties(n, k):
    assert wall_density(n, k) == pytest.approx(
        math.sqrt(math.pi) * gaussian_gap_density(n, k), rel=1e-11
    )


@pytest.mark.parametrize("shape", REGIONS[:4])
def test_regions_meet_the_mean_of_exact_counts(shape):
    n, k, width, dim = shape
    counts = [count_regions(*layer(seed, n, width, dim), k) for seed in range(60)]
    assert abs(deviation(counts, expected_regions(*shape))) < 3


@pytest.mark.parametrize("shape", CELLS[:2])
def test_cells_meet_the_mean_of_exact_counts(shape):
    n, k, dim = shape
    counts = [count_cells(*layer(seed, n, 1, dim)[:2], k) for seed in range(60)]
    assert abs(deviation(counts, expected_cells(*shape))) < 3


def test_cones_meet_the_mean_of_exact_counts():
    counts = [count_cells(layer(s, 8, 1, 3)[0], np.zeros(8), 3) for s in range(60)]
    assert abs(deviation(counts, expected_cells(8, 3, 3, bias=False))) < 3


@pytest.mark.slow
@pytest.mark.parametrize("shape", REGIONS, ids=str)
def test_regions_meet_the_mean_of_200_exact_counts(shape):
    n, k, width, dim = shape
    counts = [count_regions(*layer(seed, n, width, dim), k) for seed in range(200)]
    assert abs(deviation(counts, expected_regions(*shape))) < 3


@pytest.mark.slow
@pytest.mark.parametrize("shape", CELLS, ids=str)
def test_cells_meet_the_mean_of_200_exact_counts(shape):
    n, k, dim = shape
    counts = [count_cells(*layer(seed, n, 1, dim)[:2], k) for seed in range(200)]
    assert abs(deviation(counts, expected_cells(*shape))) < 3


def test_a_dense_layer_is_one_expert():
    assert expected_regions(1, 1, 20, 5) == pytest.approx(21_700)


def test_counts_beyond_float64_have_logarithms():
    with pytest.raises(ParameterError, match="ask for its logarithm"):
        expected_regions(64, 8, 10**9, 64)
    assert log_expected_regions(64, 8, 10**9, 64) > 709
    assert log_expected_cells(512, 0, 3) == log_expected_cells(512, 512, 3) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: expected_cells(4, 5, 2), "0 <= k <= N"),
        (lambda: expected_cells(4, 2, -1), "d >= 0"),
        (lambda: expected_cells(4, 2, 0, bias=False), "R\\^0"),
        (lambda: expected_cells(4, 2, 513), "d <= 512"),
        (lambda: expected_regions(4, 0, 2, 2), "1 <= k"),
        (lambda: wall_density(4, 4), "1 <= k < N"),
    ],
)
def test_numbers_out_of_range_are_refused(call, message):
    with pytest.raises(ParameterError, match=message):
        call()
