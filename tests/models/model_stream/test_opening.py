"""Streaming from a hub file by file, against a stand-in on this machine; and when to stream."""

import hashlib
import json
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from tests.models.model_stream.test_passes import first, saved, some_batches
from tieline.core.errors import StreamingWarning, UnsupportedModelError
from tieline.core.memory import free_memory, resident_memory
from tieline.models import model_stream
from tieline.models.model_stream import exceeds_free_memory, open_stream
from tieline.models.saved_models import load_pretrained
from tieline.run.forward import forward, only_running
from tieline.run.streamed_passes import PassJob, run_in_lockstep

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.cpu("streamed models run on the CPU; another device is refused"),
]

COMMIT = "c" * 40


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does to those who list, look at and fetch files of one model."""

    def __init__(self, folder, fetched, *call):
        self.folder, self.asked = folder, fetched
        super().__init__(*call)

    def do_HEAD(self):
        self.do_GET(body=False)

    def do_GET(self, body=True):
        if self.path.startswith("/api/models/"):
            data = json.dumps(self.listed("/tree/" in self.path)).encode()
            return self.answer(200, data, body, "application/json")
        file = self.folder / self.path.rpartition("/")[2]
        if not file.is_file():
            return self.answer(404, b"", body)
        data = file.read_bytes()
        byte_range = self.headers.get("Range")
        if byte_range:
            start, stop = byte_range.removeprefix("bytes=").split("-")
            data = data[int(start) : int(stop) + 1 if stop else None]
        elif body:
            self.asked.append(file.name)
        return self.answer(206 if byte_range else 200, data, body, etag=digest(file))

    def listed(self, tree):
        files = sorted(self.folder.iterdir())
        if not tree:
            names = [{"rfilename": file.name} for file in files]
            return {"id": "some/model", "sha": COMMIT, "siblings": names}
        kind = {"type": "file"}
        return [kind | {"path": f.name, "size": f.stat().st_size, "oid": digest(f)} for f in files]

    def answer(self, code, data, body, kind="application/octet-stream", etag="x"):
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *arguments):
        """Say nothing."""


def digest(file):
    return hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The folder that the hub serves, and the files that were fetched whole."""
    folder, fetched = saved(tmp_path / "model", "olmoe"), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Hub, folder, fetched))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    yield folder, fetched
    server.shutdown()
    thread.join()
    server.server_close()


def run(stream):
    with only_running(stream.model):
        jobs = [lambda ids=ids: first(forward(stream.model, ids)) for ids in some_batches()]
        return run_in_lockstep(stream, list(map(PassJob, jobs)))


def read(folder, **options):
    return load_pretrained(folder, dtype=torch.float32, **options)


@pytest.mark.parametrize("keep", [True, False])
def test_files_of_the_hub_come_one_by_one_and_go(hub, keep, tmp_path):
    folder, fetched = hub
    names = sorted(file.name for file in folder.glob("*.safetensors"))
    stream = open_stream("some/model", read, keep=keep)
    assert not set(fetched) & set(names)  # headers alone
    outputs, expected = run(stream), run(open_stream(folder, read))
    assert all(map(torch.equal, outputs, expected))
    assert sorted(name for name in fetched if name in names) == names  # each once
    left = [file for file in (tmp_path / "cache").rglob("*.safetensors") if file.exists()]
    assert len(left) == (len(names) if keep else 0)


def test_a_file_that_is_gone_from_the_hub_ends_the_run(hub):
    folder, _ = hub
    stream = open_stream("some/model", read)
    next(folder.glob("*.safetensors")).unlink()
    with pytest.raises(UnsupportedModelError, match="cannot fetch"):
        run(stream)


def test_a_model_is_streamed_unasked_where_it_exceeds_the_free_memory(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", "olmoe", torch.bfloat16)
    assert free_memory() > resident_memory() // 100 > 0
    assert not exceeds_free_memory(folder, torch.float32)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    monkeypatch.setattr(model_stream, "free_memory", lambda: int(1.5 * size))
    assert not exceeds_free_memory(folder, torch.bfloat16)
    with pytest.warns(StreamingWarning, match="are read layer by layer"):
        assert exceeds_free_memory(folder, torch.float32)
