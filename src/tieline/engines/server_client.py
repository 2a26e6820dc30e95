"""Questions to a running server over HTTP: JSON out, JSON in, with retries, limits and a key.

    server = ServerClient("http://127.0.0.1:8000")
    server.ask("/v1/completions", {...})           # one answer
    ask_all(server, questions, concurrency=8)      # answers in the order of the questions

The key is read from the environment (`KEY_VARIABLE`) and sent as a bearer token; it is never part
of a message or a record. An answer is untrusted: its size is bounded before it is parsed, and no
redirection is followed, since the key would travel along.
"""

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from tieline.core.errors import TielineError, require
from tieline.core.records import parse_json
from tieline.core.text import printable_line

KEY_VARIABLE = "TIELINE_API_KEY"
"""The environment variable that holds the key of a server."""

MOST_ANSWER_BYTES = 256 << 20
"""Largest answer that is read: 100,000 tokens × 94 layers × 8 experts in base64 are 100 MB."""

MOST_REASON = 200
"""Characters of a server's own message that an error quotes."""

TOO_SLOW = 0
"""In place of the status of an answer that did not come in time."""

RETRIED_CODES = (408, 425, 429, 500, 502, 503, 504)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first repetition, doubled each time, and the most that is waited."""


class ServerError(TielineError):
    """A server cannot be reached, refuses a question, or answers in another form.

    Attributes:
        code: status of the answer; None without one.
    """

    def __init__(self, message: object = "", code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


def is_server(name: object) -> bool:
    """Return whether a name is the address of a server rather than a model."""
    return isinstance(name, str) and name.lower().startswith(("http://", "https://"))


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Turns a redirection into an error."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follow no redirection."""


@dataclass(frozen=True)
class ServerClient:
    """A server and how it is asked.

    Attributes:
        url: its address, with or without a path.
        timeout: seconds to wait for one answer.
        retries: repetitions of a question that failed for a passing reason.
        pause: waits so many seconds; replaced in tests.
    """

    url: str
    timeout: float = 300.0
    retries: int = 4
    pause: Callable[[float], object] = field(default=time.sleep, repr=False, compare=False)

    def __post_init__(self) -> None:
        address = urlsplit(self.url)
        fits = address.scheme in ("http", "https") and bool(address.hostname)
        require(fits, f"{self.url!r:.200} is no address such as http://127.0.0.1:8000")
        require(
            address.username is None and address.password is None and not address.query,
            f"leave name, password and query out of the address: a key is read from {KEY_VARIABLE}",
        )

    def ask(self, path: str, question: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON answer to a question, or to a plain GET without one.

        Raises:
            ServerError: after `retries` repetitions of a passing failure, or at once for another.
        """
        for repetition in range(self.retries + 1):
            try:
                return self._answer(path, question)
            except ServerError as problem:
                passing = problem.code is None or problem.code in RETRIED_CODES
                if not passing or repetition == self.retries:
                    raise
                stated = getattr(problem, "retry_after", None)
                doubled = FIRST_PAUSE * 2**repetition
                self.pause(min(LONGEST_PAUSE, doubled if stated is None else stated))
        raise AssertionError("unreachable")

    def _answer(self, path: str, question: Mapping[str, Any] | None) -> Any:
        """One question and its answer, without repetition."""
        address = self.url.rstrip("/") + path
        body = None if question is None else json.dumps(question).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if os.environ.get(KEY_VARIABLE):
            headers["Authorization"] = f"Bearer {os.environ[KEY_VARIABLE]}"
        asked = urllib.request.Request(address, body, headers)  # noqa: S310 - scheme is checked
        opener = urllib.request.build_opener(_NoRedirection)
        try:
            with opener.open(asked, timeout=self.timeout) as response:
                data = _bounded_bytes(response, address, time.monotonic() + self.timeout)
        except urllib.error.HTTPError as problem:
            raise _status_error(problem, address) from None
        except TimeoutError as problem:
            raise _too_slow(address, self.timeout) from problem
        except (OSError, http.client.HTTPException) as problem:
            reason = getattr(problem, "reason", None) or problem
            if isinstance(reason, TimeoutError):
                raise _too_slow(address, self.timeout) from problem
            message = f"{address} cannot be reached: {printable_line(str(reason))[:MOST_REASON]}"
            raise ServerError(message) from problem
        try:
            return parse_json(data, address, MOST_ANSWER_BYTES)
        except TielineError:
            start = printable_line(data[:60].decode(errors="replace"))
            message = f"{address} answered no JSON but {start!r}: is it an inference server?"
            raise ServerError(message, 200) from None


def _bounded_bytes(response: Any, address: str, deadline: float) -> bytes:
    """The bytes of an answer; refuses one that is too large, or that drips past its time."""
    data = bytearray()
    while chunk := response.read1(1 << 20):
        data += chunk
        if len(data) > MOST_ANSWER_BYTES:
            most = MOST_ANSWER_BYTES >> 20
            raise ServerError(f"{address} answered more than {most} MB: send fewer prompts", 200)
        if time.monotonic() > deadline:
            raise TimeoutError
    return bytes(data)


def _too_slow(address: str, seconds: float) -> ServerError:
    """The error for an answer that did not come in time; asking again would take as long."""
    message = f"{address} gave no answer within {seconds:g} s: raise the time-out, or send less"
    return ServerError(message, TOO_SLOW)


def _status_error(problem: urllib.error.HTTPError, address: str) -> ServerError:
    """The error for an answer with a status other than 200, with what to do about it."""
    code, reason = problem.code, _stated_reason(problem)
    advice = {
        401: f"the server asks for a key: set {KEY_VARIABLE}",
        403: f"the server refuses: set {KEY_VARIABLE}, or enable this path on the server",
        404: "the server has no such path: is --engine right?",
        429: "the server has too many requests: lower the concurrency, or try later",
    }.get(code, "")
    if 300 <= code < 400:
        advice = "the server redirects elsewhere, which is not followed: name that address"
    text = "; ".join(part for part in (advice, reason) if part)
    error = ServerError(f"{address} answered {code}" + (f": {text}" if text else ""), code)
    wait = problem.headers.get("Retry-After", "") if problem.headers else ""
    if wait.isascii() and wait.isdigit():
        error.retry_after = min(float(wait), LONGEST_PAUSE)  # pyright: ignore[reportAttributeAccessIssue]
    return error


def _stated_reason(problem: urllib.error.HTTPError) -> str:
    """What the server itself says of a refusal, in a printable line."""
    try:
        data = problem.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return ""
    try:
        content = json.loads(data)
    except ValueError:
        content = None
    for name in ("error", "message", "detail"):
        content = content.get(name, content) if isinstance(content, dict) else content
    text = content if isinstance(content, str) else data.decode(errors="replace")
    return printable_line(" ".join(text.split()))[:MOST_REASON]


def ask_all(
    ask: Callable[[Any], Any],
    questions: Sequence[Any],
    concurrency: int = 1,
    on_answer: Callable[[int], object] | None = None,
) -> list[Any]:
    """Return the answers of all questions in their order; the first failure ends all.

    Args:
        ask: asks one question.
        questions: what is asked.
        concurrency: questions that are open at a time.
        on_answer: called with the number of answers so far.
    """
    answers: list[Any] = []
    failures: list[BaseException] = []

    def ask_unless_failed(question: Any) -> Any:
        """Ask, or fail as the first that failed: a task may start before it is cancelled."""
        if failures:
            raise failures[0]
        try:
            return ask(question)
        except BaseException as failure:
            failures.append(failure)
            raise

    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        tasks = [pool.submit(ask_unless_failed, question) for question in questions]
        try:
            for task in tasks:
                answers.append(task.result())
                if on_answer is not None:
                    on_answer(len(answers))
        except BaseException:
            _cancel_tasks(tasks)
            raise
    return answers


def _cancel_tasks(tasks: Iterable[Any]) -> None:
    """Cancel the tasks that have not begun."""
    for task in tasks:
        task.cancel()
