"""Rate studies: power laws of the losses of a setting in the sample size.

Four losses are followed. `raw` is the paper's Voronoi loss; `quotient` is the same loss in
canonical form, without the directions that the data cannot determine; `function` is ‖f - f*‖;
`experts` is the distance of each true expert from the nearest fitted one, √mean_j min_i ‖h_i -
h*_j‖², which does not depend on symmetries of the parameters. Least squares keep the error of the
start in directions that the data cannot determine, so a raw loss measures the start.

With n < p samples for p parameters, a surface of at least p - n dimensions fits the data, and the
ridge picks one of its points. These losses are reported but follow no power law in n: slopes and
sample sizes leave them out, with a warning.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.core.errors import TraceError, require
from tieline.core.files import locked_file, naming_full_disk
from tieline.core.numerics import one_thread
from tieline.core.records import Result, canonical_json, from_plain, parse_json
from tieline.core.statistics import mean_estimate
from tieline.lab.estimation.fit import (
    FitResult,
    FitWarning,
    fit,
    near_truth,
    start_radius_at,
    warn_unconverged,
)
from tieline.lab.estimation.losses import (
    expert_distance,
    quotient_losses,
    regression_distance,
    voronoi_losses,
)
from tieline.lab.estimation.model import MoEModel
from tieline.lab.estimation.rate_plan import (
    Case,
    RatePlan,
    RepetitionBlock,
    Setting,
    case_from,
    estimate_seconds,
    plan_blocks,
)
from tieline.lab.estimation.solvers import Status
from tieline.lab.job_executors import run_jobs
from tieline.lab.power_law import Middle, PowerLaw, SampleSize, fit_rate, sample_size

LOSSES = ("raw", "quotient", "function", "experts")
POINTS = 10_000  # fresh inputs on which functions are compared
MOST_FILE_BYTES = 256 << 20  # bytes of the largest file of results that is read


@dataclass(frozen=True)
class RateRow:
    """One fitted repetition of the plan with the key `study`.

    `loss` is the mean squared residual and `empty` the number of true experts with an empty cell;
    losses that are not finite are None.
    """

    study: str
    n: int
    radius: float
    repetition: int
    status: int
    iterations: int
    loss: float | None
    raw: float | None
    quotient: float | None
    function: float | None
    empty: int
    seconds: float
    experts: float | None = None

    def __post_init__(self) -> None:
        counts = self.n, self.repetition, self.status, self.iterations, self.empty
        require(min(counts) >= 0, f"counts are not negative, got {counts}")

    @property
    def grid_point(self) -> tuple[int, float, int]:
        """Point (n, radius, repetition) of the plan's grid."""
        return self.n, self.radius, self.repetition


@dataclass(frozen=True)
class StudiedModel:
    """The fitted family: gate, link and experts, input dimension d, experts, parameters."""

    gate: str
    link: str
    expert: str
    d: int
    n_experts: int
    parameters: int


@dataclass(frozen=True)
class RidgeSizes:
    """Sample sizes below the number of parameters, and a warning about them if there are any."""

    sizes: tuple[int, ...]
    words: str


@dataclass(frozen=True)
class LossSeries:
    """Mean losses at the sample sizes with finite losses, for one loss and one start radius.

    `start` is the radius in words; `rate` is None with fewer than two usable sample sizes.
    """

    loss: str
    radius: float
    start: str
    sizes: tuple[int, ...]
    mean: tuple[float, ...]
    stderr: tuple[float, ...]
    rate: PowerLaw | None


@dataclass(frozen=True)
class SamplesNeeded:
    """Number of samples that bring the quotient loss to `error`; None is infinity."""

    n: float | None
    low: float | None
    high: float | None
    error: float
    seen: bool
    words: str


@dataclass(frozen=True, repr=False)
class RateStudy(Result):
    """The result of a rate study.

    Attributes:
        name: of the setting.
        model: the family that was fitted.
        true_experts: experts of the truth.
        well_specified: whether the model contains the truth.
        loss: name of the Voronoi loss.
        paper: the paper that defines it, 2 or 4.
        noise: standard deviation.
        method: of fitting.
        seed: of everything drawn.
        sizes: sample sizes.
        repetitions: data sets for each size.
        problems: fits in all.
        failed: fits that did not converge.
        status: number of fits by the way they ended.
        ridge: sample sizes that are too small for a slope.
        empty_cells: fits in which a true expert has an empty cell.
        cpu_seconds: time of all fits.
        paper_slope: the slope that the paper reports, if it does.
        series: mean losses and slopes, for each loss and start radius.
        misfit: ‖f_Ḡ - q‖; zero if the model contains the truth.
        sample_size: samples needed for the error that was asked for.
        condition: of the information matrix at a truth chosen for it.
        samples: samples by which the sizes were emulated; 0 if they were drawn.
        rows: every fit; empty in a study read from a file.
    """

    format = "tieline-rates"

    name: str
    model: StudiedModel
    true_experts: int
    well_specified: bool
    loss: str
    paper: int
    noise: float
    method: str
    seed: int
    sizes: tuple[int, ...]
    repetitions: int
    problems: int
    failed: int
    status: dict[str, int]
    ridge: RidgeSizes
    empty_cells: int
    cpu_seconds: float
    paper_slope: float | None
    series: tuple[LossSeries, ...]
    misfit: float
    sample_size: SamplesNeeded | None
    condition: float | None
    samples: int = 0
    rows: tuple[RateRow, ...] = field(default=(), metadata={"json": False})

    @classmethod
    def from_rows(
        cls, study: Case | RatePlan, rows: Sequence[RateRow], error: float | None = None
    ) -> "RateStudy":
        """Summarise the fits of a plan; `error` asks for the samples that reach it."""
        case = study if isinstance(study, Case) else Case(study)
        plan, model = case.plan, case.plan.model
        counts = {s.name.lower(): sum(row.status == s for row in rows) for s in Status}
        result = cls(
            name=plan.name,
            model=StudiedModel(
                model.gate, model.link, model.expert, model.d, model.n_experts, model.n_parameters
            ),
            true_experts=plan.truth.n_experts,
            well_specified=plan.reference is plan.truth,
            loss=plan.loss,
            paper=plan.paper,
            noise=plan.noise,
            method=plan.method,
            seed=plan.seed,
            sizes=plan.sizes,
            repetitions=plan.repetitions,
            problems=len(rows),
            failed=sum(not Status(row.status).answered for row in rows),
            status={name: count for name, count in counts.items() if count},
            ridge=_ridge_sizes(plan),
            empty_cells=sum(row.empty > 0 for row in rows),
            cpu_seconds=sum((row.seconds for row in rows), 0.0),
            paper_slope=case.paper_slope,
            series=tuple(_loss_series(plan, rows, loss, r) for loss in LOSSES for r in plan.radii),
            misfit=case.misfit,
            sample_size=None,
            condition=case.condition,
            samples=plan.samples,
            rows=tuple(rows),
        )
        return (
            result if error is None else replace(result, sample_size=_samples_needed(result, error))
        )

    def losses(self, loss: str, radius: float | None = None) -> list[Float[Tensor, " _"]]:
        """Return the finite losses at each sample size, from the first start radius by default."""
        require(bool(self.rows), "a study read from a file has no rows: its series has the means")
        first = self.series[0].radius
        return _finite_losses(self.rows, self.sizes, loss, first if radius is None else radius)

    def rate(
        self, loss: str = "quotient", radius: float | None = None, middle: Middle = "mean"
    ) -> PowerLaw:
        """Fit the power law of a loss from one start radius (the first by default)."""
        return fit_rate(*self._determined_losses(loss, radius), self.seed, middle)

    def samples_for(self, error: float) -> SampleSize:
        """Estimate how many samples bring the mean quotient loss to `error`."""
        return sample_size(*self._determined_losses("quotient", None), error, self.seed)

    def _determined_losses(self, loss: str, radius: float | None) -> tuple[list[int], list[Tensor]]:
        """Return the sample sizes of at least the number of parameters, and their losses."""
        ridge_count, p = len(self.ridge.sizes), self.model.parameters
        require(
            len(self.sizes) >= ridge_count + 2,
            f"a slope needs two sample sizes of at least {p}, the number of parameters, got "
            f"{list(self.sizes)}",
        )
        return list(self.sizes[ridge_count:]), self.losses(loss, radius)[ridge_count:]


def _finite_losses(
    rows: Sequence[RateRow], sizes: Sequence[int], loss: str, radius: float
) -> list[Tensor]:
    """Collect the finite losses at each sample size."""
    require(loss in LOSSES, f"loss must be one of {LOSSES}, got {loss!r}")
    losses_by_size: dict[int, list[float]] = {n: [] for n in sizes}
    for row in rows:
        value = getattr(row, loss)
        if row.radius == radius and value is not None:
            losses_by_size[row.n].append(value)
    return [torch.tensor(losses_by_size[n], dtype=torch.float64) for n in sizes]


def _loss_series(plan: RatePlan, rows: Sequence[RateRow], loss: str, radius: float) -> LossSeries:
    """Summarise a loss: its means by sample size, and their power law."""
    losses = zip(plan.sizes, _finite_losses(rows, plan.sizes, loss, radius), strict=True)
    sampled = [(n, values) for n, values in losses if len(values)]
    errors = [mean_estimate(values).standard_error or 0.0 for _, values in sampled]
    fair = [(n, values) for n, values in sampled if n >= plan.model.n_parameters]
    falls = len(fair) >= 2 and all(values.mean() > 0 for _, values in fair)
    return LossSeries(
        loss,
        radius,
        f"r = {radius:g}" + (" √(1000/n)" if plan.shrink else ""),
        tuple(n for n, _ in sampled),
        tuple(values.mean().item() for _, values in sampled),
        tuple(errors),
        fit_rate([n for n, _ in fair], [values for _, values in fair]) if falls else None,
    )


def _ridge_sizes(plan: RatePlan) -> RidgeSizes:
    """Find the sample sizes below the number of parameters, with a warning."""
    p = plan.model.n_parameters
    small_sizes = tuple(n for n in plan.sizes if n < p)
    listed = ", ".join(f"{n:,}" for n in small_sizes)
    warning = (
        f"n = {listed}: fewer samples than the {p} parameters, so a ridge picks one of the many "
        "fits that the data allow; these losses depend on the ridge and no slope counts them"
    )
    return RidgeSizes(small_sizes, warning if small_sizes else "")


def _samples_needed(study: RateStudy, error: float) -> SamplesNeeded:
    """Samples needed for an error, with the interval."""
    estimate = study.samples_for(error)
    n, low, high = (
        x if math.isfinite(x) else None for x in (estimate.n, estimate.low, estimate.high)
    )
    return SamplesNeeded(n, low, high, error, estimate.seen, str(estimate))


def rate_study(
    setting: Case | RatePlan | Setting | MoEModel | str,
    *,
    results: Path | None = None,
    error: float | None = None,
    executor: str = "loky",
    address: str | None = None,
    jobs: int = -1,
    progress: Callable[[int, int], None] | None = None,
    quiet: bool = False,
    **grid: Any,
) -> RateStudy:
    """Study a setting; repetitions already in the file `results` are not fitted again.

    Args:
        setting: a setting or its name, a model (a truth is drawn for it), a case or a plan.
        results: a file of JSON lines to which each block is appended when it is done.
        error: report the sample size that brings the quotient loss to this.
        executor: "loky" for local processes, "dask" for a cluster, "serial" for this process.
        address: of the Dask scheduler.
        jobs: processes at once; -1 for one per core.
        progress: called with the number of samples fitted so far and in all.
        quiet: suppress the warnings about fits that did not converge and too few samples.
        grid: fields of `RatePlan` to set: sizes, repetitions, radii, noise, seed, ...
    """
    case = case_from(setting, **grid)
    plan, store = case.plan, None if results is None else RateStore(results)
    if store is not None:
        store.check()
    rows = _stored_rows(plan, store)
    blocks = plan_blocks(plan, list(rows))
    total = sum(plan.sizes) * len(plan.radii) * plan.repetitions
    fitted_samples = total - sum(block.rows for block in blocks)
    arguments = [(plan, block) for block in blocks]
    for block_rows in run_jobs(fit_block, arguments, executor=executor, address=address, jobs=jobs):
        if store is not None:
            store.add(block_rows)
        rows |= {row.grid_point: row for row in block_rows}
        fitted_samples += sum(row.n for row in block_rows)
        if progress is not None:
            progress(fitted_samples, total)
    study = RateStudy.from_rows(case, [rows[point] for point in sorted(rows)], error)
    if not quiet:
        warn_unconverged(torch.tensor([Status(row.status).answered for row in study.rows]))
        if study.ridge.words:
            warnings.warn(study.ridge.words, FitWarning, stacklevel=2)
    return study


def study_seconds(plan: RatePlan, results: Path | None = None, jobs: int = -1) -> float:
    """Estimate the duration of a study, without repetitions already in `results`."""
    store = None if results is None else RateStore(results)
    blocks = plan_blocks(plan, list(_stored_rows(plan, store)))
    return estimate_seconds(plan, blocks, (os.cpu_count() or 1) if jobs == -1 else jobs)


def _stored_rows(
    plan: RatePlan, store: "RateStore | None"
) -> dict[tuple[int, float, int], RateRow]:
    """Rows of the store that lie on the plan's grid, by their grid point."""
    rows = [] if store is None else store.load(plan.key)
    grid = {(n, r, i) for n in plan.sizes for r in plan.radii for i in range(plan.repetitions)}
    return {row.grid_point: row for row in rows if row.grid_point in grid}


def fit_block(plan: RatePlan, block: RepetitionBlock) -> list[RateRow]:
    """Simulate, fit and compare the repetitions of a block, on one thread."""
    begun = time.process_time()
    with one_thread():
        fitted = fit_repetitions(plan, block)
        loss = plan.loss, plan.paper, plan.power
        raw = voronoi_losses(fitted.params, plan.reference, *loss)
        quotient = quotient_losses(plan.model, fitted.params, plan.reference, *loss)
        family = plan.model.with_experts(plan.reference.n_experts)
        seed = plan.seed + 2**40
        distance = regression_distance(
            plan.model, fitted.params, family, plan.reference, n=POINTS, seed=seed, law=plan.law
        )
        experts = expert_distance(family, fitted.params, plan.reference, seed=seed, law=plan.law)
    seconds = (time.process_time() - begun) / len(block.repetitions)
    return [
        RateRow(
            study=plan.key,
            n=block.n,
            radius=block.radius,
            repetition=repetition,
            status=int(fitted.status[index]),
            iterations=int(fitted.iterations[index]),
            loss=_finite_or_none(fitted.loss[index]),
            raw=_finite_or_none(raw.values[index]),
            quotient=_finite_or_none(quotient.values[index]),
            function=_finite_or_none(distance.value[index]),
            empty=int(quotient.empty[index]),
            seconds=seconds,
            experts=_finite_or_none(experts[index]),
        )
        for index, repetition in enumerate(block.repetitions)
    ]


def fit_repetitions(plan: RatePlan, block: RepetitionBlock) -> FitResult:
    """Simulate and fit the repetitions of a block; keep the best start of each."""
    seeds = block.seeds(plan)
    samples, noise = plan.drawn(block.n)
    sample = plan.source.simulate(plan.truth, samples, seeds, noise=noise, law=plan.law)
    radius = start_radius_at(block.radius, block.n, shrink=plan.shrink)
    starts = near_truth(plan.centre, radius, [seed ^ 1 for seed in seeds], plan.starts)
    steps: dict[str, Any] = {"iterations": plan.iterations} if plan.method == "lm" else {}
    fits = fit(plan.model, sample.x, sample.y, starts, method=plan.method, quiet=True, **steps)
    return fits.best()


def _finite_or_none(value: Tensor) -> float | None:
    """Return the number, or None if it is not finite."""
    number = value.item()
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class RateStore:
    """A file of fitted repetitions, one line of JSON each.

    Lines are appended and synced to disk when their block is done. A killed run loses the block in
    progress and may leave an incomplete line at the end, which the next run removes. A line belongs
    to the plan whose key is its `study`.
    """

    path: Path  # created when the first row is added

    def check(self) -> None:
        """Raise if the path cannot be written to."""
        folder = self.path.absolute().parent
        require(folder.is_dir(), f"cannot keep results in {self.path}: there is no {folder}")
        require(not self.path.is_dir(), f"cannot keep results in {self.path}: it is a folder")
        target = self.path if self.path.exists() else folder
        require(os.access(target, os.W_OK), f"cannot keep results in {target}: it is read-only")

    def load(self, study: str) -> list[RateRow]:
        """Read the rows of a study; a broken last line is ignored, any other raises."""
        lines = self._content().split(b"\n")[:-1]
        rows = []
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(_parse_row(line, f"{self.path}, line {number}"))
            except TraceError:
                if number < len(lines):
                    raise
        return [row for row in rows if row.study == study]

    def add(self, rows: Iterable[RateRow]) -> None:
        """Append rows, after cutting off an unfinished last line."""
        text = "".join(canonical_json(asdict(row)) + "\n" for row in rows).encode()
        with naming_full_disk(self.path), locked_file(self.path) as handle:
            end = self._valid_length()  # now, as another run may have added rows
            os.ftruncate(handle, end)
            os.lseek(handle, end, os.SEEK_SET)
            try:
                _write_synced(handle, text)
            except OSError:
                os.ftruncate(handle, end)  # no half of a line
                raise

    def _content(self) -> bytes:
        """Bytes of the file; none if it is absent, an error if it is too large."""
        if not self.path.exists():
            return b""
        size = self.path.stat().st_size
        require(
            size <= MOST_FILE_BYTES,
            f"{self.path}: {size} bytes, at most {MOST_FILE_BYTES}",
            TraceError,
        )
        return self.path.read_bytes()

    def _valid_length(self) -> int:
        """Bytes up to the end of the last valid line."""
        data = self._content()
        end = data.rfind(b"\n") + 1
        start_of_last_line = data.rfind(b"\n", 0, max(0, end - 1)) + 1
        try:
            _parse_row(data[start_of_last_line:end], str(self.path))
        except TraceError:
            return start_of_last_line
        return end


def _write_synced(handle: int, data: bytes) -> None:
    """Write bytes and wait until they are on disk."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]
    os.fsync(handle)


def _parse_row(line: bytes, name: str) -> RateRow:
    """Parse a line; every field must be there and of its type."""
    value = parse_json(line, name)
    try:
        return from_plain(RateRow, value)
    except TraceError as error:
        raise TraceError(f"{name}: not a row of a rate study: {error}") from error
