"""`tieline slice`."""

import json

import pytest


def test_the_slice_is_drawn_checked_and_told(tieline, tmp_path):
    figure_path, json_path, page = (tmp_path / name for name in ("cut.png", "cut.json", "cut.html"))
    arguments = ["--tokens", 384, "--layer", 2, "--places", "3,70,300", "--seed", 3]
    code, stdout, stderr = tieline(
        "slice", *arguments, "--figure", figure_path, "--json", json_path, "--html", page
    )
    assert code == 0, stderr
    result = json.loads(json_path.read_text())
    assert figure_path.read_bytes().startswith(b"\x89PNG")
    assert result["layer"] == "model.layers.2.mlp.gate"
    assert result["checked"] >= 1000
    assert result["agreed"] + result["undecided"] == result["checked"]
    assert f"picture at {result['agreed']:,}" in stdout
    assert "The plane through three inputs" in page.read_text()
    again = tmp_path / "again.png"
    code, _, stderr = tieline("inspect", json_path, "--figure", again)
    assert (code, again.read_bytes()[:4]) == (0, b"\x89PNG"), stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--figure", "a.gif"], "a figure is .pdf, .png, .svg"),
        (["--layer", "1-2"], "--layer takes one layer"),
        (["--places", "1,2.5,3"], "--places takes whole numbers"),
        (["--places", "1,2"], "three different tokens, got 1, 2"),
    ],
)
def test_a_slice_that_cannot_be_drawn_is_refused(tieline, tmp_path, arguments, reason):
    arguments = (tmp_path / word if "a." in word else word for word in arguments)
    code, _, stderr = tieline("slice", *arguments)
    assert code == 2
    assert reason in stderr
