"""How fast cells and pieces are counted and listed, and against `relucent` on dense networks.

Counting and listing run on one core; medians of wall time after compilation. `relucent` (PyPI)
lists the activation regions of a dense ReLU network by local search; it is asked once per network,
without its verification pass, and left out where it is not installed.

    python benchmarks/tropical.py [--rounds 9] [--json PATH]
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from harness import interleave, machine
from tieline.lab.tropical import cells, count_cells, count_regions, regions

Layer = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
DENSE = ((32, 2), (16, 3))  # width and dimension of the networks that relucent is given


@dataclass(frozen=True)
class Row:
    """One figure beside its target; `met` is None where there is none."""

    what: str
    pieces: int
    seconds: float
    value: float
    unit: str
    target: str
    met: bool | None


def layer(seed: int, experts: int, width: int, dim: int) -> Layer:
    """Gaussian router and neurons."""
    r = np.random.default_rng(seed)
    router = r.standard_normal((experts, dim)), r.standard_normal(experts)
    return *router, r.standard_normal((experts, width, dim)), r.standard_normal((experts, width))


def contestants() -> dict[str, Callable[[], object]]:
    plane, space, small = layer(0, 16, 64, 2), layer(0, 16, 8, 3), layer(7, 8, 8, 3)
    W, b, *_ = layer(0, 32, 1, 3)
    return {
        "count pieces d=2 N=16 H=64 k=4": lambda: count_regions(*plane, 4),
        "count pieces d=3 N=16 H=8 k=4": lambda: count_regions(*space, 4),
        "list pieces d=3 N=8 H=8 k=2": lambda: regions(*small, 2),
        "list pieces d=3 N=16 H=8 k=4": lambda: regions(*space, 4),
        "count cells d=3 N=32 k=4": lambda: count_cells(W, b, 4),
        "count cells d=3 N=32 k=16": lambda: count_cells(W, b, 16),
        "list cells d=3 N=32 k=4": lambda: cells(W, b, 4),
    }


def size(result: object) -> int:
    return int(result) if isinstance(result, int) else len(result)  # pyright: ignore


def judge(what: str, pieces: int, seconds: float) -> Row:
    rate = pieces / seconds
    if what.startswith("list pieces"):
        return Row(what, pieces, seconds, rate, "pieces/s", ">= 500", rate >= 500)
    if what.startswith("count pieces d=3"):
        return Row(what, pieces, seconds, rate, "pieces/s", ">= 50,000", rate >= 50_000)
    limit = 0.3 if what.startswith("count pieces") else 0.1
    return Row(what, pieces, seconds, seconds, "s", f"<= {limit}", seconds <= limit)


def ours(rounds: int) -> list[Row]:
    runs = contestants()
    sizes = {name: size(run()) for name, run in runs.items()}
    samples = interleave(runs, rounds)
    return [judge(name, sizes[name], float(np.median(samples[name].wall))) for name in runs]


def median_time(run: Callable[[], object], rounds: int) -> float:
    return float(np.median(interleave({"": run}, rounds)[""].wall))


def against_relucent(width: int, dim: int, rounds: int) -> list[Row]:
    """Ratios of times on one dense network, counting and listing."""
    import relucent  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    hidden = torch.nn.Linear(dim, width).double()
    network = torch.nn.Sequential(hidden, torch.nn.ReLU(), torch.nn.Linear(width, 1).double())
    dense = torch.zeros(1, dim), torch.zeros(1), hidden.weight[None], hidden.bias[None]
    start = time.perf_counter()
    complex_ = relucent.Complex(network)
    complex_.bfs(nworkers=1, verify=False, verbose=0)
    rival = time.perf_counter() - start
    rows = []
    for verb, run in (("count", count_regions), ("list", regions)):
        assert size(run(*dense, 1)) == len(complex_)
        seconds = median_time(lambda run=run: run(*dense, 1), rounds)
        what = f"{verb} a dense network, H={width} d={dim}, relucent {rival:.1f} s"
        ratio = rival / seconds
        rows.append(
            Row(what, len(complex_), seconds, ratio, "times faster", ">= 100", ratio >= 100)
        )
    return rows


def show(rows: list[Row]) -> None:
    table = Table(title="Cells and pieces, one core")
    for column in ("what", "pieces", "seconds", "figure", "target", ""):
        table.add_column(column)
    for row in rows:
        verdict = {None: "", True: "met", False: "MISSED"}[row.met]
        figure = f"{row.value:,.3g} {row.unit}" if row.value < 1 else f"{row.value:,.0f} {row.unit}"
        table.add_row(
            row.what, f"{row.pieces:,}", f"{row.seconds:.4f}", figure, row.target, verdict
        )
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = ours(options.rounds)
    if importlib.util.find_spec("relucent") is not None:
        for width, dim in DENSE:
            rows += against_relucent(width, dim, options.rounds)
    show(rows)
    if options.json is not None:
        result = {"machine": machine(), "rounds": options.rounds, "rows": [asdict(r) for r in rows]}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
