"""Query a running server of vLLM or SGLang for its routes.

    vllm      POST /v1/completions, choices[].routed_experts; if that has none, POST
              /inference/v1/generate with token ids; started with --enable-return-routed-experts;
              chats POST /v1/chat/completions, which returns the token ids of their template too
    sglang    POST /generate, meta_info.routed_experts; started with --enable-return-routed-experts;
              chats as for vLLM, sglext.routed_experts and sglext.input_ids

Prompts are token ids, or chats that the server tokenises. With one new token a server returns a row
for every token of the prompt.

    RouteServer     a server; `RouteServer.route` returns the routes of some prompts
    ServerSource    the same as a source of traces
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tieline._version import __version__
from tieline.core.errors import TielineError, require
from tieline.core.setting_fields import SettingError, require_setting
from tieline.core.text import printable_line
from tieline.engines.engine_run import Progress
from tieline.engines.server_client import ServerClient, ServerError, ask_all
from tieline.engines.trace_sources import TokenDocuments
from tieline.models.configuration import RoutedShape
from tieline.models.model import read_shape
from tieline.run.shared_settings import ServerSettings
from tieline.trace.readers.completions import completion_routes, json_field, sglang_routes
from tieline.trace.readers.routes import Request, Routes, routes_of_requests, trace_of
from tieline.trace.record import RoutingTrace

SERVED_ENGINES = ("vllm", "sglang")
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
CHAT = "/v1/chat/completions"
VERSION_PATHS = ("/version", "/server_info", "/get_server_info")
"""Where vLLM, SGLang and earlier versions of SGLang state their version."""

CHAT_FIELDS = {
    "vllm": ("return_token_ids",),
    "sglang": (
        "return_routed_experts",
        "return_input_ids_in_sglext",
        "return_output_ids_in_sglext",
    ),
}
"""What is asked for in a chat: routes and the token ids of prompt and answer."""

REFUSED_CHAT_CODES = (400, 404, 405, 422, 501)
"""Status of an answer to a chat that the server does not serve: no such path, no chat template."""

SERVER_OPTION = "--enable-return-routed-experts"


@dataclass(frozen=True, eq=False)
class ServedRoutes:
    """The routes of one prompt.

    Attributes:
        experts: expert ids (tokens, layers, k) of prompt and generated tokens but the last.
        generated: ids of the generated tokens; None if the server does not return them.
    """

    experts: np.ndarray
    generated: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class ServedChat:
    """A chat as the server tokenised it.

    Attributes:
        tokens: token ids of the chat.
        routes: routes of the tokens.
    """

    tokens: list[int]
    routes: ServedRoutes


@dataclass(eq=False)
class RouteServer:
    """A running server that returns routes.

    Attributes:
        client: sends requests to the server.
        engine: "vllm" or "sglang".
        model: name under which the model is served.
        root: folder or hub id of the model.
        version: version of the engine; empty if unknown.
        shape: sizes of the routed layers, if the configuration of the model can be read here.
        new_tokens: number of tokens to generate after each prompt.
        path: path of the server that is queried; changes once if it returns no routes.
    """

    client: ServerClient
    engine: str
    model: str
    root: str
    version: str = ""
    shape: RoutedShape | None = None
    new_tokens: int = 1
    path: str = field(default=COMPLETIONS, compare=False)

    @classmethod
    def open(cls, url: str, engine: str, settings: ServerSettings) -> "RouteServer":
        """Connect to a server and ask which model it serves.

        Args:
            url: address of the server.
            engine: "vllm" or "sglang".
            settings: settings of the requests, and the model with its tokenizer and sizes.
        """
        require_setting(
            engine in SERVED_ENGINES,
            "{engine} of a server is vllm or sglang, got {name!r:.40}",
            name=engine,
        )
        client = ServerClient(url, settings.timeout, settings.retries)
        model, root = _served_model(client)
        model_name = root if settings.tokenizer is None else str(settings.tokenizer)
        try:
            shape = read_shape(model_name)
        except (TielineError, OSError):  # its configuration cannot be read here
            shape = None
        version = _server_version(client)
        return cls(client, engine, model, root, version, shape, settings.new_tokens)

    def route(self, prompts: Sequence[Sequence[int]], salt: str = "") -> list[ServedRoutes]:
        """Send prompts in one request, as one batch, and return the routes of each.

        Args:
            prompts: token ids of each prompt.
            salt: word that separates cached prefixes (`cache_salt` of vLLM): prompts with another
                salt do not use them.
        """
        if self.engine == "sglang":
            return self._sglang_generate(prompts)
        if self.path == COMPLETIONS:
            try:
                return self._vllm_completions(prompts, salt)
            except ServerError as problem:
                if problem.code not in (200, 404):
                    raise
                first = problem
            try:
                routes = [self._vllm_generate(prompt, salt) for prompt in prompts[:1]]
            except ServerError:
                raise first from None  # the error of the usual path is more helpful
            self.path = GENERATE
            prompts = prompts[1:]
            return routes + ask_all(lambda x: self._vllm_generate(x, salt), prompts, 1)
        return ask_all(lambda x: self._vllm_generate(x, salt), prompts, max(1, len(prompts)))

    def _vllm_completions(self, prompts: Sequence[Sequence[int]], salt: str) -> list[ServedRoutes]:
        """Query /v1/completions, which returns a choice for each prompt."""
        question = {
            "model": self.model,
            "prompt": [list(map(int, prompt)) for prompt in prompts],
            "max_tokens": self.new_tokens,
            "temperature": 0,
            "return_token_ids": True,
        } | ({"cache_salt": salt} if salt else {})
        answer = self.client.ask(COMPLETIONS, question)
        choices = _ordered_choices(answer, len(prompts), self._full_address(COMPLETIONS))
        return [
            self._routes_of_choice(choice, prompt, COMPLETIONS)
            for choice, prompt in zip(choices, prompts, strict=True)
        ]

    def _vllm_generate(self, prompt: Sequence[int], salt: str) -> ServedRoutes:
        """Query /inference/v1/generate, which takes one prompt."""
        sampling = {"max_tokens": self.new_tokens, "temperature": 0}
        question = {
            "model": self.model,
            "token_ids": list(map(int, prompt)),
            "sampling_params": sampling,
        } | ({"cache_salt": salt} if salt else {})
        answer = self.client.ask(GENERATE, question)
        (choice,) = _ordered_choices(answer, 1, self._full_address(GENERATE))
        return self._routes_of_choice(choice, prompt, GENERATE)

    def route_chat(self, messages: Sequence[Any]) -> ServedChat | None:
        """Send a chat that the server tokenises by its own template, and return tokens and routes.

        Returns None if the server does not serve chats so: no such path or template, or an answer
        without the token ids of the prompt or without routes.
        """
        question = {
            "model": self.model,
            "messages": list(messages),
            "max_tokens": self.new_tokens,
            "temperature": 0,
        } | dict.fromkeys(CHAT_FIELDS[self.engine], True)
        try:
            answer = self.client.ask(CHAT, question)
        except ServerError as problem:
            if problem.code in REFUSED_CHAT_CODES:
                return None
            raise
        if self.engine == "sglang":
            routed = json_field(answer, "sglext", "sgl_ext")
            tokens = json_field(routed, "input_ids")
        else:
            (routed,) = _ordered_choices(answer, 1, self._full_address(CHAT))
            tokens = json_field(answer, "prompt_token_ids")
        has_routes = json_field(routed, "routed_experts") is not None
        if not has_routes or not is_token_ids(tokens) or not tokens:
            return None
        if self.engine == "vllm":
            return ServedChat(tokens, self._routes_of_choice(routed, tokens, CHAT))
        generated = json_field(routed, "output_ids")  # a list for each choice
        (generated,) = generated if isinstance(generated, list) and len(generated) == 1 else (None,)
        content = {name: routed[name] for name in ("routed_experts", "input_ids")}
        content |= {"output_ids": generated, "usage": json_field(answer, "usage")}
        return ServedChat(tokens, self._sglang_routes(content, tokens, generated, CHAT))

    def _routes_of_choice(
        self, choice: Mapping[str, Any], prompt: Sequence[int], path: str
    ) -> ServedRoutes:
        """Return the routes in a choice of vLLM's answer."""
        label = self._full_address(path)
        has_routes = json_field(choice, "routed_experts", "prompt_routed_experts") is not None
        require_routes(has_routes, label, self.engine)
        routes = completion_routes([(label, choice)], "vllm", label)
        stated = json_field(choice, "prompt_token_ids")
        if stated is not None and stated != list(prompt):
            raise ServerError(
                f"{label}: the routes are of other tokens than those that were sent: the server "
                "adds or cuts tokens of the prompt",
                200,
            )
        return self._checked_routes(routes, prompt, json_field(choice, "token_ids"), label)

    def _sglang_generate(self, prompts: Sequence[Sequence[int]]) -> list[ServedRoutes]:
        """Query /generate of SGLang, which returns an answer for each prompt."""
        sampling = {"max_new_tokens": self.new_tokens, "temperature": 0}
        question = {
            "input_ids": [list(map(int, prompt)) for prompt in prompts],
            "sampling_params": sampling,
            "return_routed_experts": True,
        }
        label = self._full_address("/generate")
        answers = self.client.ask("/generate", question)
        answers = [answers] if isinstance(answers, dict) else answers
        fits = isinstance(answers, list) and len(answers) == len(prompts)
        require(fits, f"{label}: no answer for each of {len(prompts)} prompts", ServerError)
        routes = []
        for answer, prompt in zip(answers, prompts, strict=True):
            box = json_field(answer, "meta_info", "sglext", "sgl_ext")
            has_routes = box is not None and json_field(box, "routed_experts") is not None
            require_routes(has_routes, label, self.engine)
            generated = json_field(answer, "output_ids")
            routes.append(self._sglang_routes(answer, prompt, generated, "/generate"))
        return routes

    def _sglang_routes(
        self, answer: Any, prompt: Sequence[int], generated: Any, path: str
    ) -> ServedRoutes:
        """Return the routes in an answer of SGLang."""
        label = self._full_address(path)
        k = None if self.shape is None else self.shape.k
        try:
            served = sglang_routes([(label, answer)], label, k=k)
        except SettingError as problem:
            message = f"{label}: {problem}: name a model of the same shape with tokenizer"
            raise ServerError(message, 200) from problem
        return self._checked_routes(served, prompt, generated, label)

    def _checked_routes(
        self, routes: Routes, prompt: Sequence[int], generated: Any, label: str
    ) -> ServedRoutes:
        """Return the routes of a prompt; raises unless its rows and new token ids are complete."""
        rows, tokens = len(routes.experts), len(prompt)
        fewest = tokens if self.new_tokens else tokens - 1
        first = 0 if routes.positions is None else int(routes.positions[0])
        if rows < fewest or first:
            begin = f", from token {first} on" if first else ""
            raise ServerError(
                f"{label}: {rows} rows for a prompt of {tokens} tokens{begin}: this version leaves "
                "out cached or cut tokens; turn prefix caching off on the server",
                200,
            )
        ids = generated if isinstance(generated, list) else None
        fits = ids is None or is_token_ids(ids)
        require(fits, f"{label}: token ids must be whole numbers", ServerError)
        if max(rows - tokens, len(ids or ())) > self.new_tokens:
            raise ServerError(
                f"{label}: {rows} rows and {len(ids or ())} new tokens for a prompt of {tokens} "
                f"tokens, of which {self.new_tokens} were asked for: is --engine right?",
                200,
            )
        return ServedRoutes(routes.experts, None if ids is None else tuple(ids))

    def _full_address(self, path: str) -> str:
        """Return the full address of a path, for messages."""
        return f"{self.client.url.rstrip('/')}{path}"


def is_token_ids(content: object) -> bool:
    """Return whether JSON is a list of whole numbers from 0 on."""
    return isinstance(content, list) and all(type(x) is int and x >= 0 for x in content)


def require_routes(has_routes: bool, label: str, engine: str) -> None:
    """Raise unless an answer has routes; the message names the server option that adds them."""
    if not has_routes:
        raise ServerError(
            f"{label} answers without routes: start {'vLLM' if engine == 'vllm' else 'SGLang'} "
            f"with {SERVER_OPTION}",
            200,
        )


def _ordered_choices(answer: Any, count: int, label: str) -> list[Mapping[str, Any]]:
    """Return the choices of an answer in the order of the prompts."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    choices = [x for x in choices if isinstance(x, dict)] if isinstance(choices, list) else []
    if len(choices) != count:
        message = f"{label} answered {len(choices)} choices for {count} prompts: is it vLLM?"
        raise ServerError(message, 200)
    numbers = [choice.get("index", number) for number, choice in enumerate(choices)]
    each_once = all(number in numbers for number in range(count))
    require(each_once, f"{label}: choices are not numbered 0 ... {count - 1}", ServerError)
    return [choices[numbers.index(number)] for number in range(count)]


def _served_model(client: ServerClient) -> tuple[str, str]:
    """Return the name under which a server serves its model, and the model's folder or hub id."""
    answer = client.ask("/v1/models")
    entries = answer.get("data") if isinstance(answer, dict) else None
    first = entries[0] if isinstance(entries, list) and entries else None
    name = first.get("id") if isinstance(first, dict) else None
    if not isinstance(name, str) or first is None:
        raise ServerError(f"{client.url}/v1/models names no model: is it an inference server?", 200)
    root = first.get("root")
    return printable_line(name)[:500], printable_line(root if isinstance(root, str) else name)[:500]


def _server_version(client: ServerClient) -> str:
    """Return the version of a server; empty if unknown."""
    for path in VERSION_PATHS:
        with suppress(ServerError):
            version = json_field(replace(client, retries=0).ask(path), "version")
            if isinstance(version, str):
                return printable_line(version)[:40]
    return ""


@dataclass(frozen=True)
class ServerSource:
    """A running server as a source of traces.

    Attributes:
        server: the server.
        concurrency: largest number of open requests.
        chat_routes: routes of documents that were sent as chats already, by number of document.
    """

    server: RouteServer
    concurrency: int = 8
    chat_routes: Mapping[int, ServedRoutes] = field(default_factory=dict)

    def trace(self, documents: TokenDocuments, progress: Progress | None = None) -> RoutingTrace:
        """Return the trace of the documents, each sent as a prompt if it was not as a chat."""
        server, prompts = self.server, [row.tolist() for row in documents.sequences]
        ends = np.cumsum([0, *map(len, prompts)])

        def on_answer(count: int) -> None:
            if progress is not None:
                progress("server", int(ends[count]), int(ends[-1]))

        on_answer(0)
        answers = ask_all(
            lambda number: self.chat_routes.get(number) or server.route([prompts[number]])[0],
            range(len(prompts)),
            self.concurrency,
            on_answer,
        )
        requests = [_request_of_prompt(*pair) for pair in zip(prompts, answers, strict=True)]
        routes = routes_of_requests(requests, server.engine, server.client.url)
        names = [f"model.layers.{layer}.mlp.gate" for layer in range(routes.experts.shape[1])]
        n_experts = None if server.shape is None else server.shape.n_experts
        trace = trace_of(routes, n_experts, names, self._provenance())
        return documents.with_document_numbers(trace)

    def _provenance(self) -> dict[str, object]:
        """Return the provenance of the trace, without the key."""
        server, chats = self.server, len(self.chat_routes)
        return {
            "source": "server",
            "engine": server.engine,
            "model": server.model,
            "url": server.client.url,
            "versions": {server.engine: server.version} if server.version else {},
            "settings": {"new tokens": server.new_tokens, "concurrency": self.concurrency}
            | ({"chats tokenised by the server": chats} if chats else {}),
            "dtype": "as served",
            "tieline": __version__,
            "torch": torch.__version__,
        }


def _request_of_prompt(prompt: list[int], answer: ServedRoutes) -> Request:
    """Return the rows and tokens of a prompt, with those of generated tokens if known."""
    if answer.generated is None:
        return Request(answer.experts[: len(prompt)], np.array(prompt))
    tokens = np.array([*prompt, *answer.generated])
    return Request(answer.experts[: len(tokens)], tokens)
