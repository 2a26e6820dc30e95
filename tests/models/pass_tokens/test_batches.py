"""Documents, positions and padding of successive forward passes."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.models.pass_tokens import DocumentCounter

IDS = torch.tensor([[5, 6, 7], [8, 9, 10]])


class _Cache:
    def __init__(self, length):
        self.length = length

    def get_seq_length(self):
        if self.length is None:
            raise ValueError("only linear attention")
        return self.length


def _lists(batch):
    return batch.tokens.tolist(), batch.documents.tolist(), batch.positions.tolist()


def test_rows_are_documents_numbered_over_all_batches():
    counter = DocumentCounter()
    assert _lists(counter.read_batch({"input_ids": IDS})) == (
        [5, 6, 7, 8, 9, 10],
        [0, 0, 0, 1, 1, 1],
        [0, 1, 2, 0, 1, 2],
    )
    assert counter.read_batch({"input_ids": IDS}).documents.tolist() == [2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("mask", [[[0, 1, 1], [1, 1, 1]], [[1, 1, 0], [1, 1, 1]]])
def test_padding_on_either_side_is_left_out_and_takes_no_position(mask):
    mask = torch.tensor(mask)
    batch = DocumentCounter().read_batch({"input_ids": IDS, "attention_mask": mask})
    assert batch.tokens.tolist() == IDS[mask.bool()].tolist()
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.kept.tolist() == mask.flatten().nonzero().flatten().tolist()
    assert batch.routed == 6


def test_a_cached_step_goes_on_with_its_documents():
    counter = DocumentCounter()
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    counter.read_batch({"input_ids": IDS, "attention_mask": mask})
    grown = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    step = counter.read_batch({"input_ids": IDS[:, :1], "attention_mask": grown})
    assert _lists(step) == ([5, 8], [0, 1], [2, 3])
    assert step.kept is None
    unmasked = counter.read_batch({"input_ids": IDS[:, :1], "past_key_values": _Cache(4)})
    assert _lists(unmasked) == ([5, 8], [0, 1], [4, 4])


def test_a_cache_of_one_token_is_enough_to_go_on():
    counter = DocumentCounter()
    counter.read_batch({"input_ids": IDS[:, :1]})
    step = counter.read_batch({"input_ids": IDS[:, 1:2], "past_key_values": _Cache(1)})
    assert _lists(step) == ([6, 9], [0, 1], [1, 1])


@pytest.mark.parametrize("cache", [None, _Cache(0), _Cache(None), object()])
def test_an_empty_cache_starts_new_documents(cache):
    counter = DocumentCounter()
    for start in (0, 2):
        batch = counter.read_batch({"input_ids": IDS, "past_key_values": cache})
        assert batch.documents.tolist() == [start] * 3 + [start + 1] * 3


def test_a_cache_of_other_rows_starts_new_documents_where_it_stands():
    counter = DocumentCounter()
    counter.read_batch({"input_ids": IDS})
    step = counter.read_batch({"input_ids": IDS[:1, :1], "past_key_values": _Cache(3)})
    assert _lists(step) == ([5], [2], [3])


def test_padding_that_is_fed_to_rows_that_have_ended_is_left_out():
    counter = DocumentCounter(padding=0, ends=frozenset({2}))
    counter.read_batch({"input_ids": IDS})
    steps = [[[2], [0]], [[0], [2]], [[0], [0]], [[0], [4]]]
    batches = [
        counter.read_batch({"input_ids": torch.tensor(ids), "past_key_values": _Cache(3 + n)})
        for n, ids in enumerate(steps)
    ]
    # a 0 before any end is a token like others; after an end or padding it is padding
    assert [batch.tokens.tolist() for batch in batches] == [[2, 0], [2], [], [4]]
    assert [batch.documents.tolist() for batch in batches] == [[0, 1], [1], [], [1]]


def test_embeddings_have_no_token_ids():
    batch = DocumentCounter().read_batch({"inputs_embeds": torch.zeros(2, 3, 4)})
    assert batch.tokens.tolist() == [-1] * 6


def test_masks_of_other_forms_hide_no_token():
    mask = torch.zeros(2, 1, 3, 3)
    batch = DocumentCounter().read_batch({"input_ids": IDS, "attention_mask": mask})
    assert batch.kept is None


def test_a_call_without_tokens_is_refused():
    with pytest.raises(TielineError, match="input_ids"):
        DocumentCounter().read_batch({"pixel_values": torch.zeros(1)})


PACKED = torch.tensor([[5, 6, 7, 8, 9, 10]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 0]])
PACKED_LISTS = [5, 6, 7, 8, 9, 10], [0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 0]


@pytest.mark.parametrize(
    "given",
    [
        {"position_ids": POSITIONS},
        {"position_ids": POSITIONS + 2},
        {"position_ids": torch.stack([POSITIONS] * 4)},
        {"cu_seq_lens_q": torch.tensor([0, 3, 5, 6], dtype=torch.int32)},
        {"cu_seqlens": torch.tensor([0, 3, 5, 6])},
        {"seq_idx": torch.tensor([[0, 0, 0, 1, 1, 2]], dtype=torch.int32)},
        {"attention_mask": torch.tensor([[1, 1, 1, 2, 2, 3]])},
        {"attention_mask": torch.ones(1, 6), "position_ids": POSITIONS},
    ],
)
def test_packed_rows_are_documents(given):
    counter = DocumentCounter()
    batch = counter.read_batch({"input_ids": PACKED, **given})
    assert _lists(batch) == PACKED_LISTS
    assert batch.kept is None
    assert counter.read_batch({"input_ids": IDS}).documents.tolist() == [3, 3, 3, 4, 4, 4]


def test_offsets_count_through_the_rows_and_end_before_padding():
    ids, offsets = torch.arange(5, 13).view(2, 4), torch.tensor([0, 2, 4, 7])
    batch = DocumentCounter().read_batch({"input_ids": ids, "cu_seq_lens_q": offsets})
    assert batch.documents.tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert batch.positions.tolist() == [0, 1, 0, 1, 0, 1, 2]
    assert batch.kept.tolist() == list(range(7))


def test_padding_of_packed_rows_is_left_out():
    ids = torch.tensor([[5, 6, 7, 8, 0, 0]])
    positions = torch.tensor([[0, 1, 0, 1, 0, 0]])
    batch = DocumentCounter(padding=0).read_batch({"input_ids": ids, "position_ids": positions})
    assert _lists(batch) == ([5, 6, 7, 8], [0, 0, 1, 1], [0, 1, 0, 1])
    mask = torch.tensor([[0, 1, 1, 1, 1, 0]])
    hidden = DocumentCounter().read_batch(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": torch.tensor([[1, 0, 1, 0, 1, 1]]),
        }
    )
    assert _lists(hidden) == ([6, 7, 8, 0], [0, 0, 1, 1], [0, 1, 0, 1])


@pytest.mark.parametrize(
    "positions",
    [[[0, 1, 2]], [[1, 0, 1], [0, 1, 2]], [[4, 5, 6], [4, 5, 6]]],
)
def test_positions_that_only_rise_leave_a_row_one_document(positions):
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    given = {"attention_mask": mask, "position_ids": torch.tensor(positions)}
    batch = DocumentCounter().read_batch({"input_ids": IDS, **given})
    assert batch.documents.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cu_seq_lens_q": torch.tensor([0, 3, 9])}, "ends at 9, but the pass has 6 tokens"),
        ({"cu_seq_lens_q": torch.tensor([0, 4, 3])}, "must rise from 0"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 3, 6]), "cu_seq_lens_k": torch.tensor([0, 9, 18])},
            "differ: the pass continues packed documents in a cache",
        ),
    ],
)
def test_offsets_that_cannot_be_are_refused(given, message):
    with pytest.raises(TielineError, match=message):
        DocumentCounter().read_batch({"input_ids": PACKED, **given})


def test_a_cache_of_packed_documents_cannot_be_continued():
    counter = DocumentCounter()
    counter.read_batch({"input_ids": PACKED, "position_ids": POSITIONS})
    with pytest.raises(TielineError, match="continues a cache of packed documents"):
        counter.read_batch({"input_ids": PACKED[:, :1], "past_key_values": _Cache(6)})
