"""The numbers of a rollout in a logger: they are a flat dictionary of floats, taken as it is.

python examples/rollout_loggers.py [trainer|tensorboard|wandb|trackio|mlflow] [folder]

No logger is a dependency: install the one that you name. Everything stays on this machine, in the
folder; Weights & Biases runs offline.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tieline
from tieline.models.demo import load_demo_model
from tieline.models.emulate import emulate

model: Any = load_demo_model()


def rollout_scalars(step: int) -> dict[str, float]:
    """Compare a rollout in emulated bfloat16 with the live model."""
    ids = torch.randint(3, 500, (4, 32), generator=torch.Generator().manual_seed(step))
    with torch.no_grad(), emulate(model, "bf16", "all"), tieline.capture(model) as recorder:
        model(input_ids=ids)
    mismatch = tieline.RolloutMismatch(model)
    with mismatch.watch(recorder.trace()):
        model(input_ids=ids, labels=ids)
    return mismatch.step()


def log_with_trainer(folder: Path) -> None:
    """`Trainer.log`: to all loggers of `report_to`."""
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(folder), report_to=[], use_cpu=True, disable_tqdm=True)
    trainer = Trainer(model, arguments)
    for step in range(3):
        trainer.log(rollout_scalars(step))


def log_with_tensorboard(folder: Path) -> None:
    """TensorBoard takes one number at a time: `tensorboard --logdir FOLDER`."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for step in range(3):
            for name, value in rollout_scalars(step).items():
                writer.add_scalar(name, value, step)


def log_with_wandb(folder: Path) -> None:
    """Weights & Biases, offline: `wandb sync FOLDER/wandb/offline-run-*`."""
    import wandb  # pyright: ignore[reportMissingImports]

    with wandb.init(project="rollouts", dir=folder, mode="offline") as run:
        for step in range(3):
            run.log(rollout_scalars(step), step=step)


def log_with_trackio(folder: Path) -> None:
    """Trackio: `TRACKIO_DIR=FOLDER trackio show`."""
    os.environ["TRACKIO_DIR"] = str(folder)
    import trackio  # pyright: ignore[reportMissingImports]

    trackio.init(project="rollouts")
    for step in range(3):
        trackio.log(rollout_scalars(step), step=step)
    trackio.finish()


def log_with_mlflow(folder: Path) -> None:
    """MLflow: `mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db`."""
    import mlflow  # pyright: ignore[reportMissingImports]

    folder.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{folder.resolve() / 'mlflow.db'}")
    with mlflow.start_run():
        for step in range(3):
            mlflow.log_metrics(rollout_scalars(step), step=step)


LOGGERS: dict[str, Callable[[Path], None]] = {
    "trainer": log_with_trainer,
    "tensorboard": log_with_tensorboard,
    "wandb": log_with_wandb,
    "trackio": log_with_trackio,
    "mlflow": log_with_mlflow,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logger", nargs="?", choices=list(LOGGERS), default="trainer")
    parser.add_argument("folder", nargs="?", type=Path)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp())
    LOGGERS[options.logger](folder)
    print(f"three steps are logged by {options.logger} in {folder}")
