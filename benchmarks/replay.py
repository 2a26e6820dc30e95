"""What it costs to replay routes: time of a forward pass with and without.

    python benchmarks/replay.py [--rounds 30] [--json FILE]

4 layers, d = 512, 64 experts of width 256, top-8, 2048 tokens in float32. Plain passes, passes that
replay its own routes, and passes that replay routes of which some differ (5 % of tokens take
the next experts) take turns on the same model. Target: at most 5 % more, upper end of the interval.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace as changed

import torch

from capture import olmoe
from harness import Ratio, interleave, ratio, report
from tieline.models.capture import capture
from tieline.models.replay import replay
from tieline.trace.record import RoutingTrace

TARGET = 1.05


def other(trace: RoutingTrace, share: float) -> RoutingTrace:
    """The trace with the next experts for some tokens."""
    layers = []
    for layer in trace.layers:
        moved = torch.rand(len(layer.experts)) < share
        k, experts = layer.facts.k, layer.facts.n_experts
        ids = layer.experts[:, :k].long()
        ids = torch.where(moved[:, None], (ids + 1) % experts, ids)
        layers.append(type(layer)(layer.name, layer.facts, ids, weights=layer.weights))
    return changed(trace, layers=tuple(layers))


def timings(rounds: int, tokens: int) -> list[Ratio]:
    """Passes with replay against passes without, in turns."""
    model = olmoe(layers=4, width=512, expert_width=256)
    ids = torch.randint(2, 512, (tokens // 512, 512))
    with torch.no_grad(), capture(model, distances=False, epsilons=()) as recorder:
        model(input_ids=ids, use_cache=False)
    trace = recorder.trace()
    some = other(trace, 0.05)

    def run(routes: RoutingTrace | None, weights: str = "live") -> Callable[[], None]:
        def plain() -> None:
            with torch.no_grad():
                model(input_ids=ids, use_cache=False)

        def replayed() -> None:
            assert routes is not None
            with replay(model, routes, weights):  # type: ignore[arg-type]
                plain()

        return plain if routes is None else replayed

    contestants = {
        "plain": run(None),
        "own routes": run(trace),
        "5 % differ": run(some),
        "recorded weights": run(trace, "recorded"),
    }
    samples = interleave(contestants, rounds)
    return [
        ratio(f"replay, {name}", samples[name], samples["plain"], TARGET)
        for name in list(contestants)[1:]
    ]


def main() -> None:
    """Run the benchmark and report it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--json")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report("replay", timings(given.rounds, given.tokens), given.json)


if __name__ == "__main__":
    main()
