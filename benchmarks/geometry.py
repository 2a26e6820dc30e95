"""Speed of distances and exits, and how exact simulated exits are.

    python benchmarks/geometry.py [--json benchmarks/results/geometry.json] [--paths 4000000]

Times are shares of a budget: distances of 4096 tokens to the nearest tie of 64 experts (k = 8,
D = 1024) within 100 ms on two threads; a million path-steps per second and core for exits from a
cell at D = 16, E = 8, k = 2. Accuracy: P(exit by 1) with 16 steps for one face, two orthogonal ones
and two at other angles, against the exact law. `--paths 0` leaves it out.
"""

import argparse
import math

import numpy as np
import torch

import harness
from tieline.lab.geometry import distance_to_tie, exit_curve, face_exit, top_k_cell, two_face_exit

ROUNDS = 15
BUDGET_SECONDS = 0.1
PATHS, STEPS = 50_000, 16
COSINES = (0.0, 0.5, -0.5, 0.9, -0.9, 0.99, -0.99)


def router(experts: int, width: int, uneven: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(experts, width, generator=generator) / math.sqrt(width)
    return weight * torch.logspace(-1, 1, experts)[:, None] if uneven else weight


def share(name: str, clock: str, samples: harness.Samples, budget: float) -> harness.Ratio:
    """Median time over its budget, with an interval from resampling rounds."""
    times = np.array(getattr(samples, clock)) / budget
    rounds = np.random.default_rng(0).integers(len(times), size=(harness.RESAMPLES, len(times)))
    low, high = np.quantile(np.median(times[rounds], axis=1), [0.025, 0.975])
    return harness.Ratio(name, clock, float(np.median(times)), float(low), float(high), 1.0)


def distance_times() -> list[harness.Ratio]:
    torch.set_num_threads(2)
    x = torch.randn(4096, 1024, generator=torch.Generator().manual_seed(1))
    even, uneven = router(64, 1024, False), router(64, 1024, True)
    samples = harness.interleave(
        {
            "even rows": lambda: distance_to_tie(x, even, None, 8),
            "rows of lengths 0.1 to 10": lambda: distance_to_tie(x, uneven, None, 8),
        },
        ROUNDS,
    )
    return [
        share(f"distances, {name} / 100 ms", "wall", sample, BUDGET_SECONDS)
        for name, sample in samples.items()
    ]


def exit_times() -> list[harness.Ratio]:
    torch.set_num_threads(1)
    weight = router(8, 16, False).double() * 4
    start = weight @ torch.randn(16, generator=torch.Generator().manual_seed(2)).double()
    cell = top_k_cell(start, 2, weight)
    samples = harness.interleave({"exits": lambda: exit_curve(cell, 1.0, STEPS, PATHS)}, ROUNDS)
    budget = PATHS * STEPS / 1e6
    return [share("path-steps / 1 us, one core", "cpu", samples["exits"], budget)]


def accuracy(paths: int) -> list[dict[str, float]]:
    """Bias of P(exit by 1) after 16 steps: face distances 0.7 and 1, several angles."""
    rows = []
    for cosine in (None, *COSINES):
        second = [0.0, 0.0] if cosine is None else [cosine, math.sqrt(1 - cosine**2)]
        weight = -torch.tensor([[0.0, 0.0], [1.0, 0.0], second], dtype=torch.float64)
        cell = top_k_cell(torch.tensor([0.0, -0.7, -1.0], dtype=torch.float64), 1, weight)
        exact = (
            face_exit(torch.tensor(0.7), 1.0).item()
            if cosine is None
            else two_face_exit(0.7, 1.0, cosine, 1.0)
        )
        curve = exit_curve(cell, 1.0, STEPS, paths, seed=11)
        value, error = curve.value[-1].item(), curve.stderr[-1].item()
        rows.append(
            {
                "faces": 1 if cosine is None else 2,
                "cosine": 0.0 if cosine is None else cosine,
                "exact": exact,
                "simulated": value,
                "stderr": error,
                "bias": value - exact,
                "bias_in_stderr": (value - exact) / error,
                "naive": curve.naive[-1].item(),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default=None)
    parser.add_argument("--paths", type=int, default=4_000_000)
    arguments = parser.parse_args()
    ratios = [*distance_times(), *exit_times()]
    machine = {"threads": "2 for distances, 1 for exits"}
    rows = accuracy(arguments.paths) if arguments.paths else []
    for row in rows:
        print("  ".join(f"{name} {value:.5g}" for name, value in row.items()))
    per_second = {"path_steps_per_second": 1e6 / ratios[-1].value}
    harness.report("geometry", ratios, arguments.json, **per_second, setup=machine, exits=rows)


if __name__ == "__main__":
    main()
