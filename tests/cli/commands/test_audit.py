"""tieline audit from end to end: what it prints and writes, and how it refuses."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import pytest

from tieline import cli


@pytest.fixture
def run(tieline):
    return tieline


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One run of the model in the box with every output."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "words.md").write_text("for x in range(10):\n    print(x)\n" * 200)
    arguments = ["audit", "--tokens", 256, "--formats", "bf16, int4", "--seed", 3]
    arguments += ["--text", folder / "words.md", "--html", folder / "audit.html"]
    arguments += ["--json", folder / "audit.json", "--remedies", "model bf16,model int4"]
    with (
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("COLUMNS", "120")
        with pytest.raises(SystemExit) as left:
            cli.main(list(map(str, arguments)))
    code = left.value.code or 0
    ended = SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())
    return folder, ended


def test_a_run_writes_page_and_json_and_shows_a_row_per_perturbation(done):
    folder, ended = done
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    assert {path.name for path in folder.iterdir()} == {"audit.html", "audit.json", "words.md"}
    assert all(f"wrote {folder / name}" in ended.stderr for name in ("audit.html", "audit.json"))
    for name in ("router bf16", "router int4", "score noise 0.01", "model int4"):
        assert name in ended.stdout
    assert "Routers to keep in float32" in ended.stdout
    assert all(f"Remedies under model {name}" in ended.stdout for name in ("bf16", "int4"))
    assert "on the logits flips 1.0 % of tokens" in ended.stdout
    assert "words of text" not in ended.stdout


def test_the_json_names_its_format_and_where_it_is_from(done):
    result = json.loads((done[0] / "audit.json").read_text())
    assert (result["format"], result["version"]) == ("tieline-audit", 1)
    assert result["provenance"]["model"] == "demo"
    assert result["provenance"]["text"]["source"] == "words.md"
    assert result["provenance"]["seed"] == 3
    assert result["provenance"]["dtype"] == "float32"
    assert len(result["effects"]) == 2 * 2 + 3 + 2 + 2
    assert result["remedies"]["perturbations"] == ["model bf16", "model int4"]
    assert result["remedies"]["remedies"][0]["name"] == "nothing"
    assert result["verdict"] in json.dumps(result, ensure_ascii=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--formats", "bf16,int3"], "unknown format 'int3'"),
        (["--recover", "0"], "--recover"),
        (["--remedies", "router int3"], "router int3 is none of router bf16"),
        (["--budget-minutes", "-1"], "--budget-minutes must be positive"),
        (["--text", "/nowhere.txt"], "no such file"),
        (["--html", "/nowhere/audit.html"], "there is no folder"),
        (["--html", "a.json", "--json", "a.json"], "one file for two outputs"),
        (["/nowhere/model"], "nowhere"),
    ],
)
def test_bad_input_leaves_with_2_and_one_message(run, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("audit", *arguments)
    assert code == 2
    assert message in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []
