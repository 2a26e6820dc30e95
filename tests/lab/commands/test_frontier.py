"""`tieline frontier`."""

import json

import pytest

FEW = ["--tokens", 512, "--calibration", 512, "--batch-size", 2]


def test_widths_from_little_to_much_are_shown_and_written(tieline, tmp_path):
    page, json_path, figure_path = (tmp_path / name for name in ("a.html", "a.json", "a.png"))
    code, stdout, stderr = tieline(
        "frontier", *FEW, "--json", json_path, "--html", page, "--figure", figure_path
    )
    assert code == 0, stderr
    result = json.loads(json_path.read_text())
    assert result["format"] == "tieline-frontier"
    spreads = [point["spread"] for point in result["points"]]
    assert spreads.count("noise") == 7
    assert "budget" in spreads
    assert len(result["layers"]) == 4
    assert "over frontier" in stdout
    assert "How much repair, at which price" in page.read_text()
    assert figure_path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gate", "laplace"], "--gate must be one of projected, ramp, got 'laplace'"),
        (["--noise", "bf17"], "unknown precision"),
        (["--tokens", 10**7, "--calibration", 10**7], "too few"),
    ],
)
def test_bad_wishes_are_refused_in_one_line(tieline, arguments, message):
    code, stdout, stderr = tieline("frontier", *FEW, *arguments)
    assert (code, stdout) == (2, "")
    assert message in stderr
