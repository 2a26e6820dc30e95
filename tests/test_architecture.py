"""The plan of the house, enforced on the syntax trees of its sources."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tieline

SOURCE = Path(tieline.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

BASE = {"errors", "ranking", "numerics", "trace", "recompute", "engines", "_version"}
MAY_IMPORT = {
    **dict.fromkeys(BASE, BASE),
    "geometry": BASE,
    "routing": BASE,
    "hf": BASE | {"geometry", "routing", "shipped"},
    "shipped": set(),
    "audit": BASE | {"geometry", "hf", "routing"},  # the monitor watches our own layers too
    "tropical": BASE | {"geometry"},
    "limits": BASE | {"geometry", "routing"},
    "estimation": BASE | {"geometry", "routing"},
    "training": BASE | {"routing", "hf", "audit"},
    "studies": BASE
    | {"geometry", "routing", "hf", "audit", "tropical", "limits", "estimation", "training"},
    "report": BASE,
}
ONLY_IN = {
    "transformers": {"hf", "audit", "training"},
    "tokenizers": {"hf", "training"},
    "matplotlib": {"report"},
    "plotly": {"report"},
    "pickle": set(),
    "marshal": set(),
    "shelve": set(),
}
RANKS_SCORES = {"sort", "argsort", "topk", "kthvalue", "msort"}
SORTS_SAMPLES = {  # these sort gaps, masses or token ids, never the scores of a token
    "ranking.py",
    "routing/slots.py",
}


def room(path):
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_rooms_import_only_what_the_plan_allows(path):
    here = room(path)
    for module in imports(path):
        top, *rest = module.split(".")
        if top == "tieline" and here in MAY_IMPORT:
            allowed = MAY_IMPORT[here] | {here}
            assert rest
            assert rest[0] in allowed, f"{here} must not import {module}"
        if top in ONLY_IN and here not in ("cli",):
            assert here in ONLY_IN[top], f"{here} must not import {module}"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_files_and_functions_keep_their_budget_and_nothing_prints(path):
    text = path.read_text()
    assert text.count("\n") <= 400, "a file has at most 400 lines"
    assert "TO" + "DO" not in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert length <= 40, f"{node.name} has {length} lines of code"
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print":
            assert room(path) == "cli", "only the command line prints"


@pytest.mark.parametrize("path", sorted((SOURCE / "routing").glob("*.py")), ids=lambda p: p.name)
def test_only_ranking_ranks_scores(path):
    calls = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if str(path.relative_to(SOURCE)) not in SORTS_SAMPLES:
        assert not calls & RANKS_SCORES


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_every_name_that_a_module_promises_is_there(path):
    if path.name == "__main__.py" or "train" in path.name:
        return
    name = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
    module = importlib.import_module(name)
    for promised in getattr(module, "__all__", []):
        assert hasattr(module, promised)


def test_the_names_that_others_rely_on_are_public():
    for name in ("MoE", "SmoothTopK", "TopK", "moe", "stable_topk"):
        assert name in tieline.__all__
    assert list(tieline.__all__) == sorted(tieline.__all__)


def test_importing_the_package_loads_no_heavy_extra_and_changes_no_setting():
    code = (
        "import torch, sys; before = (torch.get_default_dtype(), torch.get_num_threads());"
        "import tieline;"
        "assert before == (torch.get_default_dtype(), torch.get_num_threads());"
        "assert not {'transformers', 'matplotlib', 'plotly', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
