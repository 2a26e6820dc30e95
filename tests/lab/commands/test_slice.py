"""`tieline slice`."""

import json

import pytest


def test_the_slice_is_drawn_checked_and_told(tieline, tmp_path):
    drawn, told, page = (tmp_path / name for name in ("cut.png", "cut.json", "cut.html"))
    words = ["--tokens", 384, "--layer", 2, "--places", "3,70,300", "--seed", 3]
    code, shown, said = tieline("slice", *words, "--figure", drawn, "--json", told, "--html", page)
    assert code == 0, said
    result = json.loads(told.read_text())
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert result["layer"] == "model.layers.2.mlp.gate"
    assert result["checked"] >= 1000
    assert result["agreed"] + result["undecided"] == result["checked"]
    assert f"picture at {result['agreed']:,}" in shown
    assert "The plane through three inputs" in page.read_text()
    again = tmp_path / "again.png"
    code, _, said = tieline("inspect", told, "--figure", again)
    assert (code, again.read_bytes()[:4]) == (0, b"\x89PNG"), said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--figure", "a.gif"], "a figure is .pdf, .png, .svg"),
        (["--layer", "1-2"], "--layer takes one layer"),
        (["--places", "1,2.5,3"], "--places takes whole numbers"),
        (["--places", "1,2"], "three different tokens, got 1, 2"),
    ],
)
def test_a_slice_that_cannot_be_drawn_is_refused(tieline, tmp_path, words, why):
    words = (tmp_path / word if "a." in word else word for word in words)
    code, _, said = tieline("slice", *words)
    assert code == 2
    assert why in said
