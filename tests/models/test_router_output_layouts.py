"""Layouts of a router's output: what is written is there, and is read again."""

from collections import namedtuple
from dataclasses import asdict, make_dataclass

import pytest
import torch

from tieline.core.errors import UnsupportedModelError
from tieline.models.router_output_layouts import (
    DenseLayout,
    NewChoice,
    ScoresLayout,
    SortedLayout,
    TupleLayout,
)

LOGITS = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
WEIGHTS = torch.tensor([[0.75, 0.25], [0.625, 0.375]])
EXPERTS = torch.tensor([[0, 2], [1, 2]])
OUTPUTS = {
    "topk": (LOGITS, WEIGHTS, EXPERTS, "rest"),
    "dense": (torch.tensor([[0.75, 0.0, 0.25], [0.0, 0.625, 0.375]]), LOGITS),
    # slots 0 (token 0, expert 0), 2 (token 1, expert 1), 1 and 3 (expert 2)
    "sorted": (
        torch.tensor([0, 2, 1, 3]),
        torch.tensor([0, 1, 0, 1]),
        torch.tensor([0.75, 0.625, 0.25, 0.375]),
        [1, 1, 2],
        LOGITS,
    ),
    "method": (WEIGHTS, EXPERTS),
}
LAYOUTS = {
    "topk": TupleLayout(),
    "dense": DenseLayout(),
    "sorted": SortedLayout(),
    "method": TupleLayout(None, 0, 1),
}
layouts = pytest.mark.parametrize("layout", OUTPUTS)


def same(value, other):
    if isinstance(value, torch.Tensor):
        return torch.equal(value, other) and value.dtype == other.dtype
    return value == other


@layouts
def test_logits_and_choice_are_found(layout):
    output = OUTPUTS[layout]
    assert torch.equal(LAYOUTS[layout].logits((LOGITS,), output), LOGITS)
    weights, ids = LAYOUTS[layout].choice(output, 2)
    assert torch.equal(weights, WEIGHTS)
    assert torch.equal(ids, EXPERTS)


@layouts
def test_the_same_choice_written_is_the_same_output(layout):
    written = LAYOUTS[layout].with_choice(OUTPUTS[layout], NewChoice(WEIGHTS.double(), EXPERTS))
    assert len(written) == len(OUTPUTS[layout])
    assert all(map(same, written, OUTPUTS[layout]))


@layouts
def test_more_columns_with_slots_that_are_skipped(layout):
    """Three columns of two experts each: token 0 skips its last, token 1 its middle one."""
    weights = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.0, 0.75]])
    experts = torch.tensor([[1, 0, 2], [2, 0, 1]])
    used = weights > 0
    ids = experts.masked_fill(~used, 3)
    written = LAYOUTS[layout].with_choice(OUTPUTS[layout], NewChoice(weights, experts, ids, used))
    expected = {
        "topk": (LOGITS, weights, ids, "rest"),
        "dense": (torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.75, 0.25]]), LOGITS),
        "sorted": (
            torch.tensor([1, 0, 5, 3]),
            torch.tensor([0, 0, 1, 1]),
            torch.tensor([0.5, 0.5, 0.75, 0.25]),
            [1, 2, 1],
            LOGITS,
        ),
        "method": (weights, ids),
    }[layout]
    assert all(map(same, written, expected))


def test_leading_axes_of_the_output_stay():
    output = (LOGITS, WEIGHTS.view(1, 2, 2), EXPERTS.view(1, 2, 2).int())
    _, weights, ids = TupleLayout().with_choice(output, NewChoice(WEIGHTS.flip(1), EXPERTS.flip(1)))
    assert torch.equal(weights, WEIGHTS.flip(1).view(1, 2, 2))
    assert (ids.shape, ids.dtype) == ((1, 2, 2), torch.int32)


@layouts
def test_no_tokens_are_no_problem(layout):
    empty = {"topk": (0, 1, 2), "dense": (0, 1), "sorted": (0, 1, 2, 4), "method": (0, 1)}[layout]
    output = [part[:0] if at in empty else part for at, part in enumerate(OUTPUTS[layout])]
    if layout == "sorted":
        output[3] = [0, 0, 0]
    written = LAYOUTS[layout].with_choice(output, NewChoice(WEIGHTS[:0], EXPERTS[:0]))
    weights, ids = LAYOUTS[layout].choice(written, 2)
    assert weights.shape == ids.shape == (0, 2)


def test_a_gradient_goes_to_the_weights_that_are_written():
    for layout, output in OUTPUTS.items():
        weights = WEIGHTS.clone().requires_grad_()
        written = LAYOUTS[layout].with_choice(output, NewChoice(weights, EXPERTS))
        at = {"topk": 1, "dense": 0, "sorted": 2, "method": 0}[layout]
        written[at].sum().backward()
        assert torch.equal(weights.grad, torch.ones_like(weights))


Named = namedtuple("Named", ["ids", "scores", "weights", "more"])
Record = make_dataclass("Record", ["ids", "scores", "weights", "more"])


@pytest.mark.parametrize(
    ("form", "fields"), [(dict, dict), (Named, Named._asdict), (Record, asdict)]
)
def test_entries_have_names_in_a_mapping_a_named_tuple_and_a_record(form, fields):
    entries = {"ids": EXPERTS.int(), "scores": LOGITS, "weights": WEIGHTS, "more": "rest"}
    layout, output = TupleLayout("scores", "weights", "ids"), form(**entries)
    assert torch.equal(layout.logits((), output), LOGITS)
    assert torch.equal(layout.choice(output, 2).weights, WEIGHTS)
    written = layout.with_choice(output, NewChoice(WEIGHTS.flip(1).double(), EXPERTS.flip(1)))
    expected = entries | {"ids": EXPERTS.flip(1).int(), "weights": WEIGHTS.flip(1)}
    assert type(written) is form
    assert all(same(fields(written)[name], value) for name, value in expected.items())
    assert torch.equal(layout.choice(output, 2).weights, WEIGHTS)


def test_positions_of_a_named_tuple_keep_its_type():
    output = Named(EXPERTS, LOGITS, WEIGHTS, "rest")
    written = TupleLayout(1, 2, 0).with_choice(output, NewChoice(WEIGHTS.flip(1), EXPERTS.flip(1)))
    assert isinstance(written, Named)
    assert torch.equal(written.ids, EXPERTS.flip(1))
    assert written.more == "rest"


@pytest.mark.parametrize(("entry", "output"), [(None, LOGITS), (1, ("x", LOGITS))])
def test_scores_alone_are_read_and_hold_no_choice(entry, output):
    layout = ScoresLayout(entry)
    assert torch.equal(layout.logits((), output), LOGITS)
    assert not layout.has_choice
    for refused in (
        lambda: layout.choice(output, 2),
        lambda: layout.with_choice(output, NewChoice(WEIGHTS, EXPERTS)),
    ):
        with pytest.raises(UnsupportedModelError, match="TupleLayout"):
            refused()
