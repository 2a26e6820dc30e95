"""Real servers of vLLM and SGLang on this machine: what they return over HTTP is what runs offline.

    TIELINE_TEST_ENGINES=1 python -m pytest tests/engines/server_routes/test_real_server.py

SGLang runs where `TIELINE_SGLANG_PACKAGES` names the folders of its packages and their needs.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

import tieline
from tieline.analysis.serve_check import serve_check
from tieline.core.errors import TielineError
from tieline.engines.engine_capture import capture_engine
from tieline.engines.engine_registry import engine_named, environment_of, find_python
from tieline.engines.server_client import ServerClient, ServerError
from tieline.models.demo import DEMO_FOLDER

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        not os.environ.get("TIELINE_TEST_ENGINES"),
        reason="set TIELINE_TEST_ENGINES=1 (make test-engines)",
    ),
]
START_SECONDS = 420
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
TEXT = {"tokens": 512, "sequence_length": 64}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTIONS = ["What does this function return?", "Why?", "Sort a list of numbers in place."]


def _wait_until_up(url, process, log):
    """Return once the server answers; fails with the end of its log if it ends or takes long."""
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends and process.poll() is None:
        with suppress(ServerError):
            return ServerClient(url, timeout=5.0, retries=0).ask("/v1/models")
        time.sleep(2)
    return pytest.fail(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


@contextmanager
def _server(folder, engine="vllm", **variables):
    """A server of the demo model with a chat template; its address."""
    try:
        python = find_python(engine_named("vllm"))
    except TielineError as problem:
        pytest.skip(str(problem))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script, log = Path(__file__).parents[1] / f"{engine}_server.py", folder / "log"
    model = shutil.copytree(DEMO_FOLDER, folder / "model")
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    command = [str(python), str(script), str(model), str(port)]
    environment = environment_of(engine_named("vllm"), python) | SETTINGS | variables
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        address = f"http://127.0.0.1:{port}"
        _wait_until_up(address, process, log)
        yield address
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with _server(tmp_path_factory.mktemp("log")) as address:
        yield address


@pytest.fixture(scope="module")
def sglang_url(tmp_path_factory):
    packages = os.environ.get("TIELINE_SGLANG_PACKAGES")
    if not packages:
        pytest.skip("TIELINE_SGLANG_PACKAGES names no folder")
    with _server(tmp_path_factory.mktemp("log"), "sglang", PYTHONPATH=packages) as address:
        yield address


def test_a_dependence_on_the_batch_is_named_where_it_begins(tmp_path):
    with _server(tmp_path, PLANTED_DEPENDENCE="1") as address:
        result = serve_check(
            address, count=8, length=32, batch_size=4, model="demo", precision="fp32"
        )
    schedules = {schedule.way: schedule for schedule in result.ways}
    assert schedules["repeated"].flipped == 0
    first = schedules["batched"].first
    assert first is not None
    assert (first.layer, first.near_tie) == (2, False)
    assert 0 in first.entered
    assert not result.invariant


def test_routes_over_http_are_those_of_the_engine_offline(url):
    served = capture_engine(url, engine="vllm", **TEXT)
    offline = capture_engine("demo", engine="vllm", **TEXT)
    assert (served.tokens, served.n_experts, served.k) == (offline.tokens, 16, 2)
    assert [layer.name for layer in served.trace.layers] == list(offline.layers)
    result = tieline.diff(served.trace, offline.trace)
    assert (result.tokens.anywhere.total, result.tokens.anywhere.count) == (512, 0)
    assert [layer.flip.value for layer in result.layers] == [0, 0, 0, 0]


def chat_captures(url, engine, tmp_path):
    """Chats that the server tokenises, and that are tokenised here."""
    chats = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    options = {"engine": engine, "prompts": tmp_path / "chats.jsonl"}
    by_server = capture_engine(url, **options)
    here = capture_engine(
        url, tokenizer=ServerClient(url).ask("/v1/models")["data"][0]["root"], **options
    )
    assert by_server.settings["chats tokenised by the server"] == len(chats)
    assert "chats tokenised by the server" not in here.settings
    assert torch.equal(by_server.trace.tokens, here.trace.tokens)
    return by_server.trace, here.trace


def flipped_tokens(a, b):
    return tieline.diff(a, b).tokens.anywhere.count


def test_chats_have_the_routes_of_their_tokens(url, tmp_path):
    by_server, here = chat_captures(url, "vllm", tmp_path)
    offline = capture_engine("demo", engine="vllm", tokens_from=by_server)
    assert flipped_tokens(by_server, here) == flipped_tokens(by_server, offline.trace) == 0


def test_sglang_chooses_as_transformers_does_in_float32(sglang_url, tmp_path):
    served = capture_engine(sglang_url, engine="sglang", **TEXT)
    offline = capture_engine("demo", dtype="fp32", **TEXT)
    assert (served.tokens, served.n_experts, served.k) == (offline.tokens, 16, 2)
    assert flipped_tokens(served.trace, offline.trace) == 0
    by_server, here = chat_captures(sglang_url, "sglang", tmp_path)
    by_demo = capture_engine("demo", dtype="fp32", tokens_from=by_server)
    assert flipped_tokens(by_server, here) == flipped_tokens(by_server, by_demo.trace) == 0
    options = {"count": 8, "length": 32, "batch_size": 4, "model": "demo", "precision": "fp32"}
    assert serve_check(sglang_url, engine="sglang", **options).invariant


def test_a_float32_server_is_silent(url):
    result = serve_check(url, count=8, length=32, batch_size=4, model="demo", precision="fp32")
    assert [way.flipped for way in result.ways] == [0, 0, 0, 0]
    assert result.invariant
    assert result.verdict.startswith("Batch-invariant here")
