"""`tieline reroute`: the table, the saved model, and what is refused."""

import json

import pytest

FEW = ["--tokens", 256, "--fit-tokens", 256, "--batch-size", 2]


def test_the_model_is_saved_with_its_table_and_inspected(tieline, tmp_path):
    out, json_path = tmp_path / "new", tmp_path / "told.json"
    code, stdout, stderr = tieline(
        "reroute", "-o", out, *FEW, "--router", "cosine", "--json", json_path
    )
    assert (code, stderr.count("wrote")) == (0, 2)
    result = json.loads(json_path.read_text())
    assert json.loads((out / "tieline-reroute.json").read_text()) == result
    assert result["format"] == "tieline-reroute"
    assert result["kept"]["value"] > 0.97
    for phrase in ("kept", "Loss", "zero vector", "What to do"):
        assert phrase in stdout
    code, stdout, _ = tieline("inspect", out, "--tokens", 256, "--json")
    assert code == 0
    assert json.loads(stdout)["format"] == "tieline-inspection"
    code, _, stderr = tieline("reroute", out, *FEW)
    assert code == 2
    assert "rerouted already (to 'cosine')" in stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--router", "spherical"], "--router must be one of"),
        (["--router", "linear", "--temperature", 0.1], "--temperature is an option of another"),
        (["--router", "cosine", "--tau", "0.1,0.1"], "--tau is an option of another"),
        (["--tau", "0.1"], "two numbers"),
        (["--rank", 4], "--rank is an option of another"),
    ],
)
def test_a_router_of_another_kind_is_refused_in_one_line(tieline, arguments, reason):
    code, _, stderr = tieline("reroute", *FEW, *arguments)
    assert code == 2
    assert reason in stderr
