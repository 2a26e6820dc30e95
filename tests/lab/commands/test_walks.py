"""`tieline walks`."""

import json


def test_times_to_the_first_flip_are_shown_and_written(tieline, tmp_path):
    page, json_path = tmp_path / "a.html", tmp_path / "a.json"
    arguments = ["--tokens", 128, "--layers", "1-2", "--html", page, "--json", json_path]
    code, stdout, stderr = tieline("walks", *arguments)
    assert code == 0, stderr
    result = json.loads(json_path.read_text())
    assert result["format"] == "tieline-walks"
    assert len(result["layers"]) == 2
    assert "the first to flip" in " ".join(stdout.split())
    assert "How many roundings until a token changes its experts" in page.read_text()
