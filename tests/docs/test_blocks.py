"""Every Python block of the README and of the documentation runs, alone, in an empty folder.

On at most 512 tokens; in the slow tier on as many as the block says.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tieline.models import families

ROOT = Path(__file__).parents[2]
TOKENS = re.compile(r"\btokens=(\d+)")
FENCE = re.compile(r"(?:<!-- (?P<mark>[\w ]+) -->\n)?^```python\n(?P<code>.*?)^```", re.S | re.M)


def blocks():
    for page in sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]):
        for number, fence in enumerate(FENCE.finditer(page.read_text(encoding="utf-8"))):
            options = (fence["mark"] or "").split()
            marks = [pytest.mark.slow] if {"slow", "torchrun"} & set(options) else []
            if "data" in options and not os.environ.get("TIELINE_DATA"):
                marks.append(pytest.mark.skip(reason="needs data sets in $TIELINE_DATA"))
            name = f"{page.relative_to(ROOT)}:{number}"
            few = TOKENS.sub(lambda text: f"tokens={min(int(text[1]), 512)}", fence["code"])
            yield pytest.param(few, fence["mark"], id=name, marks=marks)
            if few != fence["code"]:
                as_is = [*marks, pytest.mark.slow]
                yield pytest.param(fence["code"], fence["mark"], id=f"{name}:as is", marks=as_is)


@pytest.mark.parametrize(("code", "mark"), list(blocks()))
def test_a_block_runs_alone(code, mark, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib").use("agg")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))  # a block may add one
    if mark == "torchrun":
        program = tmp_path / "program.py"
        program.write_text(code)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        subprocess.run([*torchrun, str(program)], check=True)
        return
    exec(compile(code, "block", "exec"), {"__name__": "__main__"})


def test_the_readme_installs_from_a_clone_or_an_address_first():
    """There is no package of this name on the index."""
    text = (ROOT / "README.md").read_text()
    assert text.index("git clone ADDRESS") < text.index("pip install")
    commands = re.findall(r"pip install [^`\n]*tieline\[[^`\n]*", text)
    assert commands
    assert all("@ git+ADDRESS" in command for command in commands)
