"""tieline reproduce from end to end: its output, files and exit codes."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tieline.lab.claims import claim as claim_module
from tieline.lab.claims.claim import Verdict

QUICK = ["p0-lem6.2", "p1-table6", "p1-eqA.7"]


@pytest.fixture
def run(tieline, tmp_path):
    def reproduce(*arguments):
        executor = () if "--executor" in arguments else ("--executor", "serial")
        return tieline("reproduce", *arguments, "--results", tmp_path / "results", *executor)

    return reproduce


def test_verdicts_as_expected_leave_with_0_and_write_everything(run, tmp_path):
    page, record = tmp_path / "ledger.html", tmp_path / "ledger.json"
    code, out, err = run(*QUICK, "--fast", "--html", page, "--json", record)
    assert code == 0
    assert all(name in out for name in QUICK)
    assert "None changed" in out
    assert f"wrote {page}" in err
    ledger = json.loads(record.read_text())
    assert (ledger["format"], ledger["changed"], ledger["broken"]) == ("tieline-ledger", [], [])
    assert [o["claim"]["id"] for o in ledger["claims"]] == QUICK
    assert page.read_text().count('<section class="panel" id="p') == 3
    assert len(list((tmp_path / "results").iterdir())) == 3


def test_json_on_stdout_is_json_alone(run):
    code, out, _ = run("p0-lem6.2", "--fast", "--json")
    assert code == 0
    (outcome,) = json.loads(out)["claims"]
    assert outcome["evidence"]["paper"] == pytest.approx(1.5957691216)
    assert outcome["verdict"] == "holds"


def test_a_verdict_that_changed_leaves_with_1(run, monkeypatch):
    claims = claim_module.all_claims()
    wrong = replace(claims["p0-lem6.2"], expected=Verdict.FAILS)
    monkeypatch.setitem(claim_module.CLAIMS, "p0-lem6.2", wrong)
    code, out, err = run("p0-lem6.2", "--fast")
    assert code == 1
    assert "expected: does not hold" in " ".join(out.split())
    assert "verdicts changed: p0-lem6.2" in err


def test_a_test_that_breaks_leaves_with_3(run, monkeypatch):
    def broken(run):
        raise RuntimeError("torn")

    claims = claim_module.all_claims()
    monkeypatch.setitem(claim_module.CLAIMS, "p0-lem6.2", replace(claims["p0-lem6.2"], test=broken))
    code, out, err = run("p0-lem6.2", "p1-table6", "--fast")
    assert code == 3
    assert "RuntimeError: torn" in out
    assert "tests broke: p0-lem6.2" in err


def test_the_list_tests_nothing(run, tmp_path):
    code, out, _ = run("--list", "--all")
    assert code == 0
    assert len(out.splitlines()) > 90
    assert "p1-thm5.3" in out
    code, out, _ = run("1", "--list", "--json")
    assert {claim["paper"] for claim in json.loads(out)["claims"]} == {1}
    assert not (tmp_path / "results").exists()


def test_the_list_fits_a_screen(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run("--list")
    assert code == 0
    assert len(out.splitlines()) <= 40
    assert max(map(len, out.splitlines())) <= 80
    assert f"all {len(claim_module.all_claims())}" in out.replace("\n", " ")
    assert "p0-lem6.2" in run("0", "--list")[1]
    assert run("p0-lem6.2", "--all")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["p7"], "no paper or claim is called 'p7'"),
        (["p0-lem6.2", "--executor", "warp"], "executor must be one of"),
        (["p0-lem6.2", "--address", "tcp://x:1"], "--address is for --executor dask, not"),
        (["p0-lem6.2", "--jobs", "0"], "--jobs must be at least 1, or -1"),
        (["p0-lem6.2", "--html", "/nowhere/a.html"], "there is no folder"),
    ],
)
def test_bad_input_leaves_with_2_and_one_message(run, arguments, reason):
    code, out, err = run(*arguments, "--fast")
    assert (code, out) == (2, "")
    assert reason in err


def test_one_file_for_two_outputs_is_refused(run, tmp_path):
    path = tmp_path / "x.json"
    assert run("p0-lem6.2", "--html", path, "--json", path)[0] == 2


def test_results_go_to_the_user_s_cache_by_default(tieline, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, _, _ = tieline("reproduce", "p0-lem6.2", "--fast", "--executor", "serial")
    assert code == 0
    assert len(list((tmp_path / "tieline" / "claims").iterdir())) == 1


@pytest.mark.slow
def test_the_command_in_a_process_of_its_own_with_workers(tmp_path):
    command = [sys.executable, "-m", "tieline", "reproduce", *QUICK, "--fast", "--jobs", "2"]
    ended = subprocess.run(
        [*command, "--results", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert len(list(tmp_path.iterdir())) == 3
