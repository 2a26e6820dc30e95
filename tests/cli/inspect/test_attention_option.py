"""`tieline inspect --attention`."""

import json

import pytest


def test_heads_are_shown_and_written(tieline, tmp_path):
    page, told = tmp_path / "a.html", tmp_path / "a.json"
    words = ["--attention", "--tokens", 128, "--html", page, "--json", told]
    code, shown, _ = tieline("inspect", *words)
    assert code == 0
    assert "near tie" in shown
    assert json.loads(told.read_text())["format"] == "tieline-attention"
    assert "Heads as mixtures" in page.read_text()
    code, shown, _ = tieline("inspect", told)
    assert code == 0
    assert "What to do" in shown
    assert tieline("inspect", told, "--attention")[:2] == (code, shown)


@pytest.mark.parametrize("words", [["--loss-jumps"], ["--layers", "0"], ["--dtype", "bf16"]])
def test_options_about_routers_are_refused(tieline, words):
    code, _, said = tieline("inspect", "--attention", *words)
    assert code == 2
    assert f"{words[0]} is about routers" in said
