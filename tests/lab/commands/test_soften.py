"""`tieline soften`."""

import json


def test_the_loss_against_the_width_is_shown_and_written(tieline, tmp_path):
    page, json_path = tmp_path / "a.html", tmp_path / "a.json"
    arguments = ["--tokens", 256, "--layers", "1", "--html", page, "--json", json_path]
    code, stdout, stderr = tieline("soften", *arguments)
    assert code == 0, stderr
    result = json.loads(json_path.read_text())
    assert result["format"] == "tieline-softening"
    assert [layer["name"] for layer in result["layers"]] == ["model.layers.1.mlp.gate"]
    assert result["tokens"] == 256
    assert "What to do" in " ".join(stdout.split())
    assert "The tokens that decide" in page.read_text()


def test_a_high_cost_is_refused_before_any_run(tieline):
    code, _, stderr = tieline("soften", "--max-cost", 0.1)
    assert code == 2
    assert "more than --max-cost 0.1: raise it" in stderr
