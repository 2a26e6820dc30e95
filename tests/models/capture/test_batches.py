"""Documents, positions and padding of successive forward passes."""

import pytest
import torch

from tieline.core.errors import TielineError
from tieline.models.capture import DocumentCounter

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
    assert _lists(counter.read({"input_ids": IDS})) == (
        [5, 6, 7, 8, 9, 10],
        [0, 0, 0, 1, 1, 1],
        [0, 1, 2, 0, 1, 2],
    )
    assert counter.read({"input_ids": IDS}).documents.tolist() == [2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("mask", [[[0, 1, 1], [1, 1, 1]], [[1, 1, 0], [1, 1, 1]]])
def test_padding_on_either_side_is_left_out_and_takes_no_position(mask):
    mask = torch.tensor(mask)
    batch = DocumentCounter().read({"input_ids": IDS, "attention_mask": mask})
    assert batch.tokens.tolist() == IDS[mask.bool()].tolist()
    assert batch.positions.tolist() == [0, 1, 0, 1, 2]
    assert batch.kept.tolist() == mask.flatten().nonzero().flatten().tolist()
    assert batch.routed == 6


def test_a_cached_step_goes_on_with_its_documents():
    counter = DocumentCounter()
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    counter.read({"input_ids": IDS, "attention_mask": mask})
    grown = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    step = counter.read({"input_ids": IDS[:, :1], "attention_mask": grown})
    assert _lists(step) == ([5, 8], [0, 1], [2, 3])
    assert step.kept is None
    unmasked = counter.read({"input_ids": IDS[:, :1], "past_key_values": _Cache(4)})
    assert _lists(unmasked) == ([5, 8], [0, 1], [4, 4])


def test_a_cache_of_one_token_is_enough_to_go_on():
    counter = DocumentCounter()
    counter.read({"input_ids": IDS[:, :1]})
    step = counter.read({"input_ids": IDS[:, 1:2], "past_key_values": _Cache(1)})
    assert _lists(step) == ([6, 9], [0, 1], [1, 1])


@pytest.mark.parametrize("cache", [None, _Cache(0), _Cache(None), object()])
def test_an_empty_cache_starts_new_documents(cache):
    counter = DocumentCounter()
    for start in (0, 2):
        batch = counter.read({"input_ids": IDS, "past_key_values": cache})
        assert batch.documents.tolist() == [start] * 3 + [start + 1] * 3


def test_a_cache_of_other_rows_starts_new_documents_where_it_stands():
    counter = DocumentCounter()
    counter.read({"input_ids": IDS})
    step = counter.read({"input_ids": IDS[:1, :1], "past_key_values": _Cache(3)})
    assert _lists(step) == ([5], [2], [3])


def test_padding_that_is_fed_to_rows_that_have_ended_is_left_out():
    counter = DocumentCounter(padding=0, ends=frozenset({2}))
    counter.read({"input_ids": IDS})
    steps = [[[2], [0]], [[0], [2]], [[0], [0]], [[0], [4]]]
    seen = [
        counter.read({"input_ids": torch.tensor(ids), "past_key_values": _Cache(3 + n)})
        for n, ids in enumerate(steps)
    ]
    # a 0 before any end is a token like others; after an end or padding it is padding
    assert [batch.tokens.tolist() for batch in seen] == [[2, 0], [2], [], [4]]
    assert [batch.documents.tolist() for batch in seen] == [[0, 1], [1], [], [1]]


def test_embeddings_have_no_token_ids():
    batch = DocumentCounter().read({"inputs_embeds": torch.zeros(2, 3, 4)})
    assert batch.tokens.tolist() == [-1] * 6


def test_masks_of_other_forms_hide_no_token():
    mask = torch.zeros(2, 1, 3, 3)
    batch = DocumentCounter().read({"input_ids": IDS, "attention_mask": mask})
    assert batch.kept is None


def test_a_call_without_tokens_is_refused():
    with pytest.raises(TielineError, match="input_ids"):
        DocumentCounter().read({"pixel_values": torch.zeros(1)})
