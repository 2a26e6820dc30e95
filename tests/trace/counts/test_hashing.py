"""Hashes: pinned, because files of old versions rely on them, and spread evenly."""

import itertools

import numpy as np
import torch

from tieline.trace.counts import HASH_SPAN, coalition_hash, token_hash


def test_hashes_never_change():
    ids = torch.tensor([0, 0, 1, -1, 2**62])
    assert token_hash(ids, torch.arange(5)).tolist() == PINNED_TOKENS
    assert coalition_hash(np.array([[0], [3]])).tolist() == PINNED_COALITION


def test_token_hashes_are_distinct_and_spread_evenly():
    document, position = torch.meshgrid(torch.arange(-8, 56), torch.arange(1000), indexing="ij")
    hashes = token_hash(document.flatten(), position.flatten())
    assert len(np.unique(hashes)) == 64_000
    counts = np.bincount((hashes >> 57).astype(int), minlength=64)
    assert hashes.min() >= 0
    assert abs(counts - 1000).max() < 150  # five standard deviations of a binomial count


def test_swapping_document_and_position_is_another_token():
    first, second = torch.tensor([3]), torch.tensor([8])
    assert token_hash(first, second) != token_hash(second, first)


def test_a_coalition_is_a_set():
    sets = list(itertools.combinations(range(10), 3))
    hashes = {subset: coalition_hash(np.array(subset)[:, None])[0] for subset in sets}
    assert len(set(hashes.values())) == len(sets)
    for subset, value in hashes.items():
        for order in itertools.permutations(subset):
            assert coalition_hash(np.array(order)[:, None])[0] == value
    assert all(0 <= value < HASH_SPAN for value in hashes.values())


def test_the_hash_of_a_coalition_does_not_depend_on_its_neighbours():
    alone = coalition_hash(np.array([[1], [2]]))[0]
    assert coalition_hash(np.array([[1, 60], [2, 63]]))[0] == alone


def test_no_tokens_have_no_hashes():
    assert len(coalition_hash(np.zeros((2, 0), dtype=np.int64))) == 0


PINNED_TOKENS = [
    6017775124710473527,
    313702574736366215,
    6804074658870690613,
    104983671465725121,
    4264409468495666508,
]
PINNED_COALITION = [5370327107069575607]
