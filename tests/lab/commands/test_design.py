"""tieline design from end to end."""

import json
from functools import partial

import pytest

from tieline.models.demo import DEMO_FOLDER

GIVEN = ["--n-experts", 64, "--k", 8, "--expert-width", 1024, "--d-eff", 4]


@pytest.fixture
def run(tieline):
    return partial(tieline, "design")


def test_a_given_layer_is_tabled(run):
    code, out, err = run(*GIVEN)
    assert (code, err) == (0, "")
    assert "8 of 64 experts · width 1024 · model width 2048 · d_eff 4" in out
    assert "E[pieces]" in out
    assert "holds:" in out


def test_all_outputs_are_written(run, tmp_path):
    outputs = ["--html", tmp_path / "a.html", "--figure", tmp_path / "a.png"]
    code, _, err = run(*GIVEN, *outputs, "--json", tmp_path / "a.json", "--split", "1,2")
    assert code == 0
    assert err.count("wrote") == 3
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["format"] == "tieline-design"
    assert [row["split"] for row in result["rows"]] == [1, 2]
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_json_goes_to_stdout_alone_and_the_seed_changes_nothing(run):
    first = run(*GIVEN, "--json")
    assert json.loads(first[1])["d_eff"] == 4
    assert first == run(*GIVEN, "--json", "--seed", 7)


def test_presets_are_listed_and_used(run):
    code, out, _ = run("--preset", "list")
    assert code == 0
    names = [line.split()[0] for line in out.splitlines()]
    assert {"mixtral-8x7b", "deepseek-v3", "olmoe", "qwen3-30b-a3b", "gpt-oss-20b"} <= set(names)
    result = json.loads(run("--preset", "gpt-oss-20b", "--d-eff", 4, "--hidden", 100, "--json")[1])
    shape = result["rows"][0]["shape"]
    assert (shape["n_experts"], shape["k"], shape["hidden"]) == (32, 4, 100)


def test_the_shape_of_a_model_comes_from_its_configuration(run):
    arguments = ["--model", DEMO_FOLDER, "--d-eff", 4, "--split", "1,2", "--shared", 1]
    result = json.loads(run(*arguments, "--json")[1])
    shape = result["rows"][0]["shape"]
    assert [shape[name] for name in ("n_experts", "k", "width", "hidden")] == [16, 2, 64, 128]
    assert (shape["shared"], result["source"]) == (1, str(DEMO_FOLDER))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "say which layer"),
        (["--n-experts", 4], "also give --k, --expert-width"),
        ([*GIVEN, "--preset", "olmoe"], "say which layer"),
        (["--preset", "nothing"], "no preset 'nothing': one of mixtral"),
        ([*GIVEN, "--split", "1,x"], "--split takes numbers"),
        ([*GIVEN, "--split", "1.5"], "whole numbers"),
        ([*GIVEN, "--split", "0"], "from 1 on"),
        ([*GIVEN, "--split", "3"], "divide the expert width 1024"),
        (["--n-experts", 4, "--k", 4, "--expert-width", 8], "nothing is routed"),
        ([*GIVEN, "--figure", "a.txt"], "a figure is"),
        ([*GIVEN, "--html", "no/such/folder/a.html"], "there is no folder"),
        ([*GIVEN, "--html", "a.png", "--figure", "a.png"], "one file for two outputs"),
        (["--model", "/no/such/model"], "/no/such/model"),
    ],
)
def test_bad_input_is_refused_with_code_2_and_one_message(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_model_is_measured_on_its_own_states(run, tmp_path):
    arguments = ["--model", "demo", "--measure", "--tokens", 128, "--split", 1, "--d-eff", 4]
    code, out, _ = run(*arguments, "--json", tmp_path / "a.json", "--html", tmp_path / "a.html")
    assert code == 0
    assert "per length" in out
    layers = json.loads((tmp_path / "a.json").read_text())["measured"]
    assert [layer["status"] for layer in layers] == ["ok"] * 4
    assert all(layer["neighbours"]["agreement"] > 0.99 for layer in layers)
    assert "Measured on the model" in (tmp_path / "a.html").read_text()


def test_measuring_needs_a_model(run):
    code, _, err = run(*GIVEN, "--measure")
    assert code == 2
    assert "--measure runs a model: name it with --model" in err
