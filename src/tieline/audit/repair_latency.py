"""What smoothing costs in time: both models take turns, process CPU time counts."""

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from tieline.audit.running import forward, only_running
from tieline.errors import require

__all__ = ["Latency", "smoothing_latency"]

RESAMPLES = 1000


@dataclass(frozen=True)
class Latency:
    """Time of a smoothed model over that of the original.

    Attributes:
        ratio: of the medians over all rounds.
        low: lower end of its 95 % interval, from resampling rounds.
        high: upper end.
        rounds: how often both ran.
        tokens: tokens per run.
        original: which implementation of the experts the original ran with.
        implementation: which one the smoothed model ran with.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    tokens: int
    original: str
    implementation: str


def smoothing_latency(
    model: nn.Module,
    smoothed: nn.Module,
    ids: Int[Tensor, "rows length"],
    rounds: int = 12,
    warmup: int = 2,
) -> Latency:
    """Time of a forward pass of both models, in turns, each first in every other round.

    Args:
        model: the original.
        smoothed: the same, smoothed.
        ids: tokens of a pass.
        rounds: how often to run both.
        warmup: rounds before that.
    """
    require(rounds >= 2 and warmup >= 0, f"need two rounds at least, got {rounds=}, {warmup=}")
    times = torch.zeros(2, warmup + rounds, dtype=torch.float64)
    with only_running(model), only_running(smoothed):
        for turn in range(warmup + rounds):
            for place in (0, 1) if turn % 2 else (1, 0):
                start = time.process_time()
                forward((model, smoothed)[place], ids)
                times[place, turn] = time.process_time() - start
    ratio, low, high = _ratio(times[:, warmup:])
    names = _implementation(model), _implementation(smoothed)
    return Latency(ratio, low, high, rounds, ids.numel(), *names)


def _ratio(times: Float[Tensor, "2 rounds"]) -> tuple[float, float, float]:
    """Second row over first, of the medians, with the ends of its 95 % interval."""
    generator = torch.Generator().manual_seed(0)
    rounds = times.shape[1]
    drawn = torch.randint(rounds, (RESAMPLES, rounds), generator=generator)
    before, after = times[0][drawn].median(dim=1).values, times[1][drawn].median(dim=1).values
    spread = (after / before.clamp(min=1e-9)).quantile(torch.tensor([0.025, 0.975]).double())
    ratio = (times[1].median() / times[0].median().clamp(min=1e-9)).item()
    low, high = spread.tolist()
    return ratio, low, high


def _implementation(model: nn.Module) -> str:
    config = getattr(model, "config", None)
    return str(getattr(config, "_experts_implementation", None) or "eager")
