"""Which layer of B is which layer of A: the ways that engines number layers.

A layer's number is the part of its name that tells it from the others: 3 of
`model.layers.3.mlp.gate`, of `layers.3` or of a table's `3`. Layers are paired by equal numbers, by
numbers one apart, or by order, where one program counts dense layers and the other does not.
"""

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Pairing", "layer_numbers", "pairings"]


class Pairing(NamedTuple):
    """One way to lay the layers on each other.

    Attributes:
        shift: number in B minus number in A, or place where names have no number; None if layers
            with numbers are paired by order.
        pairs: places in A and B.
    """

    shift: int | None
    pairs: tuple[tuple[int, int], ...]


def pairings(names_a: Sequence[str], names_b: Sequence[str]) -> list[Pairing]:
    """Every way to pair the layers, the plainest first; none of them twice or empty."""
    of_a, of_b = layer_numbers(names_a), layer_numbers(names_b)
    count_a, count_b = len(names_a), len(names_b)
    found: list[Pairing] = []
    if of_a is not None and of_b is not None:
        at = {number: place for place, number in enumerate(of_b)}
        for shift in (0, 1, -1):
            pairs = [(i, at[n + shift]) for i, n in enumerate(of_a) if n + shift in at]
            found.append(Pairing(shift, tuple(pairs)))
        found.append(Pairing(None, tuple((i, i) for i in range(min(count_a, count_b)))))
    else:
        for shift in (0, 1, -1):
            pairs = [(i, i + shift) for i in range(count_a) if 0 <= i + shift < count_b]
            found.append(Pairing(shift, tuple(pairs)))
    distinct = {pairing.pairs: pairing for pairing in reversed(found) if pairing.pairs}
    return [pairing for pairing in found if distinct.get(pairing.pairs) is pairing]


def layer_numbers(names: Sequence[str]) -> list[int] | None:
    """The number of each layer; None if the names do not give different ones."""
    parts = [name.split(".") for name in names]
    for place in range(min(map(len, parts), default=0)):
        column = [part[place] for part in parts]
        if all(word.isascii() and word.isdecimal() and len(word) < 10 for word in column):
            numbers = [int(word) for word in column]
            if len(set(numbers)) == len(numbers):
                return numbers
    return None
