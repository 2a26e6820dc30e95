"""Training of routed models: recipes, tasks, data and the engine."""

from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from tieline.core.setting_fields import takes_settings
from tieline.lab.command_settings import TrainOptions, TrainSettings

if TYPE_CHECKING:
    from tieline.lab.training.config import TrainConfig
    from tieline.lab.training.training_run import Report, TrainingResult

__all__ = ["train"]


@takes_settings(TrainSettings)
def train(
    recipe: "str | TrainConfig",
    out: Path | None = None,
    *,
    settings: TrainSettings | None = None,
    progress: "Report | None" = None,
    **options: Unpack[TrainOptions],
) -> "TrainingResult | None":
    """Train a model by a recipe and score it; under torchrun, on all its processes together.

    Args:
        recipe: name of a recipe, or a complete configuration, which has its own seed.
        out: folder of the run; by default runs/RECIPE-SEED.
        settings: the options; keyword arguments change single ones.
        progress: called with stage, done and total.

    Returns:
        The result; None on all processes but the first.
    """
    from tieline.core.collectives import is_parallel
    from tieline.lab.training.recipes import with_cooling
    from tieline.lab.training.training_run import run_parallel, run_training

    settings = TrainSettings.of(settings, options)
    config = with_cooling(recipe, settings)
    folder = out or Path("runs") / f"{config.recipe}-{config.seed}"
    start = run_parallel if is_parallel() else run_training
    return start(config, folder, resume=settings.resume, progress=progress)
