"""tieline train from its options to its files."""

import json

import pytest

from tieline.lab.training.recipes import RECIPES


def test_recipes_are_listed_in_groups_that_fit_a_screen(tieline, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = tieline("train", "--list")
    assert code == 0
    assert "enwik8-10m-" in out
    lines = out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    numbers = [int(word) for line in lines for word in line.split()[1:2] if word.isdigit()]
    assert sum(numbers) == len(RECIPES)
    assert f"all {len(RECIPES)}" in out.replace("\n", " ")
    assert tieline("train", "demo-smoke-smoe", "--all")[0] == 2


def test_every_recipe_is_listed(tieline):
    code, out, _ = tieline("train", "--list", "--all")
    assert code == 0
    assert "enwik8-10m-smooth1" in out
    code, out, _ = tieline("train", "--list", "--json")
    assert code == 0
    assert "enwik8-small-remoe" in json.loads(out)["recipes"]


def test_a_dry_run_tells_size_data_and_time_and_writes_nothing(tieline, tmp_path):
    code, out, _ = tieline(
        "train", "demo-smoke-smooth1", "--dry-run", "--out", tmp_path / "run", "--seed", 4
    )
    assert code == 0
    for phrase in ("parameters  24,929", "data        the text in the box", "seed  4", "s a step"):
        assert phrase in out
    assert not (tmp_path / "run").exists()


def test_a_run_is_scored_kept_and_resumed(tieline, tmp_path):
    folder, page = tmp_path / "run", tmp_path / "found.json"
    code, out, err = tieline("train", "demo-smoke-smoe", "-o", folder, "--json", page)
    assert code == 0
    assert "20 steps" in out
    assert f"wrote {page}" in err
    result = json.loads(page.read_bytes())
    assert result["format"] == "tieline-training"
    assert result["scores"]["validation"]["bpc"] < 8
    code, out, _ = tieline("train", "demo-smoke-smoe", "--out", folder, "--resume", "--json")
    assert code == 0
    assert json.loads(out)["scores"] == result["scores"]
    code, _, err = tieline("train", "demo-smoke-top3", "--out", folder, "--resume")
    assert code == 2
    assert "holds another run" in err
    code, _, err = tieline("train", "demo-smoke-smoe", "--out", folder)
    assert code == 2
    assert "not empty" in err


def test_bad_words_are_told(tieline):
    code, _, err = tieline("train", "enwik8-smal-smoe")
    assert code == 2
    assert "did you mean enwik8-small-smoe" in err
    code, _, err = tieline("train")
    assert code == 2
    assert "name a recipe" in err


def test_the_schedule_of_a_temperature_is_chosen(tieline):
    options = ("--schedule", "linear", "--tau-start", 0.5, "--tau-end", 0.2)
    code, out, _ = tieline("train", "demo-smoke-cooled", *options, "--dry-run", "--json")
    assert code == 0
    cooling = json.loads(out)["config"]["gate"]["cooling"]
    assert (cooling["schedule"], cooling["start"], cooling["end"]) == ("linear", 0.5, 0.2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tau-start", 0], "must be positive and finite, got 0"),
        (["--tau-end", -0.1], "must be positive and finite, got -0.1"),
        (["--tau-start", "inf", "--tau-end", "inf"], "must be positive and finite, got inf"),
        (["--schedule", "linear", "--tau-start", 0.01], "from τ = 0.01 to 0.01 never hardens"),
        (["--schedule", "steep"], "'steep' is not one of"),
        (["--schedule", "boundary", "--halvings", 40], "1 <= halvings <= 20, got 40"),
        (["--schedule", "boundary", "--tau-end", 0.1], "--tau-end is for linear and cosine"),
        (["--halvings", 3], "--halvings is for the boundary schedule, not cosine"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_one_line(tieline, arguments, message):
    code, stdout, stderr = tieline("train", "demo-smoke-cooled", *arguments, "--dry-run")
    assert (code, stdout) == (2, "")
    assert message in stderr


def test_a_gate_without_a_temperature_has_no_schedule(tieline):
    code, _, stderr = tieline("train", "demo-smoke-smoe", "--schedule", "linear", "--dry-run")
    assert code == 2
    assert "demo-smoke-smoe has none" in stderr


def test_a_mass_that_cannot_be_halved_is_refused_with_the_rule(tieline, tmp_path):
    options = (
        "--schedule",
        "boundary",
        "--tau-start",
        1e-9,
        "--halvings",
        2,
        "-o",
        tmp_path / "run",
    )
    code, _, stderr = tieline("train", "demo-smoke-cooled", *options)
    assert code != 0
    assert "cannot be halved: use fewer halvings or a larger batch" in " ".join(stderr.split())
