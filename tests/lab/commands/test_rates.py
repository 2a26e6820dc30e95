"""tieline rates from end to end."""

import json
from functools import partial

import pytest

from tieline.lab.estimation.rates import LOSSES

QUICK = ["--gate", "linear", "--expert", "linear", "--dim", 1, "--n-experts", 2]
GRID = ["--sizes", "200,800", "--repetitions", 4, "--radius", "0.02,0.1", "--executor", "serial"]


@pytest.fixture
def run(tieline):
    return partial(tieline, "rates")


def test_slopes_are_tabled_after_an_estimate_of_the_time(run):
    code, out, err = run(*QUICK, *GRID, "--error", 0.05)
    assert code == 0
    assert "linear-softmax-linear-d1-k2: about" in err
    output = " ".join(out.split())
    phrases = ("quotient r = 0.02", "raw r = 0.1", "‖f − f*‖", "95 % interval", "16 fits:")
    for part in (*phrases, "· condition "):
        assert part in output
    assert "for error 0.05 you need about" in output


def test_every_output_is_written_and_a_second_run_fits_nothing(run, tmp_path):
    files = [
        "--figure",
        tmp_path / "a.png",
        "--html",
        tmp_path / "a.html",
        "--json",
        tmp_path / "a.json",
    ]
    arguments = [*QUICK, *GRID, *files, "--results", tmp_path / "rows.jsonl"]
    code, _, err = run(*arguments)
    assert code == 0
    assert err.count("wrote") == 3
    first = json.loads((tmp_path / "a.json").read_text())
    assert first["format"] == "tieline-rates"
    assert len(first["series"]) == len(LOSSES) * 2
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "falls like" in (tmp_path / "a.html").read_text()
    assert len((tmp_path / "rows.jsonl").read_text().splitlines()) == 16
    code, _, err = run(*arguments)
    assert "about 0 s" in err
    assert json.loads((tmp_path / "a.json").read_text()) == first


def test_json_on_stdout_is_json_alone_and_the_seed_matters(run):
    first = json.loads(run(*QUICK, *GRID, "--json")[1])
    again = json.loads(run(*QUICK, *GRID, "--json", "--seed", 1)[1])
    assert first["sample_size"] is None
    assert first["series"][0]["mean"] != again["series"][0]["mean"]


def test_fewer_samples_than_parameters_are_told_and_stay_out_of_the_slopes(run):
    arguments = [*QUICK, "--repetitions", 4, "--executor", "serial"]
    code, out, _ = run(*arguments, "--sizes", "5,200,800")
    assert code == 0
    output = " ".join(out.split())
    assert "warning: n = 5: fewer samples than the 8 parameters, so a ridge picks" in output
    few = json.loads(run(*arguments, "--sizes", "5,200,800", "--json")[1])
    enough = json.loads(run(*arguments, "--sizes", "200,800", "--json")[1])
    assert few["ridge"]["sizes"] == [5]
    assert enough["ridge"] == {"sizes": [], "words": ""}
    assert [series["rate"] for series in few["series"]] == [
        series["rate"] for series in enough["series"]
    ]
    assert few["series"][0]["sizes"] == [5, 200, 800]


def test_too_few_samples_alone_give_losses_and_no_slope(run):
    arguments = [*QUICK, "--sizes", "5,7", "--repetitions", 2, "--executor", "serial"]
    code, out, _ = run(*arguments, "--json")
    result = json.loads(out)
    assert code == 0
    assert result["ridge"]["words"].startswith("n = 5, 7: fewer samples than the 8 parameters")
    assert [series["rate"] for series in result["series"]] == [None] * len(LOSSES)
    code, out, err = run(*arguments, "--error", 0.05)
    assert (code, out) == (2, "")
    assert "two sample sizes of at least 8, the number of parameters, got [5, 7]" in err


def test_the_list_names_the_published_settings(run):
    code, out, _ = run("--list")
    assert code == 0
    assert len([line for line in out.splitlines() if line.startswith(("p2-", "p4-"))]) == 16
    assert "small-GATE-LINK-EXPERT" in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "say which setting"),
        (["p7-1a"], "unknown setting 'p7-1a'"),
        (["p2-1a-cosine", "--gate", "linear"], "leave out --gate"),
        ([*QUICK, "--sizes", "many"], "--sizes takes numbers"),
        ([*QUICK, "--sizes", "800,200"], "sample sizes grow"),
        ([*QUICK, "--radius", "inf"], "finite numbers"),
        ([*QUICK, "--radius", "-1"], "not negative"),
        ([*QUICK, "--repetitions", 1], "--repetitions must be at least 2, got 1"),
        ([*QUICK, "--repetitions", 10**18], "--repetitions must be at most 1,000,000, got 1000"),
        ([*QUICK, "--fitted", 1], "at least the 2 true experts"),
        ([*QUICK, "--executor", "warp"], "executor must be one of"),
        ([*QUICK, "--figure", "a.gif"], "a figure is"),
        ([*QUICK, "--results", "/nowhere/rows"], "there is no /nowhere"),
        (["--gate", "magic"], "gate must be one of"),
        ([*QUICK, "--method", "em"], "method must be one of"),
    ],
)
@pytest.mark.usefixtures("no_axis_checks")
def test_bad_input_leaves_with_2_and_one_message(run, arguments, reason):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert reason in err


def test_one_file_for_two_outputs_is_refused(run, tmp_path):
    path = tmp_path / "a.png"
    code, _, err = run(*QUICK, "--figure", path, "--results", path)
    assert code == 2
    assert "one file for two outputs" in err
