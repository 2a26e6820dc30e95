"""The pytest plug-in: `pytest --tieline-router my.module:function` runs the cases as tests.

    --tieline-router MODULE:FUNCTION    may be given several times
    --tieline-rule NAME[,FIELD=VALUE]   the rule that the router should follow (default: softmax)
    --tieline-sizes ExK[,ExK]           numbers of experts and of chosen ones
    --tieline-cases NAME[,NAME]         names of the cases to run

Without test files on the command line only the cases run, else they run after the files.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATTERY = str(Path(__file__).with_name("conformance.py"))
"""The collected file, whose `test_router` runs once per router and case."""


def pytest_addoption(parser: Any) -> None:
    """Add the options of the plug-in."""
    group = parser.getgroup("tieline", "conformance of routing kernels (Tieline)")
    group.addoption(
        "--tieline-router",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="run the battery on this router: a function of logits (T, E) and k that returns ids "
        "(T, k) and weights",
    )
    group.addoption(
        "--tieline-rule",
        default="softmax",
        metavar="NAME[,FIELD=VALUE]",
        help="what the router is meant to compute, such as deepseek-v3 or sigmoid,scale=2.5",
    )
    group.addoption(
        "--tieline-sizes", default="", metavar="ExK,...", help="sizes, such as 64x8,256x8"
    )
    group.addoption("--tieline-cases", default="", metavar="NAME,...", help="some cases alone")


def pytest_configure(config: Any) -> None:
    """Read the options, and add the file with `test_router` to the collected files.

    Modules of the folder in which pytest was started are found, as by `python -m pytest`.
    """
    if not config.getoption("--tieline-router"):
        return
    folder = str(config.invocation_params.dir)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    config.tieline_tests = _tests_of_options(config.getoption)
    if BATTERY not in config.args:
        from_command_line = config.args_source == type(config).ArgsSource.ARGS
        config.args[:] = [*(config.args if from_command_line else []), BATTERY]


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrise `test_router` by router and case."""
    if "tieline_case" in metafunc.fixturenames:
        values, ids = metafunc.config.tieline_tests
        metafunc.parametrize("tieline_case", values, ids=ids)


def _tests_of_options(option: Callable[[str], Any]) -> tuple[list[Any], list[str]]:
    """Return (router, rule, case) of each test and its name; raises a usage error in one line."""
    import pytest

    from tieline.core.errors import TielineError
    from tieline.testing.conformance import PATTERNS, SIZES, import_router, logit_cases
    from tieline.testing.reference_rules import rule_named

    try:
        rule = rule_named(option("--tieline-rule"))
        sizes = parse_sizes(option("--tieline-sizes")) or SIZES
        names = [name for name in option("--tieline-cases").split(",") if name]
        cases = list(logit_cases(rule, sizes, names=names or PATTERNS))
        routers = {path: import_router(path) for path in option("--tieline-router")}
    except TielineError as problem:
        raise pytest.UsageError(str(problem)) from problem
    values = [(router, rule, case) for router in routers.values() for case in cases]
    return values, [f"{path}-{case.label}" for path in routers for case in cases]


def parse_sizes(text: str) -> list[tuple[int, int]]:
    """Read "64x8,256x8" as pairs of numbers of experts and of chosen ones."""
    from tieline.core.errors import ParameterError

    sizes = []
    for size in filter(None, text.split(",")):
        experts, cross, k = size.partition("x")
        if not (cross and experts.isdigit() and k.isdigit()):
            raise ParameterError(f"a size is EXPERTSxK such as 64x8, got {size!r:.40}")
        sizes.append((int(experts), int(k)))
    return sizes
