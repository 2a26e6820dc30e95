"""How a model routes while it trains: paper 1, Figures 4 to 7.

    K_l(t)        experts in use per token in layer l after t steps
    ε_l(t)        width of the band of a smooth gate
    K_l(ε, t)     experts within ε of the threshold z_[k] (Figures 6, 7)

All on the same windows, spread over the text that the model trains on, so that a course shows the
model change and not the batches.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.errors import require
from tieline.geometry.order import near_counts
from tieline.routing.collect import LayerRouting, collect_routing
from tieline.routing.smooth import SmoothTopK
from tieline.studies.claim import Real
from tieline.training.catalogue import TASKS  # every task and recipe becomes known
from tieline.training.config import DecoderConfig, TrainConfig
from tieline.training.engine import run
from tieline.training.streams import load_streams

__all__ = ["RoutingCourse", "routing_course"]


@dataclass(frozen=True, eq=False)
class RoutingCourse:
    """The routing of every layer at some steps of a run.

    Attributes:
        steps: steps done when the model was looked at.
        experts: K, mean over tokens.
        epsilon: width of the band, NaN where a gate has none.
        near: mean number of experts within each tolerance of the threshold.
        losses: task loss of the logged steps.
        held_out: K on held-out text when the run is over, mean over layers.
    """

    steps: Int[Tensor, " looks"]
    experts: Float[Tensor, "looks layers"]
    epsilon: Float[Tensor, "looks layers"]
    near: Float[Tensor, "looks layers tolerances"]
    losses: tuple[float, ...]
    held_out: float

    def between(self, first: Real, last: Real) -> slice:
        """The looks from share `first` to share `last` of the run."""
        end = int(self.steps[-1])
        kept = ((self.steps > first * end) & (self.steps <= last * end)).nonzero().flatten()
        require(len(kept) > 0, f"no look between {first} and {last} of {end} steps")
        return slice(int(kept[0]), int(kept[-1]) + 1)


def routing_course(
    config: TrainConfig, every: int, windows: int = 64, tolerances: Sequence[float] = ()
) -> RoutingCourse:
    """Train what `config` says, in a folder that is thrown away, and look every n steps.

    Args:
        config: a run of the task "language".
        every: steps between two looks; the last step is one.
        windows: windows of the text that are looked at.
        tolerances: ε of `near`.
    """
    require(config.task in TASKS and isinstance(config.model, DecoderConfig), "needs a decoder")
    assert isinstance(config.model, DecoderConfig)
    context, text = config.model.context, load_streams(config.data).train
    whole = text[: len(text) // context * context].view(-1, context)
    rows = whole[:: max(1, len(whole) // windows)][:windows].long()
    looks: list[tuple[int, Tensor]] = []

    def watch(model: nn.Module, step: int) -> None:
        if step % every == 0 or step == config.optim.steps:
            looks.append((step, _look(model, rows, tolerances)))

    with tempfile.TemporaryDirectory() as folder:
        done = run(config, Path(folder) / "run", watch=watch)
    steps, found = zip(*looks, strict=True)
    table = torch.stack(found)
    return RoutingCourse(
        steps=torch.tensor(steps),
        experts=table[..., 0],
        epsilon=table[..., 1],
        near=table[..., 2:],
        losses=tuple(entry["task_loss"] for entry in done.history if "task_loss" in entry),
        held_out=done.scores["validation"]["experts_per_token"],
    )


@torch.no_grad()
def _look(model: nn.Module, rows: Tensor, tolerances: Sequence[float]) -> Tensor:
    """K, ε and the numbers of near experts of every layer, as rows."""
    training = model.training
    model.eval()
    with collect_routing(model) as records:
        model(input_ids=rows)
    model.train(training)
    return torch.stack([_numbers(record, tolerances) for record in records])


def _numbers(record: LayerRouting, tolerances: Sequence[float]) -> Tensor:
    gate, scores = record.layer.gate, record.routing.scores.flatten(0, -2)
    used = record.routing.active.double().mean()
    width = gate.epsilon.double() if isinstance(gate, SmoothTopK) else torch.tensor(math.nan)
    near = near_counts(scores, getattr(gate, "k", 1), tolerances).double().mean(dim=0)
    return torch.cat([torch.stack([used, width.to(used)]), near])
