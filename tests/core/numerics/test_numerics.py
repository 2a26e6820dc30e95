"""Grids, steps of formats and threads."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.core.numerics import float_step, log_grid, one_thread, round_to_step


def test_log_grid_has_equal_ratios_and_exact_ends():
    grid = log_grid(1e-3, 10.0, 5)
    assert len(grid) == 21
    assert (grid[0], grid[-1]) == (1e-3, 10.0)
    ratio = grid[1:] / grid[:-1]
    assert (ratio - 10**0.2).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("dtype", "bits", "least"), [(torch.bfloat16, 7, -126), (torch.float16, 10, -14)]
)
def test_step_is_the_distance_to_the_next_number(dtype, bits, least):
    numbers = torch.tensor([1.0, 1.5, 2.0, 3.9, 0.3, 1e-5, 6e-8, 0.0]).to(dtype)
    after = (numbers.view(torch.int16) + 1).view(dtype)
    step = float_step(numbers.float(), bits, least)
    assert torch.equal(step, after.double() - numbers.double())
    assert torch.equal(step, float_step(-numbers.float(), bits, least))


def test_halves_round_to_even():
    values = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5])
    assert round_to_step(values, torch.ones(5)).tolist() == [0, 2, 2, 0, -2]


def failing_block():
    with one_thread():
        assert torch.get_num_threads() == 1
        raise RuntimeError


def test_one_thread_is_given_back_even_after_an_error():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError):
        failing_block()
    assert torch.get_num_threads() == before


def test_grids_run_upwards():
    with pytest.raises(TielineError):
        log_grid(1.0, 0.5, 10)
