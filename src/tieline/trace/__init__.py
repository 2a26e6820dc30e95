"""Routing traces: what a model's routers saw and chose, as frozen records."""

from tieline.trace.readers import (
    imatrix_load,
    import_table,
    import_trace,
    read_routes,
)
from tieline.trace.record import LayerFacts, LayerTrace, RoutingTrace, questions_without_data
from tieline.trace.selection import (
    concatenate,
    select_documents,
    select_layers,
    select_tokens,
)
from tieline.trace.store import (
    folder_kind,
    load_summary,
    load_trace,
    merge_folders,
    save_summary,
    save_trace,
)
from tieline.trace.summary import (
    LayerSummary,
    RoutingSummary,
    SummaryBuilder,
    merge_summaries,
    summarise,
)
from tieline.trace.writers import export, padded_batch, replay_list

__all__ = [
    "LayerFacts",
    "LayerSummary",
    "LayerTrace",
    "RoutingSummary",
    "RoutingTrace",
    "SummaryBuilder",
    "concatenate",
    "export",
    "folder_kind",
    "imatrix_load",
    "import_table",
    "import_trace",
    "load_summary",
    "load_trace",
    "merge_folders",
    "merge_summaries",
    "padded_batch",
    "questions_without_data",
    "read_routes",
    "replay_list",
    "save_summary",
    "save_trace",
    "select_documents",
    "select_layers",
    "select_tokens",
    "summarise",
]
