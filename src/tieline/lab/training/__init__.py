"""Training of routed models: recipes, tasks, data, the engine and its parallel form."""

from pathlib import Path
from typing import TYPE_CHECKING

from tieline.core.errors import require

if TYPE_CHECKING:
    from tieline.lab.training.config import TrainConfig
    from tieline.lab.training.engine import Report, TrainingResult

__all__ = ["train"]


def train(
    recipe: "str | TrainConfig",
    out: Path | None = None,
    *,
    seed: int = 0,
    resume: bool = False,
    expert_ranks: int | None = None,
    progress: "Report | None" = None,
) -> "TrainingResult | None":
    """Train a model by a recipe and score it; under torchrun, on all its processes together.

    Args:
        recipe: name of a recipe, or a whole configuration.
        out: folder of the run; by default runs/RECIPE-SEED.
        seed: of a recipe that is given by name.
        resume: continue from the newest checkpoint of the folder.
        expert_ranks: processes that share the experts of a layer; only under torchrun.
        progress: called with each stage, how much of it is done, and of how much.

    Returns:
        The result; None on all processes but the first.
    """
    from tieline.core.processes import is_parallel
    from tieline.lab.training.engine import run
    from tieline.lab.training.parallel.run import run_parallel
    from tieline.lab.training.recipes import recipe_config

    config = recipe_config(recipe, seed) if isinstance(recipe, str) else recipe
    folder = out or Path("runs") / f"{config.recipe}-{config.seed}"
    if is_parallel():
        return run_parallel(
            config, folder, expert_ranks=expert_ranks, resume=resume, progress=progress
        )
    alone = expert_ranks in (None, 1)
    require(alone, "--expert-ranks needs processes: start with torchrun")
    return run(config, folder, resume=resume, progress=progress)
