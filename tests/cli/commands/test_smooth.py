"""`tieline smooth`: the table, the saved model, and what is refused."""

import json

import pytest

from tieline.models import find_routers
from tieline.models.model import Model
from tieline.models.smoothed_router import router_smoothing

FEW = ["--tokens", 512, "--calibration", 512, "--rounds", 2, "--batch-size", 2]


def test_the_model_is_saved_with_its_table(tieline, tmp_path):
    out, record = tmp_path / "smooth", tmp_path / "told.json"
    code, shown, message = tieline("smooth", "-o", out, *FEW, "--budget", 2.4, "--json", record)
    assert (code, message.count("wrote")) == (0, 2)
    result = json.loads(record.read_text())
    assert json.loads((out / "tieline-smooth.json").read_text()) == result
    assert result["format"] == "tieline-smooth"
    assert result["smoothing"]["how"] == "budget 2.4"
    assert 2.2 < result["repair"]["experts_after"]["value"] < 2.6
    assert next(row["name"] for row in result["repair"]["rows"]) == "router bf16"
    for text in ("Experts per token", "router bf16", "Time of a forward pass", "ε"):
        assert text in shown
    loaded = Model.open(out).module
    assert all(router_smoothing(router) is not None for router in find_routers(loaded).values())
    code, _, message = tieline("smooth", out, *FEW)
    assert code == 2
    assert "smoothed already" in message
    code, _, message = tieline("smooth", "-o", out, *FEW)
    assert code == 2
    assert "is not empty: choose another folder or add --overwrite" in message


def test_json_goes_to_stdout(tieline):
    code, shown, _ = tieline("smooth", *FEW, "--epsilon", 0.2, "-b", 50, "--json")
    assert code == 0
    result = json.loads(shown)
    assert result["smoothing"]["b"] == 50
    ran = [(row["original"], row["implementation"]) for row in result["latency"]]
    assert ran == [("grouped_mm", "grouped_mm"), ("grouped_mm", "tieline")]


def test_time_is_measured_with_the_experts_that_are_asked_for(tieline):
    code, shown, _ = tieline("smooth", *FEW, "--epsilon", 0.2, "--experts-impl", "eager", "--json")
    assert code == 0
    ran = [(row["original"], row["implementation"]) for row in json.loads(shown)["latency"]]
    assert ran == [("eager", "eager")]


def test_the_width_follows_from_what_may_be_moved(tieline):
    code, shown, _ = tieline("smooth", *FEW, "--max-moved", 1e-3, "--json")
    assert code == 0
    assert "KL 0.001 under router bf16" in json.loads(shown)["smoothing"]["how"]


def test_the_width_is_that_nearest_to_the_original(tieline):
    code, shown, _ = tieline("smooth", *FEW, "--near-original", "--json")
    assert code == 0
    how = json.loads(shown)["smoothing"]["how"]
    assert how.startswith("nearest to the original under router bf16: ε = ")
    assert "of what flips cost, of at most " in how
    rows = {row["name"]: row for row in json.loads(shown)["repair"]["rows"]}
    assert json.loads(shown)["near_original"] == "router bf16"
    assert rows["router bf16"]["gain"]["value"] < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--budget", 17], "between k and --k-max"),
        (["--gate", "laplace"], "--gate must be one of projected, ramp, got 'laplace'"),
        (["--gate", "projected", "-b", 50], "belong to the ramp"),
        (["--epsilon", -1], "positive and finite, got -1"),
        (["--epsilon", 0], "positive and finite, got 0"),
        (["--max-moved", -1], "positive and finite, got -1"),
        (["--epsilon", 0.1, "--noise", "bf16"], "no other choice"),
        (["--factor", 8, "--budget", 2.3], "--factor and --budget each choose"),
        (["--near-original", "--budget", 2.3], "--budget and --near-original each choose"),
        (["--near-original", "-b", 50], "is for projected top-k"),
        (["--factor", 0.5], "above 1 and finite, got 0.5"),
        (["--max-moved", 100], "the largest KL to the original is"),
        (["--noise", "bf17"], "unknown precision"),
        (["--tokens", 10**7, "--calibration", 10**7], "too few"),
        (["--experts-impl", "nothing"], "nothing"),
    ],
)
def test_bad_wishes_are_refused_in_one_line(tieline, arguments, message):
    code, shown, error = tieline("smooth", *FEW, *arguments)
    assert (code, shown) == (2, "")
    assert message in error
