"""tieline serve-check and tieline capture of a running server: exit codes, files, bad servers."""

import json

import pytest

from tests.engines.servers import LittleServer, rule_routes, serving
from tieline.trace.store import load_trace

OPTIONS = ("--tokenizer", "demo", "--retries", 0)


def batch_dependent(prompts):
    """Routes that differ in layer 1, token 3 when requests are batched."""
    answers = [rule_routes(ids) for ids in prompts]
    if len(prompts) > 1:
        answers[-1][3, 1] = [0, 1] if {*answers[-1][3, 1]} != {0, 1} else [0, 2]
    return answers


def test_an_invariant_server_ends_with_0(tieline):
    with serving(LittleServer()) as url:
        code, out, _ = tieline("serve-check", url, "--count", 4, "--length", 8, *OPTIONS)
    assert code == 0
    assert "Batch-invariant here" in out


def test_a_dependence_ends_with_1_and_everything_is_written(tieline, tmp_path):
    page, data = tmp_path / "a.html", tmp_path / "a.json"
    with serving(LittleServer(batch_dependent)) as url:
        code, _, err = tieline(
            "serve-check", url, "--count", 4, "--length", 8, "--batch-size", 2, *OPTIONS,
            "--html", page, "--json", data,
        )  # fmt: skip
    assert code == 1, err
    content = json.loads(data.read_text())
    first = content["ways"][2]["first"]
    assert (first["layer"], first["token"], first["prompt"]) == (1, 3, 1)
    assert "layer 1, token 3 of prompt 1" in page.read_text()


def test_a_server_is_captured_into_a_trace(tieline, tmp_path):
    (tmp_path / "prompts.txt").write_text("A first prompt\nAnd a second one\n")
    with serving(LittleServer()) as url:
        code, out, _ = tieline(
            "capture", url, "--engine", "vllm", "--prompts", tmp_path / "prompts.txt", *OPTIONS,
            "-o", tmp_path / "trace",
        )  # fmt: skip
    assert code == 0
    assert "2 documents" in out
    assert len(load_trace(tmp_path / "trace").layers) == 4


@pytest.mark.parametrize("failure", [(500, {}, b"broken"), (429, {}, b""), (401, {}, b"")])
def test_a_server_that_fails_half_way_leaves_nothing(tieline, tmp_path, failure, monkeypatch):
    monkeypatch.setenv("TIELINE_API_KEY", "sk-secret")
    server = LittleServer()
    with serving(server) as url:
        plain = server.answer

        def answer(path, question):
            server.failures = [failure] * 100
            return plain(path, question)

        server.answer = lambda *x: answer(*x) if x[1] is not None else plain(*x)
        code, out, err = tieline(
            "capture", url, "--engine", "vllm", *OPTIONS, "-o", tmp_path / "trace"
        )
    assert code == 2
    assert len(err.strip().splitlines()) <= 3
    assert "secret" not in out + err
    assert list(tmp_path.iterdir()) == []
