"""Inference engines, each in an environment of its own behind a worker process.

capture               the routing of a model in an engine, as a trace
run_engine            the same with final log-probabilities and the facts of the worker
dequantised_weights   the weights of a quantised model in float32
ENGINES               the engines by name; `register_engine` adds one
installed_engine      an engine with its Python and versions; `list_engines` returns all
RouteServer           a running server that returns routes over HTTP
"""

from tieline.core.plugins import import_added
from tieline.engines.engine_capture import EngineCapture, capture
from tieline.engines.engine_registry import (
    ENGINES,
    Engine,
    EngineEntry,
    EngineList,
    engine_named,
    find_python,
    installed_engine,
    list_engines,
    register_engine,
)
from tieline.engines.engine_run import (
    EngineError,
    EngineRun,
    RunOptions,
    dequantised_weights,
    run_engine,
)
from tieline.engines.server_client import ServerError
from tieline.engines.server_routes import RouteServer, ServerSource

__all__ = [
    "ENGINES",
    "Engine",
    "EngineCapture",
    "EngineEntry",
    "EngineError",
    "EngineList",
    "EngineRun",
    "RouteServer",
    "RunOptions",
    "ServerError",
    "ServerSource",
    "capture",
    "dequantised_weights",
    "engine_named",
    "find_python",
    "installed_engine",
    "list_engines",
    "register_engine",
    "run_engine",
]

import_added("engines")
