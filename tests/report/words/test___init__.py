"""The sentences of results, compared with the files of tests/report/snapshots.

Run `PYTHONPATH=src python -m tests.report.words.test___init__ --update` to write the files again,
and read the difference before you commit it.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.words import sentences

FOLDER = Path(__file__).parents[1] / "snapshots"
RESULTS: dict[str, Callable[[], dict[str, list[str]]]] = {
    "inspection": sentences.inspection,
    "diff": sentences.diff,
    "audit": sentences.audit,
    "smooth": sentences.smooth,
}
"""Name of a snapshot to the sentences of its cases."""


def written(name):
    """The text of a snapshot: each case, then its sentences."""
    cases = RESULTS[name]()
    return "\n".join(f"## {case}\n" + "\n".join(lines) + "\n" for case, lines in cases.items())


@pytest.mark.parametrize("name", RESULTS)
def test_sentences_are_those_of_the_snapshot(name):
    assert written(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8")


if __name__ == "__main__" and "--update" in sys.argv:
    for name in RESULTS:
        (FOLDER / f"{name}.txt").write_text(written(name), encoding="utf-8")
