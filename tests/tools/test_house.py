"""The measures of `tools/house.py` on a package of a few lines."""

import pytest

from tools.house import house, offenders, read

SOURCES = {
    "__init__.py": '"""The front door."""\nHOMES = {"reroute": "tieline.lab.on_model.reroute"}\n',
    "models/family_table.py": "TABLE = (record('mixtral'), record('dbrx'))\n",
    "models/calls.py": "def w(family):\n    return family == 'mixtral' or family.name in TABLE\n",
    "analysis/job.py": (
        "from tieline.lab.limits import risk\n"
        "class Options:\n"
        + "".join(f"    field{n}: int = 0\n" for n in range(10))
        + "class Rows: ...\n"
        "def short(**options):\n    return Options(**options)\n"
        "def typed(**options: Unpack[Given]):\n    return Options(**options)\n"
        "def loop(model, batches):\n    found = [model(ids) for ids in batches]\n    return found\n"
    ),
    "lab/limits.py": "class Rows: ...\ndef run(model, ids):\n    return model(ids)\n",
    "run/runner.py": "def run(model, ids):\n    return forward(model, ids)\n",
}


@pytest.fixture
def package(tmp_path):
    for name, text in SOURCES.items():
        path = tmp_path / "tieline" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "tieline"


def test_offenders_are_listed_with_their_place(package):
    rows = offenders(read(package))
    assert rows["functions with ten parameters"] == ["analysis/job.py:14 short: 10"]
    assert rows["run loops"] == ["analysis/job.py:loop"]
    assert len(rows["family switches"]) == 2
    assert rows["class names with two meanings"] == ["Rows: analysis/job.py, lab/limits.py"]
    assert rows["lab imports in the instrument"] == ["analysis/job.py:1"]
    assert rows["riddle names"] == ["analysis/job.py:19 found"]


def test_wings_are_counted_apart(package):
    measures = house(package)
    assert (measures["lab"]["files"], measures["instrument"]["files"]) == (1, 5)
