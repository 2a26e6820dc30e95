"""Routing traces: what a model's routers saw and chose, as frozen records."""

from tieline.trace.builder import SummaryBuilder, summarise
from tieline.trace.importers import import_routed_experts, import_table, import_trace
from tieline.trace.layer_summary import LayerSummary
from tieline.trace.limits import unanswered
from tieline.trace.merging import folder_kind, merge_folders
from tieline.trace.ops import concatenate, select_documents, select_layers, select_tokens
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace
from tieline.trace.store import load_trace, save_trace
from tieline.trace.summary import RoutingSummary, merge
from tieline.trace.summary_store import load_summary, save_summary

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
