"""Measure the house: files, lines, their lengths, and the way of a command through them.

    python tools/house.py                       # sizes, importers, uses, look-ups of this checkout
    python tools/house.py --root ../other       # the same of another checkout, for a comparison
    python tools/house.py --walk                # and the way of the main commands through the files
    python tools/house.py --json house.json

Sizes are read from the syntax trees; nothing of the checkout is imported for them. The way of a
command runs it once, in its own process on few tokens, and counts the first visit of each function
of the package in order; a change is two neighbours in that order that stand in different files.
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
    parser.add_argument("--json", type=Path, help="write the measures to this file")
    options = parser.parse_args()
    measures = house(options.root / "src" / "tieline")
    if options.walk:
        measures["walk"] = {name: walk(options.root, words) for name, words in COMMANDS.items()}
    for name, value in measures.items():
        rows = value.items() if isinstance(value, dict) else [("", value)]
        for key, number in rows:
            sys.stdout.write(f"{name} {key}: {number}\n")
    if options.json:
        options.json.write_text(json.dumps(measures, indent=1) + "\n", encoding="utf-8")


def house(source: Path) -> dict[str, object]:
    """Sizes of files and functions, modules with one importer, functions used once, look-ups."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(source.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    return {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts.values()),
        "file lines": spread([text.count("\n") for text in texts.values()]),
        "function lines": spread([n for tree in trees.values() for n in function_lengths(tree)]),
        "modules with one importer": one_importer(source, trees),
        "module functions": sum(len(module_functions(tree)) for tree in trees.values()),
        "module functions used once": used_once(trees),
        "string look-ups in report": sum(
            look_ups(tree) for path, tree in trees.items() if "report" in path.parts
        ),
        "files by room": dict(Counter(path.relative_to(source).parts[0] for path in texts)),
    }


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
        len(found) == 1 and names[name].name != "__init__.py" for name, found in importers.items()
    )


def module_name(source: Path, path: Path) -> str:
    """Dotted name of the module in a file."""
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def imported(node: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """Modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in known)
    elif isinstance(node, ast.ImportFrom) and node.module:
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        found = [name for name in inner if name in known]
        yield from found or ([node.module] if node.module in known else [])


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
seen = {}
def visit(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(str(root)) and code.co_flags & 2:
        if not code.co_qualname.rpartition(".")[2].startswith("<"):
            seen.setdefault((str(Path(code.co_filename).relative_to(root)), code.co_qualname))
from tieline.cli import main
threading.setprofile(visit)
sys.setprofile(visit)
try:
    main(sys.argv[2:])
except SystemExit as stop:
    code = stop.code
sys.setprofile(None)
Path(sys.argv[1]).write_text(json.dumps([code, [file for file, _ in seen]]))
"""


def walk(root: Path, words: str) -> str:
    """Functions, files and changes of file on the way of one command."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "way.json"
        arguments = words.format(folder=folder).split()
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
