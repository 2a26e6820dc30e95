"""Hashes that are the same on every machine, in every process and in every version.

    mix(x)                the finaliser of splitmix64, a bijection of 64-bit words
    token_hash(d, p)      of document and position: decides which tokens a sample keeps
    coalition_hash(S)     of a set of experts, the same for every order of its members

All are uniform to the eye on [0, 2^63), so that the smallest of them are a random sample of what
was hashed, and the same sample however the data was cut into shards.
"""

import numpy as np
from jaxtyping import Int, Int64
from torch import Tensor

__all__ = ["SPAN", "coalition_hash", "token_hash"]

SPAN = 1 << 63
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def token_hash(
    documents: Int[Tensor, " tokens"], positions: Int[Tensor, " tokens"]
) -> Int64[np.ndarray, " tokens"]:
    """Hash of (document, position), in [0, 2^63)."""
    document = _mix(documents.long().numpy().view(np.uint64))
    return _folded(_mix(document ^ positions.long().numpy().view(np.uint64)))


def coalition_hash(chosen: Int[np.ndarray, "k tokens"]) -> Int64[np.ndarray, " tokens"]:
    """Hash of the set of chosen experts, in [0, 2^63): the mixed sum of one word per expert."""
    words = _mix(np.arange(1, int(chosen.max(initial=0)) + 2, dtype=np.uint64))
    return _folded(_mix(words.take(chosen).sum(0)))


def _folded(words: np.ndarray) -> np.ndarray:
    """The upper 63 bits, as numbers that signed integers can hold."""
    return (words >> np.uint64(1)).view(np.int64)


def _mix(words: np.ndarray) -> np.ndarray:
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _FIRST
    words = (words ^ (words >> np.uint64(27))) * _SECOND
    return words ^ (words >> np.uint64(31))
