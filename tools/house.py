"""Measure the house: its two wings, sizes, parameters, run loops, names, and the way of a command.

    python tools/house.py                       # measures of this checkout
    python tools/house.py --root ../other       # the same of another checkout, for a comparison
    python tools/house.py --walk                # and the way of the main commands through the files
    python tools/house.py --list "riddle names" # every offender behind a measure
    python tools/house.py --json house.json

Everything but the walk is read from the syntax trees; nothing of the checkout is imported. The way
of a command runs it once, in its own process on few tokens, and counts the first visit of each
function of the package in order; a change is two neighbours in that order that stand in different
files.

    parameters      without self; `**options` counts as the fields of the class that it is handed
                    to, and as nothing where it is typed `Unpack[...]`
    run loop        a function outside run/ and lab/ that calls a model's forward; `MAY_RUN` lists
                    what may (timing, gradients)
    family switch   a comparison with the name of a family outside the table of families
    riddle name     a binding of a word in `RIDDLES`: variable, argument, field or function
"""

import argparse
import ast
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

LAB_ROOMS = {"lab", "limits", "tropical", "estimation", "training", "papers"}
"""Rooms of the laboratory, also in checkouts from before it had a wing of its own."""

RIDDLES = {"found", "told", "one", "known", "ways", "words", "said"} | {
    "parts",
    "place",
    "places",
    "whole",
    "own",
    "made",
    "seen",
}
"""Names that hide what they hold."""

MANY_PARAMETERS = 10

MAY_RUN = {
    "analysis/remedies.py:_relative_times": "times remedies",
    "analysis/remedies.py:_usable_kernel": "tries the kernel with which remedies are timed",
    "analysis/remedies.py:_in_turns": "times remedies",
    "analysis/smooth_repair.py:smoothing_latency": "times a smoothed model",
    "models/smoothed_model.py:undo": "undoes a change; `model` is a function there",
}
"""Functions outside run/ and lab/ that may call a model, as "file:function", with the reason."""

COMMANDS = {
    "inspect": "inspect --tokens 1024 --html {folder}/inspect.html",
    "diff": "diff demo demo --tokens 1024 --dtype-b bf16-emulated --html {folder}/diff.html",
    "audit": "audit --tokens 1024 --html {folder}/audit.html",
    "smooth": "smooth --tokens 1024 -o {folder}/smoothed",
    "train": "train demo-smoke-smooth1 --out {folder}/run",
    "rates": "rates --gate linear --link softmax --expert tanh --dim 2 --sizes 500,1000"
    " --repetitions 2 --executor serial",
    "reproduce": "reproduce p0-def3.1 --fast --executor serial --results {folder}/results"
    " --html {folder}/ledger.html",
}
"""The commands whose way is measured, with the pages that they write."""


def main() -> None:
    """Print the measures, one line each; write them as JSON if asked to."""
    parser = argparse.ArgumentParser(description="Measure the house.")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="a checkout")
    parser.add_argument("--walk", action="store_true", help="run the commands and follow them")
    parser.add_argument("--list", metavar="MEASURE", help="list the offenders behind a measure")
    parser.add_argument("--json", type=Path, help="write the measures to this file")
    options = parser.parse_args()
    source = options.root / "src" / "tieline"
    if options.list:
        sys.stdout.write("".join(f"{row}\n" for row in offenders(read(source))[options.list]))
        return
    measures = house(source)
    if options.walk:
        measures["walk"] = {name: walk(options.root, line) for name, line in COMMANDS.items()}
    for name, value in measures.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for key, number in rows:
            sys.stdout.write(f"{name} {key}: {number}\n")
    if options.json:
        options.json.write_text(json.dumps(measures, indent=1) + "\n", encoding="utf-8")


def read(source: Path) -> dict[Path, ast.Module]:
    """The syntax trees of a package by path below it."""
    files = sorted(source.rglob("*.py"))
    return {file.relative_to(source): ast.parse(file.read_text("utf-8")) for file in files}


def house(source: Path) -> dict[str, object]:
    """Sizes of wings, files and functions, and the number of offenders against each rule."""
    trees = read(source)
    lengths = {path: (source / path).read_text("utf-8").count("\n") for path in trees}
    return {
        "instrument": wing({path: n for path, n in lengths.items() if not in_lab(path)}),
        "lab": wing({path: n for path, n in lengths.items() if in_lab(path)}),
        "file lines": spread(list(lengths.values())),
        "function lines": spread([n for tree in trees.values() for n in function_lengths(tree)]),
        "modules with one importer": one_importer(source, trees),
        "module functions": sum(len(module_functions(tree)) for tree in trees.values()),
        "module functions used once": used_once(trees),
        "string look-ups in report": sum(
            look_ups(tree) for path, tree in trees.items() if "report" in path.parts
        ),
        **{measure: len(rows) for measure, rows in offenders(trees).items()},
        "files by room": dict(Counter(path.parts[0] for path in trees)),
    }


def wing(lengths: dict[Path, int]) -> dict[str, float]:
    """Files and lines of a wing, with the median and the longest file."""
    sizes = list(lengths.values()) or [0]
    return {
        "files": len(lengths),
        "lines": sum(sizes),
        "median": statistics.median(sizes),
        "longest": max(sizes),
    }


def in_lab(path: Path) -> bool:
    """Whether a file belongs to the laboratory."""
    return path.parts[0] in LAB_ROOMS


Offenders = dict[str, list[str]]


def offenders(trees: dict[Path, ast.Module]) -> Offenders:
    """Every place that breaks a rule of the house, by rule."""
    return {
        "functions with ten parameters": many_parameters(trees, constructors=False),
        "constructors with ten parameters": many_parameters(trees, constructors=True),
        "run loops": run_loops(trees),
        "family switches": family_switches(trees),
        "class names with two meanings": double_classes(trees),
        "lab imports in the instrument": lab_imports(trees),
        "riddle names": riddles(trees),
        "public functions without docstring": undocumented(trees),
    }


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function of a tree, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def many_parameters(trees: dict[Path, ast.Module], constructors: bool) -> list[str]:
    """Functions, or constructors, with ten or more parameters."""
    fields = class_fields(trees)
    counts = {
        (path, node.lineno, node.name): parameters(node, fields)
        for path, tree in trees.items()
        for node in functions(tree)
        if (node.name in {"__init__", "moe", "baseline"}) == constructors
    }
    return [
        f"{path}:{line} {name}: {count}"
        for (path, line, name), count in counts.items()
        if count >= MANY_PARAMETERS
    ]


def class_fields(trees: dict[Path, ast.Module]) -> dict[str, int]:
    """The number of annotated fields of every class, inherited ones included."""
    classes = {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def count(name: str) -> int:
        node = classes[name]
        bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
        inherited = sum(count(base) for base in bases if base in classes and base != name)
        return inherited + sum(isinstance(item, ast.AnnAssign) for item in node.body)

    return {name: count(name) for name in classes}


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef, fields: dict[str, int]) -> int:
    """Parameters without self; `**options` counts as the fields that it fills."""
    plain = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    count = sum(argument.arg not in {"self", "cls"} for argument in plain)
    options = node.args.kwarg
    if options is None or (options.annotation and "Unpack" in ast.unparse(options.annotation)):
        return count
    filled = [
        fields[call.func.id]
        for call in ast.walk(node)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in fields
        and any(k.arg is None and ast.unparse(k.value) == options.arg for k in call.keywords)
    ]
    return count + max(filled, default=1)


def run_loops(trees: dict[Path, ast.Module]) -> list[str]:
    """Functions outside run/ and lab/ that call a model's forward."""
    rows = [
        f"{path}:{node.name}"
        for path, tree in trees.items()
        if path.parts[0] not in {"run", "routing", "engines"} and not in_lab(path)
        for node in functions(tree)
        if any(is_forward(call) for call in ast.walk(node))
    ]
    return [row for row in dict.fromkeys(rows) if row not in MAY_RUN]


def is_forward(node: ast.AST) -> bool:
    """Whether a node calls a model: `forward(model, ids)`, `model(...)`, `self.model(...)`."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        first = ast.unparse(node.args[0]) if node.args else ""
        if node.func.id == "partial":
            return first == "forward"
        return node.func.id in {"forward", "model"}
    return isinstance(node.func, ast.Attribute) and node.func.attr in {"model", "_model"}


def family_switches(trees: dict[Path, ast.Module]) -> list[str]:
    """Comparisons with a family's name, or of `family.name` at all, outside the table."""
    table = next((t for path, t in trees.items() if path.name == "family_table.py"), None)
    calls = [node for node in ast.walk(table) if isinstance(node, ast.Call)] if table else []
    firsts = [call.args[0] for call in calls if call.args]
    names = {node.value for node in firsts if isinstance(node, ast.Constant)}
    names = {name for name in names if isinstance(name, str) and name.islower()}
    return [
        f"{path}:{node.lineno} {ast.unparse(node)}"
        for path, tree in trees.items()
        if path.name != "family_table.py" and path.parts[0] in {"hf", "models", "run", "analysis"}
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare) and compares_family(node, names)
    ]


def compares_family(node: ast.Compare, names: set[str]) -> bool:
    """Whether a comparison is with one of these names or reads the name of a family."""
    constants = {item.value for item in ast.walk(node) if isinstance(item, ast.Constant)}
    return "family.name" in ast.unparse(node) or bool(names & constants)


def double_classes(trees: dict[Path, ast.Module]) -> list[str]:
    """Public class names that stand in two files."""
    homes: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path))
    return [f"{name}: {', '.join(paths)}" for name, paths in homes.items() if len(paths) > 1]


def lab_imports(trees: dict[Path, ast.Module]) -> list[str]:
    """Imports of the laboratory, and names of its modules in strings, in the instrument.

    The front door alone may name it: `tieline.reroute` and `tieline.upcycle` are loaded lazily.
    """
    rows = []
    for path, tree in trees.items():
        if in_lab(path) or path.parts[0] == "__init__.py":
            continue
        for node in ast.walk(tree):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.append(node.value.partition(" ")[0])
            if any(is_lab_module(name) for name in names):
                rows.append(f"{path}:{getattr(node, 'lineno', 0)}")
    return rows


def is_lab_module(name: str) -> bool:
    """Whether a dotted name is a module of the laboratory."""
    top, _, rest = name.partition(".")
    return top == "tieline" and rest.partition(".")[0] in LAB_ROOMS


def riddles(trees: dict[Path, ast.Module]) -> list[str]:
    """Bindings of names that hide what they hold."""
    return [
        f"{path}:{line} {name}"
        for path, tree in trees.items()
        for name, line in bindings(tree)
        if name.lstrip("_") in RIDDLES
    ]


def bindings(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names that a module binds: variables, arguments, fields and functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def undocumented(trees: dict[Path, ast.Module]) -> list[str]:
    """Public functions of modules and public methods of public classes without a docstring."""
    rows = []
    for path, tree in trees.items():
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        bodies = [tree.body, *(node.body for node in classes if not node.name.startswith("_"))]
        for node in (item for body in bodies for item in body):
            if isinstance(node, ast.FunctionDef) and is_undocumented(node):
                rows.append(f"{path}:{node.lineno} {node.name}")
    return rows


def is_undocumented(node: ast.FunctionDef) -> bool:
    """Whether a function is public and has no docstring; overloads and properties count not."""
    return not (node.name.startswith("_") or ast.get_docstring(node) or node.decorator_list)


def spread(lengths: list[int]) -> dict[str, float]:
    """Median, ninth decile and maximum."""
    return {
        "median": statistics.median(lengths),
        "p90": statistics.quantiles(lengths, n=10)[-1],
        "max": max(lengths),
    }


def function_lengths(tree: ast.Module) -> Iterator[int]:
    """Lines of code of every function, its docstring and signature left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            yield (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def module_functions(tree: ast.Module) -> list[str]:
    """Names of the functions at the top level of a module."""
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def used_once(trees: dict[Path, ast.Module]) -> int:
    """Module functions whose name is used at one place of the package, imports left out."""
    uses: Counter[str] = Counter()
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            elif isinstance(node, ast.Attribute):
                uses[node.attr] += 1
    return sum(uses[name] == 1 for tree in trees.values() for name in module_functions(tree))


def one_importer(source: Path, trees: dict[Path, ast.Module]) -> int:
    """Modules that exactly one other module of the package imports."""
    names = {module_name(source, path): path for path in trees}
    importers: dict[str, set[Path]] = {name: set() for name in names}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for module in imported(node, names):
                if names[module] != path:
                    importers[module].add(path)
    return sum(
        len(files) == 1 and names[name].name != "__init__.py" for name, files in importers.items()
    )


def module_name(source: Path, path: Path) -> str:
    """Dotted name of the module in a file."""
    return ".".join([source.name, *path.with_suffix("").parts]).removesuffix(".__init__")


def imported(node: ast.AST, modules: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        submodules = [name for name in inner if name in modules]
        yield from submodules or ([node.module] if node.module in modules else [])


def look_ups(tree: ast.Module) -> int:
    """Values read by a string key: x["name"] and x.get("name")."""
    return sum(map(is_look_up, ast.walk(tree)))


def is_look_up(node: ast.AST) -> bool:
    """Whether a node reads a value by a string key."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
        first = node.args[0]
        return node.func.attr == "get" and isinstance(first, ast.Constant)
    return False


FOLLOW = """
import importlib.util, json, sys, threading
from pathlib import Path
root = Path(importlib.util.find_spec("tieline").origin).parent
visits = {}
def visit(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(str(root)) and code.co_flags & 2:
        if not code.co_qualname.rpartition(".")[2].startswith("<"):
            visits.setdefault((str(Path(code.co_filename).relative_to(root)), code.co_qualname))
from tieline.cli import main
threading.setprofile(visit)
sys.setprofile(visit)
try:
    main(sys.argv[2:])
except SystemExit as stop:
    code = stop.code
sys.setprofile(None)
Path(sys.argv[1]).write_text(json.dumps([code, [file for file, _ in visits]]))
"""


def walk(root: Path, command: str) -> str:
    """Functions, files and changes of file on the way of one command."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "way.json"
        arguments = command.format(folder=folder).split()
        environment = os.environ | {"PYTHONPATH": str(root / "src")}
        subprocess.run(  # noqa: S603 - our own command line in our own process
            [sys.executable, "-c", FOLLOW, str(record), *arguments],
            env=environment,
            check=True,
            capture_output=True,
        )
        code, files = json.loads(record.read_text())
    way = [file for file, _ in groupby(files)]
    end = "" if code in (0, None) else f", exit code {code}"
    return f"{len(files)} functions, {len(set(files))} files, {len(way)} changes of file{end}"


if __name__ == "__main__":
    main()
