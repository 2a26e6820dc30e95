"""Plug-ins: the instrument and the laboratory, one that adds things, one that does not import."""

import subprocess
import sys
from pathlib import Path

import pytest

import tieline
from tieline.core import plugins as module
from tieline.core.plugins import command_groups, plugins, restorer_module, result_formats

SOURCE = str(Path(tieline.__file__).parents[1])

PLUGIN = """
from tieline.core.plugins import Plugin
PLUGIN = Plugin(commands={"Mine": {"greet": "mine_greet"}}, restorers={"mine": "mine_restorer"})
"""
GREET = """
from tieline.cli.app import app, guarded

@app.command()
@guarded
def greet() -> None:
    \"\"\"Say hello.\"\"\"
    print("hello")
"""


def installed(folder, name, value, **files):
    """Pretend that a package with an entry point is installed in a folder."""
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[tieline.plugins]\n{name} = {value}\n")
    for file, text in files.items():
        (folder / f"{file}.py").write_text(text)


def run(folder, *arguments):
    code = f"import sys; sys.path[:0] = [{SOURCE!r}, {str(folder)!r}];"
    code += f"from tieline.cli import main; main({list(arguments)})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_instrument_comes_first_and_the_laboratory_is_a_plug_in():
    assert next(iter(plugins())) == "tieline"
    assert "lab" in plugins()
    groups = command_groups()
    names = ["inspect", "diff", "audit", "check", "serve-check"]
    assert [command.name for command in groups["Look"]] == names
    assert {"soften", "slice", "attention", "train"} <= {command.name for command in groups["Lab"]}
    assert {"tieline-inspection", "tieline-softening"} <= set(result_formats())
    assert restorer_module("upcycle") == "tieline.lab.on_model.upcycled_model"
    assert restorer_module("nothing") is None


def test_a_command_of_a_plug_in_is_listed_and_runs(tmp_path):
    installed(tmp_path, "mine", "mine", mine=PLUGIN, mine_greet=GREET)
    done = run(tmp_path, "greet")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "Mine:" in run(tmp_path, "-h").stdout


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({"mine": "import nowhere"}, "plug-in 'mine' (mine)"),
        ({"mine": "pass"}, "plug-in 'mine' (mine)"),
        ({"mine": PLUGIN, "mine_greet": "1 / 0"}, "command 'greet' of plug-in 'mine'"),
    ],
)
def test_what_does_not_import_is_named_in_one_line_and_the_rest_works(tmp_path, files, what):
    installed(tmp_path, "mine", "mine", **files)
    version = run(tmp_path, "--version")
    assert (version.returncode, version.stdout) == (0, f"tieline {tieline.__version__}\n")
    done = run(tmp_path, "-h")  # lists every command
    assert done.returncode == 0
    assert "Look:" in done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"tieline: {what} does not import and is left out: ")


def test_a_command_imports_the_commands_of_no_other_plug_in(tmp_path):
    installed(tmp_path, "mine", "mine", mine=PLUGIN, mine_greet="1 / 0")
    for arguments in (["--version"], ["inspect", "-h"]):
        done = run(tmp_path, *arguments)
        assert (done.returncode, done.stderr) == (0, "")


def test_reading_the_registry_imports_nothing_heavy():
    code = "import sys; from tieline.core.plugins import result_formats; result_formats();"
    code += "assert not {'torch', 'numpy', 'transformers', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_added_families_are_imported_once(monkeypatch, capsys):
    added = module.Plugin(families=("json", "nowhere_at_all"))
    monkeypatch.setattr(module, "plugins", lambda: {"mine": added})
    module.import_added.cache_clear()
    module.import_added("families")
    module.import_added("families")
    module.import_added.cache_clear()
    assert capsys.readouterr().err.count("nowhere_at_all of plug-in 'mine'") == 1
