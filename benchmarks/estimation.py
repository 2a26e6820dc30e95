"""How fast mixtures of experts are fitted, and against a plain SGD loop.

    python benchmarks/estimation.py [--json benchmarks/results/estimation.json] [--only small,...]

small       the small design (about 32 parameters), 20 repetitions, seven n from 1e3 to 1e5: wall
            seconds on two processes, at most 90
published   d = 32, k = 8 (528 parameters), n = 1e4, 20 repetitions: wall seconds, at most 600
sgd         CPU time per repetition of Levenberg-Marquardt over that of a straightforward PyTorch
            loop (SGD, rate 0.1) that ends at the excess loss ‖f - f*‖² of Levenberg-Marquardt + 1 %
            or after 10 epochs, in one process and one run: at most 1/30
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from harness import RESAMPLES, machine
from tieline.lab.estimation.fit import fit, near_truth
from tieline.lab.estimation.model import MoEModel, MoEParameters
from tieline.lab.estimation.rate_plan import named_case
from tieline.lab.estimation.rates import rate_study

SMALL, PUBLISHED = "small-perturbed-softmax-tanh", "p2-1a-perturbed"
SIZES = tuple(round(10 ** (3 + i / 3)) for i in range(7))
BATCH, EPOCHS, RATE = 64, 10, 0.1


@dataclass(frozen=True)
class Row:
    """One figure beside its target."""

    what: str
    value: float
    unit: str
    low: float | None
    high: float | None
    target: float
    met: bool
    note: str


def timed_study(what: str, case: str, target: float, **grid: Any) -> Row:
    """Wall seconds of a rate study on two processes."""
    plan = named_case(case, **grid).plan
    begun = time.perf_counter()
    study = rate_study(plan, executor="loky", jobs=2, quiet=True)
    seconds = time.perf_counter() - begun
    cpu = sum(row.seconds for row in study.rows)
    note = f"{study.failed} of {len(study.rows)} not converged, {cpu:.1f} s CPU"
    return Row(what, seconds, "s wall", None, None, target, seconds <= target, note)


class Naive(torch.nn.Module):
    """The same mixture as anyone would write it."""

    def __init__(self, model: MoEModel, start: MoEParameters) -> None:
        super().__init__()
        self.tau = model.tau if model.gate == "perturbed" else None
        self.act = {"relu": torch.relu, "tanh": torch.tanh}[model.expert]
        self.router = torch.nn.Parameter(start.router.float())
        self.bias = torch.nn.Parameter(start.bias.float())
        self.experts = torch.nn.Parameter(start.experts.float())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """F(x)."""
        rows, inputs = self.router, x
        if self.tau is not None:
            rows = rows / (rows.norm(dim=-1, keepdim=True) + self.tau[0])
            inputs = x / (x.norm(dim=-1, keepdim=True) + self.tau[1])
        gate = torch.softmax(inputs @ rows.T + self.bias, dim=-1)
        outputs = self.act(x @ self.experts[:, :-1].T + self.experts[:, -1])
        return (gate * outputs).sum(dim=-1)


def sgd_seconds(
    model: MoEModel,
    start: MoEParameters,
    data: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    goal: float,
) -> tuple[float, bool]:
    """CPU seconds until the excess loss is at the goal, or the epochs are over."""
    begun = time.process_time()
    module = Naive(model, start)
    x, y, clean = (part.float() for part in data)
    optimiser = torch.optim.SGD(module.parameters(), lr=RATE)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            torch.nn.functional.mse_loss(module(x[rows]), y[rows]).backward()
            optimiser.step()
        with torch.no_grad():
            if torch.nn.functional.mse_loss(module(x), clean).item() <= goal:
                return time.process_time() - begun, True
    return time.process_time() - begun, False


def against_sgd(repetitions: int, n: int = 10_000) -> Row:
    """CPU time per repetition, ours over the loop's."""
    torch.set_num_threads(1)
    plan = named_case(SMALL, repetitions=repetitions).plan
    seeds = list(range(repetitions))
    sample = plan.source.simulate(plan.truth, n, seeds, noise=plan.noise)
    starts = near_truth(plan.centre, 0.1, seeds)
    fit(plan.model, sample.x[:, :500], sample.y[:, :500], starts, quiet=True)
    begun = time.process_time()
    fitted = fit(plan.model, sample.x, sample.y, starts, quiet=True)
    ours = (time.process_time() - begun) / repetitions
    clean = plan.source.regression(plan.truth, sample.x)
    excess = (plan.model.regression(fitted.best().params, sample.x) - clean).square().mean(-1)
    times, reached = [], 0
    for s in range(repetitions):
        data = sample.x[s], sample.y[s], clean[s]
        seconds, there = sgd_seconds(plan.model, starts[s][0], data, 1.01 * excess[s].item())
        times.append(seconds)
        reached += there
    drawn = np.random.default_rng(0).integers(repetitions, size=(RESAMPLES, repetitions))
    low, high = np.quantile(ours / np.array(times)[drawn].mean(1), [0.025, 0.975])
    note = (
        f"{ours * 1e3:.1f} ms against {np.mean(times):.2f} s per repetition "
        f"({np.mean(times) / ours:.0f} times; {fitted.iterations.double().mean():.1f} steps "
        f"against minibatches of {BATCH}); "
        f"SGD reached the goal in {reached} of {repetitions}; p = {plan.model.n_parameters}, {n=}"
    )
    value = ours / float(np.mean(times))
    return Row("LM / SGD, CPU per repetition", value, "", low, high, 1 / 30, value <= 1 / 30, note)


def small(repetitions: int) -> Row:
    what = f"small design, {repetitions} repetitions, 7 n to 1e5"
    return timed_study(what, SMALL, 90, sizes=SIZES, repetitions=repetitions)


def published(repetitions: int) -> Row:
    what = f"published design, n = 1e4, {repetitions} repetitions"
    return timed_study(what, PUBLISHED, 600, sizes=(10_000,), repetitions=repetitions)


RUNS: dict[str, Callable[[int], Row]] = {
    "small": small,
    "published": published,
    "sgd": against_sgd,
}


def show(rows: list[Row]) -> None:
    table = Table(title="Estimation")
    for column in ("what", "figure", "95 % interval", "target", "", "note"):
        table.add_column(column)
    for row in rows:
        interval = "" if row.low is None else f"{row.low:.4f} - {row.high:.4f}"
        verdict = "met" if row.met else "MISSED"
        figure = f"{row.value:.4g} {row.unit}"
        table.add_row(row.what, figure, interval, f"<= {row.target:.3g}", verdict, row.note)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", default=None)
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--repetitions", type=int, default=20, help="20 is what targets speak of")
    options = parser.parse_args()
    rows = [RUNS[name](options.repetitions) for name in options.only.split(",")]
    show(rows)
    if options.json is not None:
        result = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        Path(options.json).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
