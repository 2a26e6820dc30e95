"""The events of a line against a fine grid, and jumps that are planted between grid points."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.errors import TielineError
from tieline.core.ranking import topk_mask
from tieline.lab.geometry.layer_continuity import event_offsets, largest_jump


@given(st.integers(0, 200), st.integers(1, 4))
def test_the_chosen_set_changes_only_at_events(seed, k):
    draw = torch.Generator().manual_seed(seed)
    start, rates = torch.randn(2, 6, dtype=torch.float64, generator=draw)
    events = event_offsets(start, rates, 2.0)
    edges = torch.cat([torch.tensor([-2.0]), events, torch.tensor([2.0])])
    inside = edges[:-1, None] + torch.tensor([0.001, 0.5, 0.999]) * edges.diff()[:, None]
    chosen = topk_mask(start + inside[..., None] * rates, k)
    assert (chosen == chosen[:, :1]).all()


@given(st.integers(0, 200))
def test_scores_are_equal_or_epsilon_apart_exactly_at_events(seed):
    draw = torch.Generator().manual_seed(seed)
    start, rates = torch.randn(2, 5, dtype=torch.float64, generator=draw)
    events = event_offsets(start, rates, 3.0, 0.25)
    at = start + events[:, None] * rates
    apart = (at[:, :, None] - at[:, None, :]).abs()
    off = torch.minimum(apart, (apart - 0.25).abs())
    off.diagonal(dim1=1, dim2=2).fill_(1)
    assert (off.flatten(1).amin(dim=1) < 1e-12).all()
    grid = torch.linspace(-3, 3, 20_001, dtype=torch.float64)
    values = start + grid[:, None] * rates
    gaps = values[:, :, None] - values[:, None, :]
    upper = torch.triu(torch.ones(5, 5), 1) > 0
    crossings = sum(
        ((gaps[1:] - c).sign() != (gaps[:-1] - c).sign())[:, upper].sum() for c in (0, 0.25, -0.25)
    )
    assert abs(int(crossings) - len(events)) <= 1  # one may lie within a grid cell of an end


def test_parallel_scores_give_no_event():
    start, rates = torch.tensor([0.0, 1.0, 3.0]).double(), torch.tensor([1.0, 1.0, 1.0]).double()
    assert len(event_offsets(start, rates, 10.0, 0.5)) == 0
    rates[2] = 0.0
    assert event_offsets(start, rates, 10.0).tolist() == [2.0, 3.0]
    assert event_offsets(start, rates, 2.5).tolist() == [2.0]


def test_a_jump_at_an_event_is_found_with_its_height_and_place():
    def layer(x):
        return torch.where(x[:, :1] < 0.3, 2.0, 5.0).expand(-1, 4).double() + 0 * x

    point, normal = torch.zeros(4).double(), torch.eye(4).double()[0]
    events = torch.tensor([-1.0, 0.3, 0.9], dtype=torch.float64)
    jump = largest_jump(layer, point, normal, events)
    assert (jump.events, jump.at) == (3, 0.3)
    assert jump.largest == pytest.approx(6.0)  # a change of 3 in four coordinates
    assert jump.relative == pytest.approx(1.5)
    smooth = largest_jump(lambda x: x.sin(), point, normal, events)
    assert smooth.largest == pytest.approx(1e-9, rel=0.1)


def test_a_line_without_events_has_no_jump_and_bad_reaches_are_refused():
    point, none = torch.zeros(2).double(), torch.zeros(0).double()
    jump = largest_jump(lambda x: x, point, point, none)
    assert (jump.events, jump.largest) == (0, 0.0)
    with pytest.raises(TielineError, match="reach"):
        event_offsets(none, none, 0.0)
