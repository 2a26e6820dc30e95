"""Training over several processes: experts spread over ranks, the rest cut by FSDP2."""

from tieline.core.processes import (
    LostRankError,
    is_parallel,
    join_processes,
    naming_lost_ranks,
)
from tieline.lab.training.parallel.experts import (
    SpreadExperts,
    all_to_all,
    parallelize_,
    spread_dispatch,
)
from tieline.lab.training.parallel.gradients import (
    batch_counts,
    clip_gradients_,
    finish_gradients_,
    gradient_norm,
    summed,
)
from tieline.lab.training.parallel.grid import rank_mesh

__all__ = [
    "LostRankError",
    "SpreadExperts",
    "all_to_all",
    "batch_counts",
    "clip_gradients_",
    "finish_gradients_",
    "gradient_norm",
    "is_parallel",
    "join_processes",
    "naming_lost_ranks",
    "parallelize_",
    "rank_mesh",
    "spread_dispatch",
    "summed",
]
