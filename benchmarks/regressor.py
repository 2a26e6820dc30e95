"""How long `MoERegressor` takes and how near it comes to the noise.

python benchmarks/regressor.py [--rows 100000] [--json FILE]

The table has as many regions as the mixture has experts; in each another linear model holds. An
oracle that knows regions and models has the noise as its error, a single linear model the whole of
what the regions do.
"""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from sklearn.linear_model import LinearRegression

from harness import machine
from tieline.lab.estimation import MoERegressor

ROWS, WIDTH, REGIONS, NOISE = 100_000, 20, 8, 0.5
TARGET_SECONDS = 30.0


@dataclass(frozen=True)
class Measured:
    """One fit: errors are mean squares on rows that were not fitted."""

    regions: str
    rows: int
    seconds: float
    cpu_seconds: float
    noise: float
    mixture: float
    line: float
    status: str
    iterations: int

    @property
    def met(self) -> bool:
        """Whether the fit was as quick as it should be."""
        return self.seconds <= TARGET_SECONDS


def scores_win(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Regions where one of several linear scores is the largest."""
    return (x @ random.normal(size=(WIDTH, REGIONS))).argmax(axis=1)


def boxes(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Regions by the signs of three features."""
    return (x[:, random.permutation(WIDTH)[:3]] > 0) @ np.array([1, 2, 4])


def slices(x: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Regions by the quantile of one feature."""
    column = x[:, random.integers(WIDTH)]
    return np.searchsorted(np.quantile(column, np.arange(1, REGIONS) / REGIONS), column)


def table(kind, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, WIDTH))
    region, models = kind(x, random), random.normal(size=(REGIONS, WIDTH + 1))
    exact = (np.hstack([x, np.ones((rows, 1))]) * models[region]).sum(axis=1)
    return x, exact + NOISE * random.normal(size=rows)


def measure(kind, rows: int) -> Measured:
    """Fit on `rows` rows, judge on 20,000 others."""
    x, y = table(kind, rows + 20_000)
    model = MoERegressor(REGIONS, random_state=0)
    wall, cpu = time.perf_counter(), time.process_time()
    model.fit(x[:rows], y[:rows])
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    line = LinearRegression().fit(x[:rows], y[:rows])
    ours, theirs = (
        float(np.mean((length.predict(x[rows:]) - y[rows:]) ** 2)) for length in (model, line)
    )
    name = kind.__name__
    return Measured(name, rows, wall, cpu, NOISE**2, ours, theirs, model.status_, model.n_iter_)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--kinds", nargs="+", default=["scores_win", "boxes", "slices"])
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    rows = [measure(globals()[kind], options.rows) for kind in options.kinds]
    for row in rows:
        print(
            f"{row.regions:10s} {row.rows} x {WIDTH}, {REGIONS} experts: {row.seconds:5.1f} s "
            f"({row.cpu_seconds:.1f} CPU s, target {TARGET_SECONDS:g} s "
            f"{'met' if row.met else 'MISSED'}); mean squared error {row.mixture:.4f}, noise "
            f"{row.noise:.4f}, line {row.line:.4f}; {row.status} after {row.iterations} steps"
        )
    if options.json is not None:
        result = {"machine": machine(), "fits": [asdict(row) | {"met": row.met} for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
