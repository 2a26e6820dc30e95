"""Training over several processes: experts spread over ranks, all other weights cut by FSDP2."""

from tieline.lab.training.parallel.experts import (
    SpreadExperts,
    all_to_all,
    parallelize_,
    rank_mesh,
    spread_dispatch,
)
from tieline.lab.training.parallel.gradients import (
    batch_counts,
    clip_gradients_,
    finish_gradients_,
    gradient_norm,
    summed,
)

__all__ = [
    "SpreadExperts",
    "all_to_all",
    "batch_counts",
    "clip_gradients_",
    "finish_gradients_",
    "gradient_norm",
    "parallelize_",
    "rank_mesh",
    "spread_dispatch",
    "summed",
]
