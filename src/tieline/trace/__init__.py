"""Routing traces: what a model's routers saw and chose, as frozen records."""

from tieline.trace.builder import SummaryBuilder, summarise
from tieline.trace.ops import concatenate, select_documents, select_layers, select_tokens
from tieline.trace.readers import import_routed_experts, import_table, import_trace
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace, unanswered
from tieline.trace.store import (
    folder_kind,
    load_summary,
    load_trace,
    merge_folders,
    save_summary,
    save_trace,
)
from tieline.trace.summary import LayerSummary, RoutingSummary, merge

__all__ = [
    "LayerFacts",
    "LayerSummary",
    "LayerTrace",
    "RoutingSummary",
    "RoutingTrace",
    "SummaryBuilder",
    "concatenate",
    "folder_kind",
    "import_routed_experts",
    "import_table",
    "import_trace",
    "load_summary",
    "load_trace",
    "merge",
    "merge_folders",
    "save_summary",
    "save_trace",
    "select_documents",
    "select_layers",
    "select_tokens",
    "summarise",
    "unanswered",
]
