"""The command line from end to end: what it prints and writes, and how it refuses."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from tests.report.zoo import make_inspection
from tieline import __version__
from tieline.analysis import inspect as analysis
from tieline.analysis.inspect_observations import inspection_metric_names
from tieline.analysis.job_settings import InspectSettings
from tieline.core.errors import TielineError
from tieline.models.demo import DEMO_FOLDER
from tieline.trace import load_trace

TOKENS = 384


@pytest.fixture
def run(tieline):
    return tieline


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One run of the model in the box with every output, in a process of its own."""
    folder = tmp_path_factory.mktemp("run")
    arguments = ["inspect", "--tokens", TOKENS, "--html", folder / "report.html"]
    arguments += ["--json", folder / "a.json", "--figure", folder / "a.pdf"]
    arguments += ["--save-trace", folder / "trace", "--seed", 3, "--fail-if", "evenness<2"]
    arguments += ["--fail-if", "dead>1e6", "--layers", "1,2-3", "--text", folder / "words.md"]
    (folder / "words.md").write_text("for x in range(10):\n    print(x)\n" * 200)
    ended = subprocess.run(
        [sys.executable, "-m", "tieline", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )
    return folder, ended


def test_a_run_writes_everything_and_says_so(done):
    folder, ended = done
    names = {"report.html", "a.json", "a.pdf", "trace"}
    assert {path.name for path in folder.iterdir()} == {*names, "words.md"}, ended.stderr
    assert all(f"wrote {folder / name}" in ended.stderr for name in names)
    assert "Traceback" not in ended.stderr
    assert (folder / "report.html").stat().st_size <= 6_000_000


def test_the_page_of_a_run_holds_no_address_of_another_site(done):
    page = (done[0] / "report.html").read_text()
    assert set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}", page)) <= {"http://www.w3.org"}


def test_a_condition_that_holds_fails_the_run_after_its_files_are_written(done):
    _, ended = done
    assert ended.returncode == 1
    assert re.search(r"failed: evenness<2 \(evenness is 0\.\d+\)", ended.stderr)
    assert "dead" not in ended.stderr


def test_the_terminal_shows_a_row_per_layer_and_the_findings(done):
    _, ended = done
    assert f"3 routed layers · 2 of 16 experts · {TOKENS} tokens · float32" in ended.stdout
    rows = [line.split() for line in ended.stdout.splitlines()]
    table = [row for row in rows if len(row) > 5 and row[0] in "0123" and row[1][0].isdigit()]
    assert [row[0] for row in table] == ["1", "2", "3"]
    assert "▲" in ended.stdout or "◆" in ended.stdout


def test_the_json_is_the_inspection_and_its_metrics_are_known(done):
    folder, _ = done
    read = json.loads((folder / "a.json").read_text())
    assert (read["format"], read["version"]) == ("tieline-inspection", 1)
    assert read["provenance"]["model"] == "demo"
    assert read["provenance"]["seed"] == 3
    assert read["provenance"]["text"]["source"] == "words.md"
    assert len(read["measures"]["layers"]) == 3
    assert set(read["metrics"]) == inspection_metric_names(loss_jumps=False)


@pytest.mark.slow
def test_what_flips_do_to_the_loss_is_measured_on_request(run):
    code, out, err = run("inspect", "--tokens", "64", "--loss-jumps", "--json", "--layers", "2")
    assert code == 0, err
    read = json.loads(out)
    assert set(read["metrics"]) == inspection_metric_names(loss_jumps=True)
    assert read["jumps"][0]["value"]["loss"]["swaps"] > 0


def test_the_saved_trace_can_be_loaded(done):
    folder, _ = done
    trace = load_trace(folder / "trace")
    assert trace.n_tokens == TOKENS
    assert len(trace.layers) == 3


def test_a_saved_trace_of_the_model_in_the_box_is_titled_demo(run, tmp_path):
    assert run("inspect", "--tokens", 64, "--no-jumps", "--save-trace", tmp_path / "trace")[0] == 0
    code, out, err = run("inspect", tmp_path / "trace")
    assert (code, out.split()[0]) == (0, "demo"), err


def test_what_was_saved_is_shown_again(done, run, tmp_path):
    folder, _ = done
    read = json.loads((folder / "a.json").read_text())
    code, out, err = run("inspect", folder / "a.json", "--html", tmp_path / "again.html")
    assert code == 0, err
    assert "words.md" in (tmp_path / "again.html").read_text()
    assert run("inspect", folder / "a.json", "--json")[1] == (folder / "a.json").read_text()
    code, out, err = run("inspect", folder / "trace", "--json", "--fail-if", "flip@bf16>2")
    assert code == 0, err
    record = json.loads(out)
    assert record["metrics"]["flip@bf16"] == read["metrics"]["flip@bf16"]
    assert record["jumps"][0]["status"] == "not measured: jumps need the model"
    for name in ("a.json", "trace"):
        code, _, err = run("inspect", folder / name, "--tokens", 3, "--layers", 0)
        assert (code, "--tokens, --layers is for models" in err) == (2, True), err
    code, _, err = run("inspect", folder / "a.json", "--fail-if", "loss>1")
    assert (code, "no metric 'loss' here" in err) == (2, True), err


def test_stdout_is_the_json_alone_where_it_is_asked_for(run, monkeypatch):
    arguments = {}

    def inspected(source, **options):
        arguments.update(options, source=source)
        return replace(make_inspection(), metrics={"dead": 3.0})

    monkeypatch.setattr(analysis, "inspect", inspected)
    code, out, err = run("inspect", "--json", "a/model", "--tokens", "64", "--fail-if", "dead>2")
    assert (code, err) == (1, "failed: dead>2 (dead is 3.000)\n")
    assert json.loads(out)["metrics"] == {"dead": 3.0}
    assert (arguments["source"], arguments["settings"]) == ("a/model", InspectSettings(tokens=64))


def test_version_and_help_need_no_model(run):
    assert run("--version") == (0, f"tieline {__version__}\n", "")
    code, out, _ = run("inspect", "--help")
    assert code == 0
    for option in ("--fail-if", "--json", "--seed", "--save-trace", "--trust-remote-code"):
        assert option in out
    code, out, _ = run("merge", "--help")
    assert "--json" in out
    assert "--seed" not in out  # nothing is drawn at random


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "@/missing.txt"], "no such file"),
        (["--text", "@/empty.txt"], "empty.txt is empty"),
        (["--text", "@/binary.txt"], "binary.txt is a binary file"),
        (["--html", "@/missing/report.html"], "there is no folder"),
        (["--html", "@"], "it is a folder"),
        (["--figure", "@/a.gif"], "a figure is"),
        (["--save-trace", "@/full"], "full is not empty"),
        (
            ["--fail-if", "flop>1"],
            "no metric 'flop' here; known: changed@model bf16, cold",
        ),
        (["--fail-if", "loss>1"], "no metric 'loss' here"),
        (["--fail-if", "print(1)"], "cannot read the condition 'print(1)'"),
        (["--layers", "3-1"], "--layers"),
        (["--layers", "99"], "no layers [99]"),
        (["--dtype", "fp7"], "--dtype must be one of"),
        (["--device", "abacus"], "device 'abacus' cannot be used"),
        (["@/missing"], "missing"),
        (["@/full"], "no config.json in the folder"),
        (["--no-such-flag"], "No such option"),
        (["--tokens", "many"], "--tokens"),
        (["--tokens", "0"], "--tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_nothing_is_written(run, tmp_path, arguments, message):
    """@ stands for the folder of the test."""
    (tmp_path / "full").mkdir()
    for name, data in (("full/x", b"x"), ("empty.txt", b"\n"), ("binary.txt", b"\0")):
        (tmp_path / name).write_bytes(data)
    before = sorted(tmp_path.rglob("*"))
    placed = [
        argument.replace("@", str(tmp_path), 1) if argument[0] == "@" else argument
        for argument in arguments
    ]
    code, out, err = run("inspect", "--tokens", "64", "--json", tmp_path / "r.json", *placed)
    assert (code, out) == (2, ""), err
    assert message in err
    assert "Traceback" not in err
    assert sorted(tmp_path.rglob("*")) == before


def dense_model(folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_model_without_experts_is_refused_by_name(run, tmp_path):
    folder = dense_model(tmp_path / "dense")
    code, _, err = run("inspect", folder, "--html", tmp_path / "r.html")
    assert code == 2, err
    assert "error: " in err
    assert "Llama" in err
    assert not (tmp_path / "r.html").exists()


def test_scores_that_are_no_numbers_are_refused_with_their_layer(run, tmp_path):
    from tieline.models.demo import load_demo_model, load_demo_tokenizer

    model = load_demo_model()
    with torch.no_grad():
        model.model.layers[2].mlp.gate.weight[5] = torch.nan
    model.save_pretrained(tmp_path / "broken")
    load_demo_tokenizer().save_pretrained(tmp_path / "broken")
    code, _, err = run(
        "inspect", tmp_path / "broken", "--tokens", "64", "--html", tmp_path / "r.html"
    )
    assert code == 2, err
    assert "weight 'model.layers.2.mlp.gate.weight': 128 of 2,048 values are NaN" in err
    assert not (tmp_path / "r.html").exists()


@pytest.mark.parametrize(
    ("problem", "code", "message"),
    [
        (RuntimeError("lost a screw"), 3, "this is a bug of tieline: RuntimeError: lost a screw"),
        (TielineError("no such thing"), 2, "error: no such thing"),
        (PermissionError(13, "Permission denied", "x"), 2, "error: x: permission denied"),
        (ModuleNotFoundError("No module named 'plotly'", name="plotly"), 2, "tieline[report]"),
        (ModuleNotFoundError("No module named 'x'", name="x"), 3, "this is a bug of tieline"),
        (KeyboardInterrupt(), 130, "stopped"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
@pytest.mark.parametrize("debug", [False, True])
def test_every_end_has_its_code_and_a_traceback_only_on_request(
    run, monkeypatch, problem, code, message, debug
):
    def fails(*args, **options):
        raise problem

    monkeypatch.setattr(analysis, "inspect", fails)
    ended, out, err = run("inspect", *(["--debug"] if debug else []))
    assert (ended, out) == (code, "")
    assert message in err
    assert ("Traceback" in err) == debug


def test_what_was_not_saved_names_the_command_that_measures_it(done, run):
    folder, _ = done
    code, _, message = run("inspect", folder / "a.json", "--loss-jumps")
    assert (code, "run tieline inspect demo --loss-jumps\n" in message) == (2, True), message
    code, _, message = run("inspect", folder / "a.json", "--expert-tokens", 7)
    assert (code, "--expert-tokens is for models" in message) == (2, True), message
    code, _, message = run("inspect", folder / "trace", "--loss-jumps")
    assert (code, "run tieline inspect MODEL --loss-jumps" in message) == (2, True), message
    assert run("inspect", folder / "trace", "--expert-tokens", 7)[0] == 0


def test_no_condition_on_flips_holds_where_all_experts_are_chosen(run, tmp_path):
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["num_experts_per_tok"] = config["num_experts"]
    (folder / "config.json").write_text(json.dumps(config))
    arguments = ["inspect", folder, "--tokens", 64, "--no-jumps", "--dtype", "fp32"]
    code, shown, message = run(*arguments, "--fail-if", "flip@bf16>0.02", "--fail-if", "dead>99")
    assert code == 0, message
    assert "All experts are chosen: no tie is possible." in " ".join(shown.split())
    code, _, message = run(*arguments, "--fail-if", "flip@bf16>0.02", "--fail-if", "evenness>0.5")
    assert code == 1
    assert "failed: evenness>0.5" in message
