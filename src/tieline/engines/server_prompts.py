"""The prompts that a running server is sent: texts, token ids and chats of a file, or a text.

Texts are tokenised here, so that one server, another server and an offline run get the same
tokens. A chat is sent as it is to a server that returns token ids and routes of chats, so that the
server's own chat template is measured. Other chats are tokenised here and sent as ids, and so are
all if the settings name a tokenizer.
"""

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tieline.core.errors import TielineError, TraceError, require
from tieline.core.files import require_file
from tieline.core.records import parse_json
from tieline.core.setting_fields import SettingError
from tieline.core.text import printable_line
from tieline.engines.engine_run import Progress
from tieline.engines.server_client import ask_all
from tieline.engines.server_routes import RouteServer, ServedChat, ServedRoutes, is_token_ids
from tieline.engines.trace_sources import TokenDocuments
from tieline.models.model import load_tokenizer
from tieline.run.shared_settings import ServerSettings
from tieline.trace.readers.completions import json_field

MOST_PROMPT_BYTES = 64 << 20
"""Largest file of prompts."""


@dataclass(frozen=True, eq=False)
class ServerPrompts:
    """Prompts for a server.

    Attributes:
        documents: token ids of each prompt.
        chat_routes: routes of the prompts that were sent as chats already, by number of prompt.
    """

    documents: TokenDocuments
    chat_routes: Mapping[int, ServedRoutes] = field(default_factory=dict)


def server_prompts(
    server: RouteServer,
    settings: ServerSettings,
    text: Any,
    sizes: tuple[int, int],
    progress: Progress | None = None,
) -> ServerPrompts:
    """Return the prompts for a server: those of a file, else documents of a text.

    Args:
        server: the server, whose model has the tokenizer unless the settings name another.
        settings: settings, with the file of prompts if there is one.
        text: a text, its path, or None for the built-in one.
        sizes: number of tokens of the text, and tokens per document.
        progress: called with stage, done and total while chats are sent.
    """
    if settings.prompts is None:
        tokenizer = _server_tokenizer(server, settings)
        return ServerPrompts(TokenDocuments.of_text(tokenizer, text, *sizes))
    prompts = read_prompts(settings.prompts)
    chats: dict[int, ServedChat] = {}
    if settings.tokenizer is None:
        chats = _send_chats(server, settings, prompts, progress)
    needs_tokenizer = any(
        number not in chats and (_chat_messages(content) or isinstance(_plain_prompt(content), str))
        for number, (_, content) in enumerate(prompts)
    )
    tokenizer = _server_tokenizer(server, settings) if needs_tokenizer else None
    ids = [
        chats[number].tokens if number in chats else prompt_ids(content, tokenizer, label)
        for number, (label, content) in enumerate(prompts)
    ]
    documents = replace(TokenDocuments.of_ids(ids), origin=str(settings.prompts))
    return ServerPrompts(documents, {number: chat.routes for number, chat in chats.items()})


def _server_tokenizer(server: RouteServer, settings: ServerSettings) -> Any:
    """Load the tokenizer that the settings name, else that of the server's model."""
    name = server.root if settings.tokenizer is None else settings.tokenizer
    try:
        return load_tokenizer(name)
    except (TielineError, OSError) as problem:
        raise SettingError(
            "the tokenizer of {model} cannot be loaded here ({problem}): name a model that has the "
            "same with {tokenizer}",
            model=name,
            problem=str(problem)[:200],
        ) from problem


def _send_chats(
    server: RouteServer,
    settings: ServerSettings,
    prompts: Sequence[tuple[str, Any]],
    progress: Progress | None,
) -> dict[int, ServedChat]:
    """Send the chats among the prompts; return those that were answered with routes, by number.

    The first chat shows whether this server answers chats so; if not, no other chat is sent.
    """
    messages = {
        number: chat
        for number, (_, content) in enumerate(prompts)
        if (chat := _chat_messages(content)) is not None
    }
    if not messages:
        return {}
    first, *others = messages
    answer = server.route_chat(messages[first])
    if answer is None:
        return {}

    def on_answer(count: int) -> None:
        if progress is not None:
            progress("server", count + 1, len(messages))

    on_answer(0)
    answers = ask_all(
        lambda number: server.route_chat(messages[number]), others, settings.concurrency, on_answer
    )
    by_number = dict(zip(messages, [answer, *answers], strict=True))
    return {number: chat for number, chat in by_number.items() if chat is not None}


def read_prompts(path: str | Path) -> list[tuple[str, Any]]:
    """Return the prompts in a file, each with its line for messages.

    Args:
        path: a text with a prompt per line, or JSON lines: a string, a list of ids, or an object
            with `prompt`, `token_ids`, or `messages` of a chat.
    """
    file = Path(path)
    require_file(file)
    require(file.stat().st_size <= MOST_PROMPT_BYTES, f"{path}: more than 64 MB of prompts")
    is_json = file.suffix.lower() in (".jsonl", ".json", ".ndjson")
    prompts = []
    lines = file.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    for number, line in enumerate(lines, 1):
        if line.strip():
            label = f"{path}: line {number}"
            prompts.append((label, parse_json(line, label) if is_json else _utf8_text(line, label)))
    require(bool(prompts), f"{path}: holds no prompt", TraceError)
    return prompts


def _utf8_text(line: bytes, label: str) -> str:
    """Return a line as text; raises if it is not UTF-8, as other text is not what was written."""
    try:
        return line.decode()
    except UnicodeDecodeError as problem:
        byte = line[problem.start]
        raise TraceError(f"{label} is not UTF-8 text: byte {byte:#04x}") from problem


def prompt_ids(content: Any, tokenizer: Any, label: str) -> list[int]:
    """Return the token ids of one prompt: a text, a chat, or ids."""
    messages, ids = _chat_messages(content), _plain_prompt(content)
    if messages is not None:
        try:
            ids = tokenizer.apply_chat_template(
                messages, tokenize=True, add_generation_prompt=True, return_dict=False
            )
        except Exception as problem:  # a template is a program, which fails as it likes
            reason = printable_line(str(problem))[:200]
            raise TraceError(f"{label}: the chat cannot be tokenised here: {reason}") from problem
    elif isinstance(ids, str):
        ids = list(tokenizer(ids)["input_ids"])
    fits = is_token_ids(ids) and bool(ids)
    require(fits, f"{label}: needs a text, token ids or messages, got {ids!r:.60}", TraceError)
    return ids


def _chat_messages(content: Any) -> list[Any] | None:
    """Return the messages of a prompt that is a chat, else None."""
    messages = content.get("messages") if isinstance(content, dict) else None
    return messages if isinstance(messages, list) and messages else None


def _plain_prompt(content: Any) -> Any:
    """Return the text or the token ids of a prompt that is no chat."""
    if not isinstance(content, dict):
        return content
    return json_field(content, "token_ids", "prompt_token_ids", "prompt", "text")
