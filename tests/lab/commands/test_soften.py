"""`tieline soften`."""

import json


def test_the_loss_against_the_width_is_shown_and_written(tieline, tmp_path):
    page, told = tmp_path / "a.html", tmp_path / "a.json"
    words = ["--tokens", 256, "--layers", "1", "--html", page, "--json", told]
    code, shown, said = tieline("soften", *words)
    assert code == 0, said
    result = json.loads(told.read_text())
    assert result["format"] == "tieline-softening"
    assert [layer["name"] for layer in result["layers"]] == ["model.layers.1.mlp.gate"]
    assert result["tokens"] == 256
    assert "What to do" in " ".join(shown.split())
    assert "The tokens that decide" in page.read_text()


def test_a_high_cost_is_refused_before_any_run(tieline):
    code, _, said = tieline("soften", "--max-cost", 0.1)
    assert code == 2
    assert "more than --max-cost 0.1: raise it" in said
