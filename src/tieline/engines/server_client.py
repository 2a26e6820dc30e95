"""JSON requests to a server over HTTP.

The key is read from the environment (`KEY_VARIABLE`) and sent as a bearer token; it is never part
of a message or a record. Answers are untrusted: their size and the time until their last byte are
bounded before they are parsed, and no redirection is followed, since it would pass on the key.
"""

import http.client
import io
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from tieline.core.errors import TielineError, require
from tieline.core.records import parse_json
from tieline.core.text import printable_line

KEY_VARIABLE = "TIELINE_API_KEY"
"""The environment variable that holds the key of a server."""

MOST_ANSWER_BYTES = 256 << 20
"""Bytes of the largest answer that is read: 100,000 tokens × 94 layers × 8 experts in base64 are
100 MB."""

MOST_REASON_LETTERS = 200
"""Characters of a server's own message that an error quotes."""

TIMEOUT_CODE = 0
"""Status code that stands for a time-out."""

RETRIED_CODES = (408, 425, 429, 500, 502, 503, 504)
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds before the first repetition, which double each time, and their maximum."""


class ServerError(TielineError):
    """A server cannot be reached, refuses a request, or answers in another form.

    Attributes:
        code: HTTP status of the answer; None without an answer.
    """

    def __init__(self, message: object = "", code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


def _is_address(url: str) -> bool:
    """Return whether a text is a valid HTTP address with a host."""
    if not (url.isascii() and url.isprintable()) or " " in url:
        return False
    try:
        address = urlsplit(url)
        port = address.port
        (address.hostname or "").encode("idna")  # no empty part, none above 63 letters
    except ValueError:
        return False
    return address.scheme in ("http", "https") and bool(address.hostname) and port != 0


def is_server(name: object) -> bool:
    """Return whether a name is the address of a server and not a model."""
    return isinstance(name, str) and name.lower().startswith(("http://", "https://"))


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    """Handler that turns redirections into errors."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return no request, so that the redirection is an error."""


class _BytesInTime(io.RawIOBase):
    """Bytes from a socket; raises TimeoutError after the deadline.

    The time-out of a socket starts anew with each byte: a server that sends one now and then, in
    the header too, would never end.
    """

    def __init__(self, source: Any, sock: Any, deadline: float) -> None:
        self._source, self._sock, self._deadline = source, sock, deadline

    def readable(self) -> bool:
        """Return true."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read bytes that arrive before the deadline."""
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining)
        return self._source.readinto(buffer)

    def close(self) -> None:
        """Close the socket too."""
        self._source.close()
        super().close()


class _AnswerInTime(http.client.HTTPResponse):
    """Answer whose header and body must arrive before the deadline."""

    def __init__(self, sock: Any, *args: Any, deadline: float, **options: Any) -> None:
        super().__init__(sock, *args, **options)
        self.fp: Any = io.BufferedReader(_BytesInTime(self.fp.detach(), sock, deadline))


def _opener(seconds: float) -> urllib.request.OpenerDirector:
    """Return what opens one address: answers end after so many seconds, none is redirected."""
    answer_in_time = partial(_AnswerInTime, deadline=time.monotonic() + seconds)

    def connect_with(kind: Any) -> Any:
        """Return the class of connections with such answers."""
        return type(kind.__name__, (kind,), {"response_class": staticmethod(answer_in_time)})

    class _Plain(urllib.request.HTTPHandler):
        def http_open(self, req: Any) -> Any:
            return self.do_open(connect_with(http.client.HTTPConnection), req)

    class _Encrypted(urllib.request.HTTPSHandler):
        def https_open(self, req: Any) -> Any:
            return self.do_open(connect_with(http.client.HTTPSConnection), req)

    return urllib.request.build_opener(_NoRedirection, _Plain, _Encrypted)


def _key_header() -> dict[str, str]:
    """Return the header with the key of the environment; empty without one."""
    key = os.environ.get(KEY_VARIABLE, "").strip()
    fits = key.isascii() and key.isprintable()
    require(fits, f"{KEY_VARIABLE} holds a character that no key has, such as a line break")
    return {"Authorization": f"Bearer {key}"} if key else {}


@dataclass(frozen=True)
class ServerClient:
    """Client of a server: sends JSON requests and repeats those that fail temporarily.

    Attributes:
        url: address of the server, with or without a path.
        timeout: seconds to wait for one answer.
        retries: number of repetitions of a request that failed temporarily.
        pause: function that waits for a number of seconds; replaced in tests.
    """

    url: str
    timeout: float = 300.0
    retries: int = 4
    pause: Callable[[float], object] = field(default=time.sleep, repr=False, compare=False)

    def __post_init__(self) -> None:
        fits = _is_address(self.url)
        require(fits, f"{self.url!r:.200} is no address such as http://127.0.0.1:8000")
        address = urlsplit(self.url)
        require(
            address.username is None
            and address.password is None
            and not (address.query or address.fragment),
            f"leave name, password and query out of the address: a key is read from {KEY_VARIABLE}",
        )

    def ask(self, path: str, question: Mapping[str, Any] | None = None) -> Any:
        """Send a request and return the JSON answer: POST with a question, else GET.

        Raises:
            ServerError: after `retries` repetitions of a temporary failure, or at once for others.
        """
        for repetition in range(self.retries + 1):
            try:
                return self._ask_once(path, question)
            except ServerError as problem:
                is_temporary = problem.code is None or problem.code in RETRIED_CODES
                if not is_temporary or repetition == self.retries:
                    raise
                stated = getattr(problem, "retry_after", None)
                doubled = FIRST_PAUSE * 2**repetition
                self.pause(min(LONGEST_PAUSE, doubled if stated is None else stated))
        raise AssertionError("unreachable")

    def _ask_once(self, path: str, question: Mapping[str, Any] | None) -> Any:
        """Send one request and return the JSON answer, without repetition."""
        address = self.url.rstrip("/") + path
        body = None if question is None else json.dumps(question).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= _key_header()
        request = urllib.request.Request(address, body, headers)  # noqa: S310 - scheme is checked
        try:
            with _opener(self.timeout).open(request, timeout=self.timeout) as response:
                data = _read_bounded(response, address)
        except urllib.error.HTTPError as problem:
            raise _status_error(problem, address) from None
        except TimeoutError as problem:
            raise _timeout_error(address, self.timeout) from problem
        except (OSError, http.client.HTTPException) as problem:
            reason = getattr(problem, "reason", None) or problem
            if isinstance(reason, TimeoutError):
                raise _timeout_error(address, self.timeout) from problem
            text = printable_line(str(reason))[:MOST_REASON_LETTERS]
            raise ServerError(f"{address} cannot be reached: {text}") from problem
        try:
            return parse_json(data, address, MOST_ANSWER_BYTES)
        except TielineError:
            start = printable_line(data[:60].decode(errors="replace"))
            message = f"{address} answered no JSON but {start!r}: is it an inference server?"
            raise ServerError(message, 200) from None


def _read_bounded(response: Any, address: str) -> bytes:
    """Read the bytes of an answer; raises if they are too many."""
    data = bytearray()
    while chunk := response.read1(1 << 20):
        data += chunk
        if len(data) > MOST_ANSWER_BYTES:
            most = MOST_ANSWER_BYTES >> 20
            raise ServerError(f"{address} answered more than {most} MB: send fewer prompts", 200)
    return bytes(data)


def _timeout_error(address: str, seconds: float) -> ServerError:
    """Return the error for a time-out, which is not repeated, as that would take as long."""
    message = f"{address} gave no answer within {seconds:g} s: raise the time-out, or send less"
    return ServerError(message, TIMEOUT_CODE)


def _status_error(problem: urllib.error.HTTPError, address: str) -> ServerError:
    """Return the error for a status other than 200, with advice."""
    code, reason = problem.code, _stated_reason(problem)
    advice = {
        401: f"the server asks for a key: set {KEY_VARIABLE}",
        403: f"the server refuses: set {KEY_VARIABLE}, or enable this path on the server",
        404: "the server has no such path: is --engine right?",
        429: "the server has too many requests: lower the concurrency, or try later",
    }.get(code, "")
    if 300 <= code < 400:
        advice = "the server redirects elsewhere, which is not followed: name that address"
    text = "; ".join(sentence for sentence in (advice, reason) if sentence)
    error = ServerError(f"{address} answered {code}" + (f": {text}" if text else ""), code)
    wait = problem.headers.get("Retry-After", "") if problem.headers else ""
    if wait.isascii() and wait.isdigit():
        error.retry_after = min(float(wait), LONGEST_PAUSE)  # pyright: ignore[reportAttributeAccessIssue]
    return error


def _stated_reason(problem: urllib.error.HTTPError) -> str:
    """Return the server's own error message as a printable line."""
    try:
        data = problem.read(1 << 16)
    except (OSError, http.client.HTTPException):
        return ""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    for name in ("error", "message", "detail"):
        content = content.get(name, content) if isinstance(content, dict) else content
    text = content if isinstance(content, str) else data.decode(errors="replace")
    return printable_line(" ".join(text.split()))[:MOST_REASON_LETTERS]


def ask_all(
    ask: Callable[[Any], Any],
    questions: Sequence[Any],
    concurrency: int = 1,
    on_answer: Callable[[int], object] | None = None,
) -> list[Any]:
    """Ask several questions at a time and return the answers in order; a failure ends all.

    Args:
        ask: function that returns the answer to one question.
        questions: the questions.
        concurrency: largest number of open questions.
        on_answer: called with the number of answers so far.
    """
    answers: list[Any] = []
    failures: list[BaseException] = []

    def ask_unless_failed(question: Any) -> Any:
        """Ask, or raise the first failure: a task may start before it is cancelled."""
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
            for task in tasks:
                task.cancel()
            raise
    return answers
