"""The streaming summary of a run: what a trace says, in memory that does not grow with the tokens.

A summary holds integer counts per layer (`tieline.trace.layer_summary`) and a sample of whole
tokens (`tieline.trace.sample`). Summaries of parts of a run merge to the summary of the whole,
exactly, in any order and grouping, so ranks, machines and workers can each make one:

    merge([a, b, c])  ==  merge([merge([c, a]), b])  ==  summary of all tokens at once
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tieline.errors import TraceError, require
from tieline.trace.distinct import DistinctCount, distinct_count
from tieline.trace.hashing import token_hash
from tieline.trace.jsonio import canonical
from tieline.trace.layer_summary import LayerSummary, merge_layers
from tieline.trace.record import LayerTrace, RoutingTrace, check_epsilons
from tieline.trace.sample import KEYS, Rows, rows_of, smallest_rows

__all__ = ["RoutingSummary", "distinct_sources", "merge", "sample_trace"]


@dataclass(frozen=True, eq=False)
class RoutingSummary:
    """Statistics of all tokens of a run, and a sample of them.

    Attributes:
        layers: statistics per MoE layer, in order of depth.
        sample: trace of the `sample_size` tokens with the smallest hash of (document, position),
            or of all tokens if there are fewer; ordered by document and position.
        sample_size: largest number of tokens in the sample.
        epsilons: the grid of ε at which K(ε) and the orders of ties are counted.
        sources: provenance of each part, without repetition, in a fixed order.
    """

    layers: tuple[LayerSummary, ...]
    sample: RoutingTrace
    sample_size: int
    epsilons: tuple[float, ...] = ()
    sources: tuple[dict[str, object], ...] = ()

    def __post_init__(self) -> None:
        check_epsilons(self.epsilons)
        names = tuple(layer.name for layer in self.layers)
        tokens = {layer.tokens for layer in self.layers}
        sampled = tuple(layer.name for layer in self.sample.layers)
        require(names == sampled, f"sample of layers {sampled}, counts of {names}", TraceError)
        require(
            len(tokens) == 1, f"all layers must count the same tokens, got {tokens}", TraceError
        )
        require(
            self.sample.n_tokens <= min(self.sample_size, self.tokens),
            f"{self.sample.n_tokens} sampled of {self.tokens} tokens, size {self.sample_size}",
            TraceError,
        )

    @property
    def tokens(self) -> int:
        """Number of tokens T summarised."""
        return self.layers[0].tokens

    def distinct_tokens(self) -> DistinctCount:
        """How many different (document, position) there are, from the sample.

        Fewer than `tokens` if parts overlap, or number their documents alike.
        """
        hashes = token_hash(self.sample.documents, self.sample.positions)
        return distinct_count(hashes, self.sample_size)

    def layer(self, name: str) -> LayerSummary:
        """The layer whose router has this name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise TraceError(
            f"no layer {name!r} in the summary; it has {[x.name for x in self.layers]}"
        )


def merge(summaries: Sequence[RoutingSummary]) -> RoutingSummary:
    """The summary of the tokens of all: equal to that of one run over all of them."""
    require(len(summaries) > 0, "nothing to merge: got no summaries", TraceError)
    return functools.reduce(_merged, summaries[1:], summaries[0])


def _merged(first: RoutingSummary, second: RoutingSummary) -> RoutingSummary:
    for what in ("epsilons", "sample_size"):
        one, other = getattr(first, what), getattr(second, what)
        require(one == other, f"summaries differ in {what}: {one} is not {other}", TraceError)
    names = [[layer.name for layer in summary.layers] for summary in (first, second)]
    require(names[0] == names[1], f"summaries of different layers: {names}", TraceError)
    pairs = zip(first.layers, second.layers, strict=True)
    layers = tuple(merge_layers(one, other) for one, other in pairs)
    return RoutingSummary(
        layers=layers,
        sample=sample_trace(layers, _merged_sample(first, second), first.epsilons),
        sample_size=first.sample_size,
        epsilons=first.epsilons,
        sources=distinct_sources((*first.sources, *second.sources)),
    )


def _merged_sample(first: RoutingSummary, second: RoutingSummary) -> list[Rows]:
    samples = (first.sample, second.sample)
    keys = [{name: getattr(sample, name) for name in KEYS} for sample in samples]
    pairs = zip(*(sample.layers for sample in samples), strict=True)
    return [
        smallest_rows(
            [rows_of(layer, key) for layer, key in zip(pair, keys, strict=True)], first.sample_size
        )
        for pair in pairs
    ]


def sample_trace(
    layers: Sequence[LayerSummary], rows: Sequence[Rows], epsilons: tuple[float, ...]
) -> RoutingTrace:
    """The sampled rows of all layers as one trace; every layer must have seen the same tokens."""
    keys = {name: rows[0][name] for name in KEYS}
    for layer, own in zip(layers, rows, strict=True):
        same = all(torch.equal(keys[name], own[name]) for name in KEYS)
        require(
            same,
            f"layers {layers[0].name!r} and {layer.name!r} did not see the same tokens",
            TraceError,
        )
    records = tuple(
        LayerTrace(
            name=layer.name,
            facts=layer.facts,
            bias=layer.bias.value,
            **{name: value for name, value in own.items() if name not in KEYS},
        )
        for layer, own in zip(layers, rows, strict=True)
    )
    tokens, documents, positions = (keys[name] for name in KEYS)
    return RoutingTrace(records, tokens, documents, positions, epsilons)


def distinct_sources(sources: Sequence[dict[str, object]]) -> tuple[dict[str, object], ...]:
    """Each source once, ordered by its text."""
    return tuple(dict(sorted({canonical(source): source for source in sources}.items())).values())
