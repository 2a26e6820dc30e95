"""pytest runs inside pytest, as a user would start it."""

import subprocess
import sys

import pytest

from tieline.core.errors import ParameterError
from tieline.testing.plugin import parse_sizes

pytest_plugins = ("pytester",)

ROUTERS = """
def sound(logits, k):
    weights, ids = logits.softmax(dim=-1).topk(k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True), ids

def broken(logits, k):
    return sound(logits[:, :-1], k)
"""


@pytest.fixture
def run(pytester, monkeypatch, no_axis_checks):
    """Run pytest in a folder with routers; modules are imported anew, so types differ."""
    pytester.makepyfile(routers=ROUTERS, test_own="def test_own():\n    pass\n")
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    monkeypatch.delitem(sys.modules, "routers", raising=False)

    def run(*options):
        # The installed package's entry point loads the plug-in, as it does for a user.
        done = pytester.runpytest_inprocess("-q", "-p", "no:cacheprovider", *options)
        return int(done.ret), done.stdout.str() + done.stderr.str()

    return run


SOME = ("--tieline-sizes", "8x2,4x4", "--tieline-cases", "normal,equal,no-rows")


def test_the_battery_runs_alone_without_test_files(run):
    code, text = run("--tieline-router", "routers:sound", *SOME)
    assert code == 0, text
    assert "6 passed" in text


def test_a_broken_router_fails_by_case_and_own_tests_still_run(run):
    code, text = run("--tieline-router", "routers:broken", *SOME, "test_own.py")
    assert code == 1, text
    assert "routers:broken-normal-E8-k2" in text
    assert "wrong choice: token" in text
    assert "test_own" not in text.split("short test summary")[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tieline-router", "routers:absent"), "routers:absent"),
        (("--tieline-router", "routers:sound", "--tieline-rule", "hard"), "no rule is called"),
        (("--tieline-router", "routers:sound", "--tieline-sizes", "8"), "a size is"),
    ],
)
def test_bad_options_are_one_line(run, options, message):
    code, text = run(*options)
    assert code == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in text.splitlines() if line.strip()]
    assert message in line


def test_without_the_option_nothing_changes(run):
    code, text = run()
    assert code == 0, text
    assert "1 passed" in text


def test_the_plug_in_loads_no_heavy_library():
    code = "import sys, tieline.testing.plugin; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_sizes_are_read():
    assert parse_sizes("64x8,2x1") == [(64, 8), (2, 1)]
    with pytest.raises(ParameterError, match="64x8"):
        parse_sizes("64*8")
