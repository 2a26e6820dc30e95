"""The plan of the house, enforced on the syntax trees of its sources.

Every law is one test that names all offenders at once.
"""

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import tieline

SOURCE = Path(tieline.__file__).parent
TESTS = Path(__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

LAYERS = {
    "core": set(),
    "serving": set(),
    "routing": {"core"},
    "trace": {"core"},
    "measure": {"core", "trace"},
    "demo": set(),
    "models": {"core", "measure", "routing", "demo", "trace", "serving"},
    "run": {"core", "trace", "routing", "measure", "models"},
    "engines": {"core", "trace", "models", "run"},
}
MAY_IMPORT = LAYERS | {
    "analysis": {*LAYERS},
    "testing": {*LAYERS, "analysis"},
    "report": {"core"},  # and the types of records, see below
    "cli": {*LAYERS, "analysis", "report"},
    "lab": {*LAYERS, "analysis", "report", "cli"},
}
FREE = {"__init__", "__main__", "_version"}
"""Files beside the rooms: the front door and the version."""

ONLY_IN = {
    "transformers": {"models", "analysis", "lab", "serving"},
    "tokenizers": {"models", "lab"},
    "accelerate": {"lab"},
    "matplotlib": {"report", "lab"},
    "plotly": {"report", "lab"},
    "jinja2": {"report", "lab"},
    "PIL": {"lab"},
    "numba": {"lab"},
    "highspy": {"lab"},
    "sklearn": {"lab"},
    "joblib": {"lab"},
    "dask": {"lab"},
    "distributed": {"lab"},
    "platformdirs": {"core"},
    "typer": {"cli", "lab"},
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
}
LONGEST_FILE, LONGEST_FUNCTION = 700, 40
RANKS_SCORES = {"sort", "argsort", "topk", "kthvalue", "msort"}
SORTS_TOKENS = {"dispatch"}
"""Modules of routing that sort token ids by expert, never the scores of a token."""

ONE_MEANING = {"records", "rates", "slices", "files", "statistics", "errors"}
"""Names of modules that once stood in several rooms and meant something else in each."""

NOT_ABOUT_A_MODULE = {
    "benchmarks": "scripts that measure",
    "device": "every room on a pretended accelerator",
    "docs": "blocks of the documentation",
    "examples": "scripts that show the package",
    "tools": "scripts beside the package",
}


ABOUT_A_ROOM = {"analysis/test_one_advice.py", "run/test_law.py"}
"""Tests of what a room promises as a whole."""


@cache
def tree(path):
    return ast.parse(path.read_text())


def relative_path(path):
    return str(path.relative_to(SOURCE))


def room(path):
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def module_name(path):
    components = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(components).removesuffix(".__init__")


def imported(nodes):
    """(module, names) of every import statement among the nodes."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or ""), tuple(x.name for x in node.names)


def functions(path):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return (node for node in ast.walk(tree(path)) if isinstance(node, kinds))


def refuse(offenders):
    problems = sorted(set(offenders))
    assert not problems, "\n" + "\n".join(problems)


def is_record_type(module, names):
    """Whether an import takes classes only, as the report does of results."""
    return module.count(".") >= 2 and bool(names) and all(name[0].isupper() for name in names)


def test_rooms_import_only_what_the_plan_allows():
    def forbidden(path, module, names):
        top, *rest = module.split(".")
        here = room(path)
        if module.startswith("."):
            return "is relative"
        if top in ONLY_IN and here not in ONLY_IN[top] and here not in FREE:
            return f"belongs to {sorted(ONLY_IN[top]) or 'no room'}"
        if top != "tieline" or here in FREE or not rest:
            return (
                None if top != "tieline" or here in FREE | {"cli", "lab"} else "is the front door"
            )
        if rest[0] in MAY_IMPORT[here] | {here, "_version"}:
            return None
        if here == "report" and is_record_type(module, names):
            return None
        return f"is none of {sorted(MAY_IMPORT[here])}"

    refuse(
        f"{relative_path(path)}: {module} {why}"
        for path in FILES
        for module, names in imported(ast.walk(tree(path)))
        if (why := forbidden(path, module, names))
    )


def test_every_room_is_in_the_plan():
    rooms = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name[0] not in "._"}
    refuse(rooms - set(MAY_IMPORT))


def at_import(nodes):
    """Statements that run when a module is imported: not in functions, not for type checkers."""
    for node in nodes:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from at_import(ast.iter_child_nodes(node))


def test_no_module_imports_itself_in_a_circle():
    names = {module_name(path): path for path in FILES}
    needs = {}
    for name, path in names.items():
        imports = imported(at_import(tree(path).body))
        direct = {
            f"{m}.{x}" if f"{m}.{x}" in names else m for m, xs in imports for x in xs or ("",)
        }
        needs[name] = {module for module in direct if module in names} - {name}
    while free := [name for name, imports in needs.items() if not imports & needs.keys()]:
        for name in free:
            del needs[name]
    refuse(f"{name} needs {sorted(imports & needs.keys())}" for name, imports in needs.items())


def test_files_and_functions_keep_their_budget():
    def length(function):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        return body[-1].end_lineno - body[0].lineno + 1 if body else 0

    lines = {path: path.read_text().count("\n") for path in FILES}
    long = [f"{relative_path(p)}: {n} lines" for p, n in lines.items() if n > LONGEST_FILE]
    refuse(
        long
        + [
            f"{relative_path(path)}: {function.name} has {length(function)} lines of code"
            for path in FILES
            for function in functions(path)
            if length(function) > LONGEST_FUNCTION
        ]
    )


def test_nothing_is_left_to_do():
    marks = ("TO" + "DO", "FIX" + "ME")
    refuse(f"{relative_path(p)}: {mark}" for p in FILES for mark in marks if mark in p.read_text())


def calls(path):
    return (node for node in ast.walk(tree(path)) if isinstance(node, ast.Call))


def test_only_the_command_line_prints():
    refuse(
        f"{relative_path(path)}:{call.lineno}"
        for path in FILES
        for call in calls(path)
        if getattr(call.func, "id", "") == "print" and not {"cli", "commands.py"} & {*path.parts}
    )


def test_only_ranking_ranks_scores():
    refuse(
        f"{relative_path(path)}:{call.lineno}: {call.func.attr}"
        for path in FILES
        if room(path) == "routing" and path.stem not in SORTS_TOKENS
        for call in calls(path)
        if isinstance(call.func, ast.Attribute) and call.func.attr in RANKS_SCORES
    )


def bound(nodes):
    """Names that statements at the top of a module bind, imports for type checkers included."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        else:
            yield from bound(ast.iter_child_nodes(node))


def promised(path):
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)]
    return []


def test_every_name_that_a_module_promises_is_there():
    refuse(
        f"{relative_path(path)}: {name}"
        for path in FILES
        for name in {*promised(path)} - {*bound(tree(path).body)}
    )
    refuse(name for name in tieline.__all__ if not hasattr(tieline, name))


def test_no_module_name_has_two_meanings():
    stems = Counter(path.stem for path in FILES if path.stem in ONE_MEANING)
    drawn = {path.stem for path in FILES if "report" in path.parts}
    refuse(name for name, count in stems.items() if count - (name in drawn) > 1)


def test_tests_mirror_the_sources():
    def is_known(path):
        *rooms, name = path.relative_to(TESTS).parts
        name = name.removeprefix("test_").removesuffix(".py")
        source = SOURCE.joinpath(*rooms)
        one_file = source.with_suffix(".py").is_file()  # whose tests fill a folder
        return one_file or (source / f"{name}.py").is_file() or (source / name).is_dir()

    entries = [
        path
        for folder in sorted([*TESTS.iterdir(), *(TESTS / "lab").iterdir()])
        if folder.is_dir() and folder.name not in {*NOT_ABOUT_A_MODULE, "__pycache__", "lab"}
        for path in folder.iterdir()
        if path.name.startswith("test_") or (path.is_dir() and any(path.glob("test_*.py")))
    ]
    names = {str(path.relative_to(TESTS)) for path in entries if not is_known(path)}
    refuse(names - ABOUT_A_ROOM)


def test_the_names_that_others_rely_on_are_public():
    for name in ("MoE", "SmoothTopK", "TopK", "moe", "stable_topk"):
        assert name in tieline.__all__
    assert list(tieline.__all__) == sorted(tieline.__all__)


def test_importing_the_package_loads_no_heavy_library_and_changes_no_setting():
    code = (
        "import sys, tieline;"
        "heavy = {'torch', 'transformers', 'matplotlib', 'plotly', 'pandas', 'scipy', 'numpy'};"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules);"
        "import torch; before = (torch.get_default_dtype(), torch.get_num_threads());"
        "tieline.MoE;"
        "assert before == (torch.get_default_dtype(), torch.get_num_threads());"
        "assert not {'transformers', 'matplotlib', 'plotly', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
