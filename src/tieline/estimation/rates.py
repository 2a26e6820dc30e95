"""Results of a rate study on disk: one line of JSON for each sample size and repetition.

A line is appended, and brought to the disk, as soon as its block of repetitions is done; a run that
is killed loses the block it was at, and at most leaves half a line at the end, which the next run
cuts off. A line counts for the very same study: its `study` is the study's key.

One block of a rate study: simulate, fit, compare. A worker runs it alone, on one thread.

Rate studies: how fast losses of a setting fall with the sample size.

rate_study     fits over a grid of sample sizes, repetitions and start radii, and slopes
RateStudy      rows, slopes with intervals, and the sample size that an error asks for

Three losses are followed. `raw` is the paper's Voronoi loss as it stands; `quotient` is the same in
the canonical form, without the directions that the data cannot see; `function` is ‖f - f*‖. Least
squares leave the error of the start in the unseen directions, so a raw loss measures the start.

With n < p samples for p parameters the data allow a whole surface of fits of at least p - n
dimensions, and the ridge, not the data, picks one of them: its losses are reported, but they lie on
no power law of n, so slopes and sample sizes leave them out and a warning says so.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.numerics import one_thread
from tieline.core.parallel import run_jobs
from tieline.core.records import canonical, parse_json
from tieline.core.statistics import PowerLaw, SampleSize, fit_rate, mean_estimate, sample_size
from tieline.estimation.distances import regression_distance
from tieline.estimation.fit import FitResult, FitWarning, fit, near_truth, radius_at, tell_failures
from tieline.estimation.losses import quotient_losses, voronoi_losses
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters
from tieline.estimation.rate_plan import Block, RatePlan, as_case, estimate_seconds, plan_blocks
from tieline.estimation.settings import Setting
from tieline.estimation.solvers import Status

__all__ = [
    "FIELDS",
    "LOSSES",
    "RateStore",
    "RateStudy",
    "Row",
    "fit_block",
    "rate_study",
    "study_seconds",
]

FIELDS = ("raw", "quotient", "function", "loss")
LARGEST = 256 << 20
Row = dict[str, Any]
"""study, n, repetition, radius, and the numbers of `FIELDS`, status, iterations, seconds, empty."""


@dataclass(frozen=True)
class RateStore:
    """A file of results.

    Attributes:
        path: made when the first row is added.
    """

    path: Path

    def check(self) -> None:
        """Refuse a place that cannot be written to, before any work."""
        folder = self.path.absolute().parent
        require(folder.is_dir(), f"cannot keep results in {self.path}: there is no {folder}")
        require(not self.path.is_dir(), f"cannot keep results in {self.path}: it is a folder")
        place = self.path if self.path.exists() else folder
        require(os.access(place, os.W_OK), f"cannot keep results in {place}: it is read-only")

    def load(self, study: str) -> list[Row]:
        """The rows of a study; a broken last line is left out, any other is refused."""
        return [row for row in self._rows() if row["study"] == study]

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows, after cutting off what a killed run left of a line."""
        text = "".join(canonical(dict(row)) + "\n" for row in rows).encode()
        whole = self._whole_length()
        with self.path.open("r+b" if self.path.exists() else "xb") as file:
            file.truncate(whole)
            file.seek(whole)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _bytes(self) -> bytes:
        if not self.path.exists():
            return b""
        size = self.path.stat().st_size
        require(size <= LARGEST, f"{self.path}: {size} bytes, at most {LARGEST}", TraceError)
        return self.path.read_bytes()

    def _whole_length(self) -> int:
        """Bytes up to the end of the last line that is one."""
        data = self._bytes()
        end = data.rfind(b"\n") + 1
        begin = data.rfind(b"\n", 0, max(0, end - 1)) + 1
        try:
            _row(parse_json(data[begin:end], str(self.path)))
        except TraceError:
            return begin
        return end

    def _rows(self) -> list[Row]:
        lines = self._bytes().split(b"\n")
        rows = []
        for number, line in enumerate(lines[:-1], start=1):
            try:
                rows.append(_row(parse_json(line, f"{self.path}, line {number}")))
            except TraceError:
                if number < len(lines) - 1:
                    raise
        return rows


def _row(value: object) -> Row:
    """A line as a row: every field there, and of its kind."""
    row = value if isinstance(value, dict) else {}
    whole = ("n", "repetition", "status", "iterations", "empty")
    numbers = (*FIELDS, "radius", "seconds")
    good = (
        isinstance(row.get("study"), str)
        and all(isinstance(row.get(name), int) and row[name] >= 0 for name in whole)
        and all(
            row.get(name, "") is None or isinstance(row.get(name), int | float) for name in numbers
        )
    )
    require(good, f"no row of a rate study: {str(value)[:80]!r}", TraceError)
    return row


POINTS = 10_000
"""Fresh inputs on which functions are compared."""


def fit_block(plan: RatePlan, block: Block) -> list[Row]:
    """A row for each repetition of the block."""
    begun = time.process_time()
    with one_thread():
        fitted = _fit(plan, block)
        losses = _losses(plan, fitted.params)
    seconds = (time.process_time() - begun) / len(block.repetitions)
    head = {"study": plan.key, "n": block.n, "radius": block.radius, "seconds": seconds}
    return [
        head
        | {"repetition": repetition, "status": int(fitted.status[at])}
        | {"iterations": int(fitted.iterations[at]), "loss": _number(fitted.loss[at])}
        | {name: _number(part[at]) for name, part in losses.items() if name != "empty"}
        | {"empty": int(losses["empty"][at])}
        for at, repetition in enumerate(block.repetitions)
    ]


def _fit(plan: RatePlan, block: Block) -> FitResult:
    """The best start of each repetition."""
    seeds = block.seeds(plan)
    sample = plan.source.simulate(plan.truth, block.n, seeds, noise=plan.noise, law=plan.law)
    radius = radius_at(block.radius, block.n, shrink=plan.shrink)
    starts = near_truth(plan.centre, radius, [seed ^ 1 for seed in seeds], plan.starts)
    steps: dict[str, Any] = {"iterations": plan.iterations} if plan.method == "lm" else {}
    found = fit(plan.model, sample.x, sample.y, starts, method=plan.method, quiet=True, **steps)
    return found.best()


def _losses(plan: RatePlan, params: MoEParameters) -> dict[str, Tensor]:
    """Raw and quotient loss, distance of the functions, and empty cells of each fit."""
    how = plan.loss, plan.paper, plan.power
    raw = voronoi_losses(params, plan.reference, *how)
    quotient = quotient_losses(plan.model, params, plan.reference, *how)
    home = plan.model.with_experts(plan.reference.n_experts)
    distance = regression_distance(
        plan.model, params, home, plan.reference, n=POINTS, seed=plan.seed + 2**40, law=plan.law
    )
    parts = {"raw": raw.values, "quotient": quotient.values, "function": distance.value}
    return parts | {"empty": quotient.empty}


def _number(value: Tensor) -> float | None:
    """A float for JSON; None where it is none."""
    found = value.item()
    return found if math.isfinite(found) else None


LOSSES = ("raw", "quotient", "function")
Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class RateStudy:
    """What a plan gave.

    Attributes:
        plan: the plan.
        rows: one for each sample size, radius and repetition.
        paper_slope: the slope that the paper reports for this setting, if it does.
    """

    plan: RatePlan
    rows: tuple[Row, ...]
    paper_slope: float | None = None

    @property
    def failed(self) -> int:
        """Problems that did not converge."""
        return sum(not Status(row["status"]).answered for row in self.rows)

    @property
    def ridge_sizes(self) -> tuple[int, ...]:
        """Sample sizes below the number of parameters, where a ridge picks the fit."""
        return tuple(n for n in self.plan.sizes if n < self.plan.model.n_parameters)

    @property
    def ridge_words(self) -> str:
        """What is to be said of those; nothing if there are none."""
        if not self.ridge_sizes:
            return ""
        sizes, p = ", ".join(f"{n:,}" for n in self.ridge_sizes), self.plan.model.n_parameters
        return (
            f"n = {sizes}: fewer samples than the {p} parameters, so a ridge picks one of the many "
            "fits that the data allow; these losses tell of the ridge and no slope counts them"
        )

    def losses(self, loss: str, radius: float | None = None) -> list[Float[Tensor, " _"]]:
        """The losses of each sample size; those that are no numbers are left out."""
        require(loss in LOSSES, f"loss must be one of {LOSSES}, got {loss!r}")
        at = self.plan.radii[0] if radius is None else radius
        picked = {n: [] for n in self.plan.sizes}
        for row in self.rows:
            if row["radius"] == at and row[loss] is not None:
                picked[row["n"]].append(row[loss])
        return [torch.tensor(picked[n], dtype=torch.float64) for n in self.plan.sizes]

    def rate(self, loss: str = "quotient", radius: float | None = None) -> PowerLaw:
        """The slope of a loss from one start radius (the first by default)."""
        return fit_rate(*self._determined(loss, radius), self.plan.seed)

    def samples_for(
        self, error: float, loss: str = "quotient", radius: float | None = None
    ) -> SampleSize:
        """About how many samples bring the mean loss to `error`."""
        return sample_size(*self._determined(loss, radius), error, self.plan.seed)

    def to_dict(self) -> dict[str, Any]:
        """JSON values: what the figure, the table and the file show."""
        plan, model = self.plan, self.plan.model
        words = {s.name.lower(): sum(row["status"] == s for row in self.rows) for s in Status}
        facts = {"gate": model.gate, "link": model.link, "expert": model.expert, "d": model.d}
        return {
            "name": plan.name,
            "model": facts | {"n_experts": model.n_experts, "parameters": model.n_parameters},
            "true_experts": plan.truth.n_experts,
            "well_specified": plan.reference is plan.truth,
            "loss": plan.loss,
            "paper": plan.paper,
            "noise": plan.noise,
            "method": plan.method,
            "seed": plan.seed,
            "sizes": list(plan.sizes),
            "repetitions": plan.repetitions,
            "problems": len(self.rows),
            "failed": self.failed,
            "status": {name: count for name, count in words.items() if count},
            "ridge": {"sizes": list(self.ridge_sizes), "words": self.ridge_words},
            "empty_cells": sum(row["empty"] > 0 for row in self.rows),
            "cpu_seconds": sum(row["seconds"] for row in self.rows),
            "paper_slope": self.paper_slope,
            "series": [self._series(loss, radius) for loss in LOSSES for radius in plan.radii],
        }

    def _determined(self, loss: str, radius: float | None) -> tuple[list[int], list[Tensor]]:
        """Sample sizes that are no fewer than the parameters, and their losses."""
        left, p = len(self.ridge_sizes), self.plan.model.n_parameters
        require(
            len(self.plan.sizes) >= left + 2,
            f"a slope needs two sample sizes of at least {p}, the number of parameters, got "
            f"{list(self.plan.sizes)}",
        )
        return list(self.plan.sizes[left:]), self.losses(loss, radius)[left:]

    def _series(self, loss: str, radius: float) -> dict[str, Any]:
        losses = self.losses(loss, radius)
        known = [(n, part) for n, part in zip(self.plan.sizes, losses, strict=True) if len(part)]
        means = [mean_estimate(part) for _, part in known]
        fair = [(n, part) for n, part in known if n not in self.ridge_sizes]
        rate = None
        if len(fair) >= 2 and all(part.mean() > 0 for _, part in fair):
            rate = vars(fit_rate([n for n, _ in fair], [part for _, part in fair]))
        start = f"r = {radius:g}" + (" √(1000/n)" if self.plan.shrink else "")
        return {
            "loss": loss,
            "radius": radius,
            "start": start,
            "sizes": [n for n, _ in known],
            "mean": [mean.value for mean in means],
            "stderr": [mean.standard_error or 0.0 for mean in means],
            "rate": rate,
        }


def rate_study(
    setting: RatePlan | Setting | MoEModel | str,
    *,
    results: Path | None = None,
    paper_slope: float | None = None,
    engine: str = "loky",
    address: str | None = None,
    jobs: int = -1,
    progress: Progress | None = None,
    quiet: bool = False,
    **grid: Any,
) -> RateStudy:
    """Study a setting, taking from `results` what is there already.

    Args:
        setting: a setting or its name, a model, for which a truth is drawn, or a whole plan.
        results: a file of JSON lines to which every block is added as it ends.
        paper_slope: carried into the result; a published setting brings its own.
        engine: "loky" for processes here, "dask" for a cluster, "serial" for this process.
        address: of the Dask scheduler.
        jobs: processes at once; -1 for one per core.
        progress: told how many samples are fitted, and of how many.
        quiet: no warning of problems that did not converge or of too few samples.
        grid: fields of `RatePlan` to set: sizes, repetitions, radii, noise, seed, ...
    """
    case = as_case(setting, **grid)
    plan, printed = case.plan, case.paper_slope if paper_slope is None else paper_slope
    store = None if results is None else RateStore(results)
    if store is not None:
        store.check()
    rows = _known(plan, store)
    blocks = plan_blocks(plan, list(rows))
    total = sum(n for n in plan.sizes) * len(plan.radii) * plan.repetitions
    done = total - sum(block.rows for block in blocks)
    arguments = [(plan, block) for block in blocks]
    for fresh in run_jobs(fit_block, arguments, engine=engine, address=address, jobs=jobs):
        if store is not None:
            store.add(fresh)
        rows |= {_place(row): row for row in fresh}
        done += sum(row["n"] for row in fresh)
        if progress is not None:
            progress(done, total)
    study = RateStudy(plan, tuple(rows[place] for place in sorted(rows)), printed)
    if not quiet:
        tell_failures(torch.tensor([Status(row["status"]).answered for row in study.rows]))
        if study.ridge_words:
            warnings.warn(study.ridge_words, FitWarning, stacklevel=2)
    return study


def study_seconds(plan: RatePlan, results: Path | None = None, jobs: int = -1) -> float:
    """About how long the study will take, without what `results` holds already."""
    store = None if results is None else RateStore(results)
    blocks: list[Block] = plan_blocks(plan, list(_known(plan, store)))
    return estimate_seconds(plan, blocks, (os.cpu_count() or 1) if jobs == -1 else jobs)


def _known(plan: RatePlan, store: RateStore | None) -> dict[tuple[int, float, int], Row]:
    """Rows of the store that belong to the plan's grid."""
    rows = [] if store is None else store.load(plan.key)
    grid = {(n, r, i) for n in plan.sizes for r in plan.radii for i in range(plan.repetitions)}
    return {_place(row): row for row in rows if _place(row) in grid}


def _place(row: Mapping[str, Any]) -> tuple[int, float, int]:
    return row["n"], row["radius"], row["repetition"]
