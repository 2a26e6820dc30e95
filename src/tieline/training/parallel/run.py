"""Running a recipe on several processes: `torchrun --nproc-per-node 2 -m tieline train RECIPE`.

The loop is written out instead of handed to transformers' Trainer. The Trainer would wrap the model
by accelerate, whose FSDP averages gradients over ranks and knows one mesh, where experts need two
and uneven shares need sums. Everything else is the Trainer path's own: data order, micro-batches,
parameter groups, schedules, auxiliary losses, files. So losses agree to rounding, and a run may be
stopped on one kind and resumed on the other.
"""

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tieline.training.checkpoint import read_json, write_json
from tieline.training.config import TrainConfig
from tieline.training.engine import Report, TrainResult, prepare_folder
from tieline.training.parallel.agree import first_rank, is_first
from tieline.training.parallel.checkpoint import whole_model
from tieline.training.parallel.processes import join_processes, naming_lost_ranks
from tieline.training.parallel.steps import RankRun, grid_columns
from tieline.training.tasks import task_of

__all__ = ["run_on_ranks", "run_parallel"]

RESUME = "start again with --resume to go on from the newest checkpoint"


def run_parallel(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Report | None = None,
    expert_ranks: int | None = None,
    timeout: float = 600.0,
) -> TrainResult | None:
    """`engine.run` on the processes that torchrun started; the result is that of rank 0.

    Args:
        config: a whole run, from a recipe.
        out: a new folder that all processes see; with `resume`, that of the same run, whatever
            number of processes it ran on.
        resume: go on from the newest complete checkpoint, from the start if there is none.
        progress: told the stages, on rank 0.
        expert_ranks: ranks that share the experts of a layer; see `default_expert_ranks`.
        timeout: seconds after which a rank that does not answer counts as lost.
    """
    with join_processes(timeout=timeout):
        return run_on_ranks(
            config,
            out,
            resume=resume,
            progress=progress,
            expert_ranks=expert_ranks,
            timeout=timeout,
        )


def run_on_ranks(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    progress: Report | None = None,
    expert_ranks: int | None = None,
    timeout: float = 600.0,
) -> TrainResult | None:
    """`run_parallel` where the processes have met already."""
    tell = progress if progress is not None and is_first() else lambda stage, done, of: None
    with naming_lost_ranks(RESUME):
        found = first_rank(lambda: _prepared(config, out, resume, expert_ranks))
        if found["done"]:
            return TrainResult(**read_json(out / "result.json")) if is_first() else None
        run = RankRun(config, out, Path(found["checkpoint"]) if found["checkpoint"] else None)
        tell("data", 0, 1)
        run.prepare(expert_ranks, timeout)
    began, worked = time.perf_counter(), time.process_time()
    with _quiet_views():
        for step in range(run.start, config.optim.steps):
            with naming_lost_ranks(f"in step {step + 1}; {RESUME}"):
                run.step(step)
            tell("train", step + 1, config.optim.steps)
        with naming_lost_ranks("while gathering the trained model"):
            model = whole_model(run.model, run.fresh)
    times = time.perf_counter() - began, time.process_time() - worked
    tell("score", 0, 1)
    # the others need not wait for the scores: a timeout would be theirs
    return None if model is None else run.finish(model.eval(), *times)


def _prepared(
    config: TrainConfig, out: Path, resume: bool, expert_ranks: int | None
) -> dict[str, Any]:
    """Fetch the data and make the folder, so that the other ranks find both; after all refusals."""
    checkpoint = prepare_folder(config, out, resume)
    done = resume and (out / "result.json").is_file()
    if not done:
        task = task_of(config)
        grid_columns(config, task.model(config), expert_ranks)
        task.data(config)
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "config.json", config.to_dict())
    return {"checkpoint": str(checkpoint) if checkpoint else "", "done": done}


@contextmanager
def _quiet_views() -> Iterator[None]:
    """FSDP warns that outputs are views, which matters to in-place changes; there are none."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*returned a view tensor")
        yield
