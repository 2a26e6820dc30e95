"""A package that is not installed is named with the extra that brings it."""

import re
import tomllib
from pathlib import Path

import pytest
import typer

from tieline.cli.app import EXTRAS, guarded

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
NAMES = {"pillow": "PIL", "scikit-learn": "sklearn"}
USED = ("hf", "report", "train", "estimation", "tropical", "cluster")


def brought(extra):
    """Import names of the packages of an extra, those of extras within it included."""
    modules = set()
    for line in PROJECT["project"]["optional-dependencies"][extra]:
        name = re.match(r"[\w-]+", line)[0]
        inner = re.match(r"tieline\[([\w,]+)\]", line)
        more = (
            [brought(part) for part in inner[1].split(",")] if inner else [{NAMES.get(name, name)}]
        )
        modules |= set().union(*more)
    return modules | ({"distributed"} if "dask" in modules else set())


def test_every_optional_package_has_its_extra():
    for extra in USED:
        assert brought(extra) <= set(EXTRAS)
    for package, extra in EXTRAS.items():
        assert package in brought(extra)


def failing(name, missing):
    def command():
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    command.__name__ = name
    return guarded(command)


@pytest.mark.parametrize(
    ("command", "missing", "extra"),
    [
        ("train", "transformers", "train"),
        ("train", "accelerate", "train"),
        ("train", "PIL.Image", "train"),
        ("train", "plotly", "report"),
        ("train", "jinja2", "report"),
        ("inspect", "transformers", "hf"),
        ("rates", "dask.distributed", "cluster"),
    ],
)
def test_the_right_extra_is_named(command, missing, extra, capsys):
    with pytest.raises(typer.Exit) as stopped:
        failing(command, missing)(debug=False)
    assert stopped.value.exit_code == 2
    message = " ".join(capsys.readouterr().err.split())
    assert f"pip install 'tieline[{extra}]'" in message
    assert missing in message
    assert missing.partition(".")[0] in brought(extra)
