"""The hub is asked once; without an answer, only the cache is used."""

import os
import subprocess
import sys

import huggingface_hub
import pytest

import tieline
from tieline.core.errors import UnsupportedModelError
from tieline.models import hub
from tieline.models.model import Model, load_dense, load_tokenizer, read_shape


@pytest.fixture
def hub_questions(monkeypatch, tmp_path):
    """Answers of the hub: exceptions to raise, in order; what was asked is kept."""
    questions = []

    def answer(url, **options):
        questions.append(url)
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "get_hf_file_metadata", answer)
    return questions


@pytest.mark.parametrize("opened", [Model.open, load_dense, load_tokenizer, read_shape])
def test_an_id_without_a_hub_is_refused_after_one_question(hub_questions, opened):
    with pytest.raises(
        UnsupportedModelError,
        match=r"'org/model' is no local folder, and the hub \(https://.*\) is not reachable",
    ):
        opened("org/model")
    assert len(hub_questions) == 1


def test_a_model_in_the_cache_is_read_from_there(hub_questions, monkeypatch):
    monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *_, **__: "config.json")
    assert hub.hub_options("org/model", "v2") == {"revision": "v2", "local_files_only": True}


def test_a_refusal_is_an_answer(hub_questions, monkeypatch):
    def refuse(url, **options):
        raise type("NotFound", (Exception,), {"response": object()})

    monkeypatch.setattr(hub, "get_hf_file_metadata", refuse)
    assert hub.hub_options("org/model", None) == {"revision": None}


def test_offline_asks_nobody(hub_questions, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert not hub.hub_answers("org/model")
    assert hub_questions == []


def test_the_demo_is_never_looked_for_on_the_hub(hub_questions):
    with pytest.raises(UnsupportedModelError):
        tieline.upcycle("demo")
    assert hub_questions == []


@pytest.mark.parametrize("arguments", [["upcycle", "demo"], ["inspect", "org/model"]])
def test_a_command_does_not_ask_a_hub_that_is_not_there_again(tmp_path, arguments):
    online = {name: os.environ[name] for name in os.environ if "OFFLINE" not in name}
    env = {**online, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    out = ["-o", str(tmp_path / "out")] if arguments[0] == "upcycle" else []
    command = [sys.executable, "-m", "tieline", *arguments, *out]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1][:7]) == (2, "error: "), done.stderr
    assert "Retrying" not in done.stderr
