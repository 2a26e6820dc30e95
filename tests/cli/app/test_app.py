"""The application: help in groups, and nothing heavy is imported to show it."""

import subprocess
import sys

import pytest

import tieline as package
from tieline.core.plugins import command_groups

PROBE = """
import sys
{first}
try:
    {code}
except SystemExit as left:
    print("code", left.code)
print("heavy", sorted({{"torch", "transformers", "numpy", "plotly"}} & set(sys.modules)))
"""


def probe(code, first="", **more):
    command = [sys.executable, "-c", PROBE.format(code=code, first=first)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, **more)
    return done.stdout


def test_the_help_groups_all_commands_and_has_a_short_name(tieline):
    code, out, _ = tieline("-h")
    assert (code, out) == tieline("--help")[:2]
    for heading, commands in command_groups().items():
        assert out.index(f"\n{heading}:") < min(out.index(f"\n  {c.name} ") for c in commands)
    assert "..." not in out.partition("Look:")[2]


LIGHT = ["--version"], ["--help"], ["diff", "-h"], ["inspect", "--jsn"], ["nothing"]


@pytest.mark.parametrize("arguments", [*LIGHT, ["train", "--list"]])
def test_help_listings_and_refusals_load_nothing_heavy(arguments):
    out = probe(f"main({arguments})", "from tieline.cli import main")
    assert "heavy []" in out


def test_completion_loads_nothing_heavy():
    import os

    variables = {
        "_TIELINE_COMPLETE": "complete_bash",
        "COMP_WORDS": "tieline ins",
        "COMP_CWORD": "1",
    }
    out = probe("main([])", "from tieline.cli import main", env={**os.environ, **variables})
    assert "inspect" in out
    assert "heavy []" in out


def test_the_package_loads_nothing_heavy_until_a_name_is_used():
    assert "heavy []" in probe("dir(tieline)", "import tieline")
    assert "'torch'" in probe("tieline.TopK", "import tieline")


def test_every_public_name_is_there():
    for name in package.__all__:
        assert getattr(package, name) is not None
    assert set(dir(package)) == {*package.__all__, *package.ROOMS}
    assert set(package.HOMES) < set(package.__all__)
    assert package.measure.__name__ == "tieline.measure"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = package.nothing


def test_without_arguments_the_commands_are_shown(tieline):
    code, out, err = tieline()
    assert code in (0, 2)
    assert "inspect" in out + err
    assert "Traceback" not in err
