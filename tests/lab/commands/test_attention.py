"""`tieline attention`."""

import json


def test_heads_are_shown_and_written(tieline, tmp_path):
    page, json_path = tmp_path / "a.html", tmp_path / "a.json"
    code, stdout, _ = tieline("attention", "--tokens", 128, "--html", page, "--json", json_path)
    assert code == 0
    assert "near tie" in stdout
    assert json.loads(json_path.read_text())["format"] == "tieline-attention"
    assert "Heads as mixtures" in page.read_text()
    code, stdout, _ = tieline("inspect", json_path)
    assert code == 0
    assert "What to do" in stdout
