"""Questions over HTTP: repetitions, limits, keys, and one line for everything that goes wrong."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from tests.engines.servers import LittleServer, serving
from tieline.core.errors import TielineError
from tieline.engines import server_client
from tieline.engines.server_client import (
    KEY_VARIABLE,
    ServerClient,
    ServerError,
    ask_all,
    is_server,
)

QUESTION = {"prompt": [[1, 2, 3]]}
PATH = "/v1/completions"


@pytest.fixture
def server():
    return LittleServer()


def client(url, **options):
    pauses = []
    return ServerClient(url, pause=pauses.append, **options), pauses


@pytest.mark.parametrize("status", [429, 500, 503])
def test_passing_failures_are_repeated_with_growing_pauses(server, status):
    server.failures = [(status, {}, b"busy")] * 3
    with serving(server) as url:
        http_client, pauses = client(url)
        assert len(http_client.ask(PATH, QUESTION)["choices"]) == 1
    assert pauses == [0.5, 1.0, 2.0]


def test_the_server_says_how_long_to_wait(server):
    server.failures = [(429, {"Retry-After": "3"}, b""), (429, {"Retry-After": "1000"}, b"")]
    with serving(server) as url:
        http_client, pauses = client(url)
        http_client.ask(PATH, QUESTION)
    assert pauses == [3.0, 30.0]


def test_a_failure_that_stays_is_told_with_the_servers_reason(server):
    server.failures = [(500, {}, b'{"error": {"message": "out of \\u001b[31m memory"}}')] * 3
    with serving(server) as url:
        http_client, pauses = client(url, retries=2)
        with pytest.raises(ServerError, match=r"answered 500: out of \\x1b\[31m memory$"):
            http_client.ask(PATH, QUESTION)
    assert len(pauses) == 2


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, b'{"message": "too long"}', "answered 400: too long"),
        (401, b"", f"asks for a key: set {KEY_VARIABLE}"),
        (403, b'{"detail": "--enable-scale-out"}', "refuses: .*--enable-scale-out"),
        (404, b"", "no such path"),
        (307, b"", "redirects elsewhere, which is not followed"),
    ],
)
def test_other_failures_are_not_repeated(server, status, body, message):
    server.failures = [(status, {"Location": "http://127.0.0.1:9/"}, body)]
    with serving(server) as url:
        http_client, pauses = client(url)
        with pytest.raises(ServerError, match=message):
            http_client.ask(PATH, QUESTION)
    assert pauses == []


def test_the_key_is_sent_and_never_shown(server, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, "sk-secret")
    server.failures = [(401, {}, b"no")]
    with serving(server) as url:
        http_client, _ = client(url)
        with pytest.raises(ServerError) as problem:
            http_client.ask(PATH, QUESTION)
    assert server.seen[0][2] == "Bearer sk-secret"
    assert "secret" not in f"{problem.value} {http_client!r} {problem.value.__cause__!r}"


@pytest.mark.parametrize("key", ["sk-secret\r\nX-Evil: 1", "sk-secret\u2603", "sk-secret\u00e9"])
def test_a_key_that_is_no_header_is_refused_and_not_shown(key, server, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, key)
    with serving(server) as url, pytest.raises(TielineError, match=KEY_VARIABLE) as problem:
        client(url)[0].ask(PATH, QUESTION)
    assert "secret" not in str(problem.value)
    assert server.seen == []


def test_spaces_around_a_key_are_left_out(server, monkeypatch):
    monkeypatch.setenv(KEY_VARIABLE, " sk-secret\n")
    with serving(server) as url:
        client(url)[0].ask(PATH, QUESTION)
    assert server.seen[0][2] == "Bearer sk-secret"


def test_a_reason_of_any_depth_is_one_line(server):
    server.failures = [(400, {}, b"[" * 60_000)]
    with serving(server) as url, pytest.raises(ServerError, match=r"answered 400: \[\[") as problem:
        client(url)[0].ask(PATH, QUESTION)
    assert len(str(problem.value)) < 300


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"<html>hello</html>", "answered no JSON but '<html>hello"),
        (b"\x1b]0;x\x07", r"answered no JSON but '\\\\x1b"),
        (b'{"a": NaN}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"", "no JSON"),
    ],
)
def test_anything_but_json_is_one_line(server, raw, message):
    server.raw = raw
    with serving(server) as url, pytest.raises(ServerError, match=message) as problem:
        client(url)[0].ask(PATH, QUESTION)
    assert "\n" not in str(problem.value)


def test_a_huge_answer_is_not_read_to_its_end(server, monkeypatch):
    monkeypatch.setattr(server_client, "MOST_ANSWER_BYTES", 1 << 20)
    server.raw = b"[" + b"1," * (1 << 21) + b"1]"
    with serving(server) as url, pytest.raises(ServerError, match="more than 1 MB"):
        client(url)[0].ask(PATH, QUESTION)


def test_an_answer_that_does_not_come_ends_at_the_time_out():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        http_client, pauses = client(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.2)
        with pytest.raises(ServerError, match=r"no answer within 0\.2 s"):
            http_client.ask(PATH, QUESTION)
    assert pauses == []


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b" "),
        (b"HTTP/1.1 500 No\r\nContent-Length: 1000000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nX-Header: ", b"a"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    ],
    ids=["body", "body-of-500", "header", "continue"],
)
def test_an_answer_that_drips_ends_at_the_time_out(start, drop):
    def drip(listener, stop):
        connection, _ = listener.accept()
        with connection, suppress(OSError):
            connection.recv(4096)
            connection.sendall(start)
            while not stop.wait(0.05):
                connection.sendall(drop)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        stop = threading.Event()
        thread = threading.Thread(target=drip, args=(listener, stop))
        threading.Timer(4.0, stop.set).start()
        thread.start()
        http_client, _ = client(
            f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=0.4, retries=0
        )
        begin = time.monotonic()
        with pytest.raises(ServerError, match=r"no answer within 0\.4 s|answered 500$"):
            http_client.ask(PATH, QUESTION)
        assert time.monotonic() - begin < 2
        stop.set()
        thread.join()


def test_a_server_that_is_not_there_is_one_line():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    http_client, pauses = client(f"http://127.0.0.1:{port}", retries=1)
    with pytest.raises(ServerError, match=r"cannot be reached: .*refused"):
        http_client.ask(PATH, QUESTION)
    assert len(pauses) == 1


@pytest.mark.parametrize(
    "url", ["http://", "ftp://a", "http://me:pass@host", "http://a?key=1", "http://a#key"]
)
def test_addresses_that_are_none_are_refused(url):
    with pytest.raises(TielineError, match="address"):
        ServerClient(url)


def test_addresses_are_told_from_models():
    assert is_server("http://a:1")
    assert is_server("HTTPS://a")
    assert not is_server("demo")
    assert not is_server(None)


def test_answers_come_in_the_order_of_the_questions():
    def slowest_first(number):
        time.sleep(0.02 * (5 - number))
        return number

    counts = []
    assert ask_all(slowest_first, range(5), 5, counts.append) == [*range(5)]
    assert counts == [1, 2, 3, 4, 5]


def test_the_first_failure_ends_all():
    numbers = []

    def ask(number):
        numbers.append(number)
        if number == 1:
            raise ServerError("no")
        return number

    with pytest.raises(ServerError, match="no"):
        ask_all(ask, range(1000), 1)
    assert numbers == [0, 1]


@pytest.mark.parametrize(
    "url",
    [
        *("http://[::1", "http://host:port", "http://host:70000", "http://", "ftp://host"),
        *("http:", "http://a..b", f"http://{64 * 'a'}.b", "http://\u2603:1", "http://a/\u00e4"),
        *("http://a/b c", "http://a/\n"),
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(TielineError, match="is no address such as") as problem:
        ServerClient(url)
    assert "\n" not in str(problem.value)
