"""A little HTTP server in this process that answers in the forms of vLLM and SGLang.

The routes are those of the demo model, or of an arithmetic rule, so that every answer is known.
"""

import base64
import io
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np

LAYERS, EXPERTS, K = 4, 16, 2


def rule_routes(ids):
    """Experts (tokens, layers, k) of a prompt: they depend on the token and those before it."""
    sums = np.cumsum(ids)[:, None] + 7 * np.arange(LAYERS)
    return np.stack([sums % EXPERTS, (sums + 1 + np.arange(LAYERS)) % EXPERTS], 2)


def npy_text(array):
    """Base64 of the bytes of an .npy file, as vLLM sends it."""
    stream = io.BytesIO()
    np.save(stream, array.astype(np.uint8))
    return base64.b64encode(stream.getvalue()).decode()


class LittleServer:
    """What the server does; a test changes single attributes.

    Attributes:
        route: routes of the prompts of one request.
        failures: answers (status, headers, body) that are given first.
        chat_ids: token ids of chats by their last message.
        fields: fields of a choice that are left out.
        seen: (path, question, authorization) of every request.
    """

    def __init__(self, route=None):
        self.route = route or (lambda prompts: [rule_routes(ids) for ids in prompts])
        self.failures, self.seen, self.fields = [], [], set()
        self.raw, self.version_path = None, "/version"
        self.paths = {"/v1/completions", "/inference/v1/generate", "/generate"}
        self.root, self.chat_ids = "demo", {}

    def answer(self, path, question):
        """Return the JSON answer to a question."""
        if path == "/v1/models":
            return {"data": [{"id": "served", "root": self.root}]}
        if path == self.version_path:
            return {"version": "0.32.0"}
        if path not in self.paths:
            return None
        if path == "/generate":
            return self.sglang(question)
        if path == "/v1/chat/completions":
            return self.chat(question)
        prompts = question.get("prompt") or [question["token_ids"]]
        choices = []
        for index, (ids, routes) in enumerate(zip(prompts, self.route(prompts), strict=True)):
            choice = {
                "index": index,
                "text": "x",
                "token_ids": [int(sum(ids)) % 500],
                "routed_experts": npy_text(routes),
            }
            choices.append({k: v for k, v in choice.items() if k not in self.fields})
        return {"id": "cmpl-1", "choices": choices[::-1]}

    def chat(self, question):
        """Return the answer to a chat, whose token ids are looked up by its last message."""
        ids = self.chat_ids[question["messages"][-1]["content"]]
        (routes,) = self.route([ids])
        if question.get("return_input_ids_in_sglext"):
            (generated,) = self.sglang({"input_ids": [ids]})
            box = {"routed_experts": generated["meta_info"].get("routed_experts")}
            box |= {"input_ids": ids, "output_ids": [generated["output_ids"]]}
            return {"choices": [{"index": 0}], "sglext": {k: v for k, v in box.items() if v}}
        choice = {"index": 0, "message": {}, "token_ids": [1], "routed_experts": npy_text(routes)}
        answer = {"prompt_token_ids": ids, "choices": [choice]}
        for content in (choice, answer):
            for name in self.fields & content.keys():
                del content[name]
        return answer

    def sglang(self, question):
        """Return the answers of /generate: raw int32 in base64, without a shape."""
        answers = []
        prompts = question["input_ids"]
        for ids, routes in zip(prompts, self.route(prompts), strict=True):
            text = base64.b64encode(np.ascontiguousarray(routes, "<i4").tobytes()).decode()
            info = {"prompt_tokens": len(ids), "completion_tokens": 1, "routed_experts": text}
            info = {k: v for k, v in info.items() if k not in self.fields}
            answers.append({"text": "x", "output_ids": [1], "meta_info": info})
        return answers


@contextmanager
def serving(server):
    """Serve on a free port of the loopback; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.reply(json.loads(body))

        def reply(self, question):
            server.seen.append((self.path, question, self.headers.get("Authorization")))
            if question is not None and server.failures:
                status, headers, body = server.failures.pop(0)
                return self.send(status, headers, body)
            answer = server.answer(self.path, question)
            if answer is None:
                return self.send(404, {}, b'{"detail": "Not Found"}')
            raw = server.raw if question is not None else None
            return self.send(200, {}, json.dumps(answer).encode() if raw is None else raw)

        def send(self, status, headers, body):
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
