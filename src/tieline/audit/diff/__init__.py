"""Comparing two runs: do they route alike and, if not, why."""

from tieline.audit.diff.align import Aligned, align
from tieline.audit.diff.compare import diff
from tieline.audit.diff.models import ModelsCompared, Side, diff_models, sequences_of, trace_model
from tieline.audit.diff.records import (
    Alignment,
    Attribution,
    DepthStep,
    LayerDiff,
    LayerPair,
    LogitsDiff,
    Rate,
    RoutingDiff,
    TokenDiff,
    WeightMoved,
)

__all__ = [
    "Aligned",
    "Alignment",
    "Attribution",
    "DepthStep",
    "LayerDiff",
    "LayerPair",
    "LogitsDiff",
    "ModelsCompared",
    "Rate",
    "RoutingDiff",
    "Side",
    "TokenDiff",
    "WeightMoved",
    "align",
    "diff",
    "diff_models",
    "sequences_of",
    "trace_model",
]
