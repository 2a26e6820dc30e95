"""Plug-ins: what a package adds to Tieline, declared as data and imported when it is used.

A plug-in is a module with a record `PLUGIN`, named by an entry point of the group
"tieline.plugins" in the metadata of an installed package:

    [project.entry-points."tieline.plugins"]
    lab = "tieline.lab.plugin"

The tables of the instrument are the first plug-in, the laboratory is the second. A plug-in that
does not import is left out with one line on stderr; everything else keeps working.

`import tieline` loads neither torch nor transformers. What it adds to them it adds when the program
imports them itself, or at once if it already has.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Literal, NamedTuple

GROUP = "tieline.plugins"
"""The group of entry points that plug-ins are found by."""

Added = Literal["families", "readers", "engines"]


class ResultFormat(NamedTuple):
    """Where a result comes from and how it is shown.

    Attributes:
        record: "module:Class" of the record.
        drawing: "module" or "module:object" with the functions `page`, `figures`, `terminal`,
            `summary` and `notebook`.
    """

    record: str
    drawing: str


@dataclass(frozen=True)
class Plugin:
    """What one package adds. Every value names modules, so that reading it imports none of them.

    Attributes:
        commands: modules by heading of the help and name of the command. Importing the module adds
            the command to `tieline.cli.app.app`.
        results: formats of the results in JSON files, by name.
        restorers: modules by name of a change; importing the module calls
            `tieline.models.saved_models.register_restorer`.
        families: modules whose import calls `tieline.models.register_family`.
        readers: modules whose import calls `tieline.trace.readers.register_reader`.
        engines: modules whose import calls `tieline.engines.engine_registry.register_engine`.
    """

    commands: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    results: Mapping[str, ResultFormat] = field(default_factory=dict)
    restorers: Mapping[str, str] = field(default_factory=dict)
    families: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    engines: tuple[str, ...] = ()


class Command(NamedTuple):
    """A command: its name, the module that adds it, and the plug-in that names the module."""

    name: str
    module: str
    plugin: str


INSTRUMENT = Plugin(
    commands={
        "Look": dict.fromkeys(
            ("inspect", "diff", "audit", "check", "serve-check"), "tieline.cli.commands"
        ),
        "Repair": {"smooth": "tieline.cli.commands"},
        "Files": dict.fromkeys(("capture", "convert", "merge"), "tieline.cli.commands"),
    },
    results={
        "tieline-inspection": ResultFormat(
            "tieline.analysis.inspect_records:Inspection", "tieline.report.inspect"
        ),
        "tieline-diff": ResultFormat(
            "tieline.analysis.diff_records:RoutingDiff", "tieline.report.diff"
        ),
        "tieline-audit": ResultFormat(
            "tieline.analysis.audit_records:PrecisionAudit", "tieline.report.audit"
        ),
        "tieline-smooth": ResultFormat(
            "tieline.analysis.smooth_repair:Repair", "tieline.report.smooth"
        ),
        "tieline-merge": ResultFormat(
            "tieline.analysis.route_files:Merged", "tieline.report.route_files:MERGED"
        ),
        "tieline-conversion": ResultFormat(
            "tieline.analysis.route_files:Converted", "tieline.report.route_files:CONVERTED"
        ),
        "tieline-capture": ResultFormat(
            "tieline.engines.engine_capture:EngineCapture", "tieline.report.route_files:CAPTURED"
        ),
        "tieline-engines": ResultFormat(
            "tieline.engines.engine_registry:EngineList", "tieline.report.route_files:ENGINES"
        ),
        "tieline-check": ResultFormat("tieline.analysis.check:RouteCheck", "tieline.report.check"),
        "tieline-serve-check": ResultFormat(
            "tieline.analysis.serve_check:ServeCheck", "tieline.report.serve_check"
        ),
    },
    restorers={"smooth": "tieline.models.smoothed_model"},
)
"""What Tieline itself has."""


@functools.cache
def plugins() -> dict[str, Plugin]:
    """Every plug-in by the name of its entry point; the instrument comes first."""
    loaded = {"tieline": INSTRUMENT}
    for point in sorted(entry_points(group=GROUP)):
        try:
            plugin = import_module(point.value).PLUGIN
        except Exception as problem:
            _report_left_out(f"plug-in {point.name!r} ({point.value})", problem)
            continue
        loaded[point.name] = plugin
    return loaded


def command_groups() -> dict[str, list[Command]]:
    """Commands by heading of the help, in the order in which plug-ins name them."""
    groups: dict[str, list[Command]] = {}
    for owner, plugin in plugins().items():
        for heading, commands in plugin.commands.items():
            added = [Command(name, module, owner) for name, module in commands.items()]
            groups.setdefault(heading, []).extend(added)
    return groups


def import_command(command: Command) -> None:
    """Add a command to the application; one of a plug-in that does not import is left out."""
    if command.plugin == "tieline":
        import_module(command.module)
    else:
        _import_or_leave_out(
            command.module, f"command {command.name!r} of plug-in {command.plugin!r}"
        )


def result_formats() -> dict[str, ResultFormat]:
    """Record and drawing module of every result by the name of its format."""
    return {name: entry for plugin in plugins().values() for name, entry in plugin.results.items()}


def restorer_module(change: str) -> str | None:
    """The module that registers how a change of a model is restored; None for an unknown one."""
    modules = (plugin.restorers.get(change) for plugin in plugins().values())
    return next((module for module in modules if module is not None), None)


@functools.cache
def import_added(kind: Added) -> None:
    """Import the modules by which plug-ins add families, readers or engines, once."""
    for owner, plugin in plugins().items():
        for module in getattr(plugin, kind):
            _import_or_leave_out(module, f"{module} of plug-in {owner!r}")


def _import_or_leave_out(module: str, what: str) -> ModuleType | None:
    """Import a module of a plug-in; report one that does not import."""
    try:
        return import_module(module)
    except Exception as problem:
        _report_left_out(what, problem)
        return None


def _report_left_out(what: str, problem: Exception) -> None:
    """Say on stderr that a part of a plug-in is left out, and why."""
    reason = f"{type(problem).__name__}: {problem}".splitlines()[0]
    sys.stderr.write(f"tieline: {what} does not import and is left out: {reason}\n")


def when_imported(name: str, function: Callable[[], object]) -> None:
    """Call `function` after the module `name` has been imported; at once if it already has."""
    if name in sys.modules:
        function()
    else:
        sys.meta_path.insert(0, _ImportWatcher(name, function))


class _ImportWatcher(MetaPathFinder):
    """Finds one module as everybody else would, and calls a function after it has run."""

    def __init__(self, name: str, function: Callable[[], object]) -> None:
        self.name, self.function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, whose loader calls the function."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_then_call(module: ModuleType) -> None:
                run_module(module)
                self.function()

            spec.loader.exec_module = run_then_call
        return spec
