"""What the README shows of a command is what the command prints on a terminal of 80 columns."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```console\n\$ tieline (.*)\n((?:.*\n)*?)```$", re.MULTILINE)
SCREENS = BLOCK.findall(README.read_text(encoding="utf-8"))
TIMES = re.compile(r"[\d.]+ times the original \([\d.]+ to [\d.]+|[\d.]+ ×(?= time)|[\d.]+ s\b")
PAGES = sorted((README.parent / "docs").glob("*.md"))
MOST_LINES = 40


def printed(text):
    """The lines of a screen without spaces at their ends, and without measured times."""
    return [TIMES.sub("TIME", line.rstrip()) for line in text.rstrip("\n").splitlines()]


def run(command, folder):
    """What a command prints on stdout in an empty folder."""
    environment = {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tieline", *shlex.split(command)],
        cwd=folder,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return printed(done.stdout)


def test_the_readme_shows_three_screens_that_fit_a_terminal():
    assert [command.split()[0] for command, _ in SCREENS] == ["inspect", "diff", "smooth"]
    for _, text in SCREENS:
        assert all(len(line) <= 80 for line in text.splitlines())


def test_pages_that_show_the_same_command_show_the_same_screen():
    screens = dict(SCREENS)
    others = [(page, BLOCK.findall(page.read_text(encoding="utf-8"))) for page in PAGES]
    repeated = [(page.name, command) for page, blocks in others for command, _ in blocks]
    assert ("start.md", "inspect --html report.html") in repeated
    for page, blocks in others:
        for command, text in blocks:
            assert text == screens.get(command, text), page


def test_the_landing_image_has_no_scrollbar():
    image = pytest.importorskip("PIL.Image")
    with image.open(README.parent / "docs" / "img" / "report.png") as picture:
        edge = picture.convert("RGB").crop((picture.width - 12, 0, picture.width, picture.height))
    assert len(edge.getcolors()) == 1


@pytest.mark.slow  # 20 s to a minute each
@pytest.mark.parametrize(("command", "text"), SCREENS, ids=[command for command, _ in SCREENS])
def test_a_screen_of_the_readme_is_that_of_the_command(command, text, tmp_path):
    shown, screen = printed(text), run(command, tmp_path)
    assert len(screen) <= MOST_LINES
    if shown[-1] == "…":  # the README leaves the end out
        shown, screen = shown[:-1], screen[: len(shown) - 1]
    assert shown == screen
