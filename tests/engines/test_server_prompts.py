"""Prompts of servers: files of them, and chats that the server or this process tokenises."""

import json
from contextlib import contextmanager

import numpy as np
import pytest

from tests.engines.servers import LittleServer, rule_routes, serving
from tieline.core.errors import TielineError
from tieline.engines.engine_capture import capture_engine
from tieline.engines.server_client import ServerError
from tieline.engines.server_prompts import prompt_ids, read_prompts
from tieline.models.demo import load_demo_tokenizer

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
CHAT = "/v1/chat/completions"
CHATS = {"Hello": [3, 1, 4], "Another": [1, 5, 9, 2]}


@pytest.fixture
def prompts(tmp_path):
    """A file of two chats and, between them, token ids."""
    chats = [{"messages": [{"role": "user", "content": text}]} for text in CHATS]
    lines = [json.dumps(chats[0]), "[7, 7]", json.dumps(chats[1])]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    return tmp_path / "chats.jsonl"


@contextmanager
def chat_server():
    server = LittleServer()
    server.paths.add(CHAT)
    server.chat_ids = CHATS
    with serving(server) as url:
        yield server, url


def questions_to(server, path):
    return [question for asked_path, question, _ in server.seen if asked_path == path]


@pytest.mark.parametrize(
    ("engine", "root", "path", "option"),
    [
        ("vllm", "no/such/model", "/v1/completions", "return_token_ids"),  # needs no tokenizer
        ("sglang", "demo", "/generate", "return_input_ids_in_sglext"),
    ],
)
def test_chats_are_tokenised_by_the_server(engine, root, path, option, prompts):
    events = []
    with chat_server() as (server, url):
        server.root = root
        result = capture_engine(
            url,
            engine=engine,
            prompts=prompts,
            retries=0,
            progress=lambda *event: events.append(event),
        )
    trace, documents = result.trace, [CHATS["Hello"], [7, 7], CHATS["Another"]]
    assert trace.tokens.tolist() == [token for ids in documents for token in ids]
    experts = np.stack([layer.experts.numpy() for layer in trace.layers], 1)
    expected = np.concatenate([rule_routes(ids) for ids in documents])
    assert np.array_equal(np.sort(experts, 2), np.sort(expected, 2))
    assert result.settings["chats tokenised by the server"] == 2
    assert [len(questions_to(server, name)) for name in (CHAT, path)] == [2, 1]
    assert questions_to(server, CHAT)[0][option] is True
    assert events[:2] == [("server", 1, 2), ("server", 2, 2)]


@pytest.mark.parametrize(
    "change",
    [
        lambda server: server.paths.discard(CHAT),
        lambda server: server.failures.append((400, {}, b'{"error": "no chat template"}')),
        lambda server: server.fields.add("prompt_token_ids"),
        lambda server: setattr(server, "tokenizer", "demo"),
    ],
    ids=["no path", "refused", "no token ids", "a named tokenizer"],
)
def test_chats_are_tokenised_here_where_the_server_does_not_tell(prompts, change, monkeypatch):
    tokenizer = load_demo_tokenizer()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr("tieline.engines.server_prompts.load_tokenizer", lambda name: tokenizer)
    with chat_server() as (server, url):
        change(server)
        name = getattr(server, "tokenizer", None)
        result = capture_engine(url, engine="vllm", prompts=prompts, retries=0, tokenizer=name)
    documents = [tokenizer(text)["input_ids"] for text in CHATS]
    documents.insert(1, [7, 7])
    assert result.trace.tokens.tolist() == [token for ids in documents for token in ids]
    assert "chats tokenised by the server" not in result.settings
    assert len(questions_to(server, CHAT)) <= 1  # the first answer shows what the server does


def test_a_chat_without_routes_names_the_option_of_the_server(prompts, monkeypatch):
    tokenizer = load_demo_tokenizer()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr("tieline.engines.server_prompts.load_tokenizer", lambda name: tokenizer)
    with chat_server() as (server, url):
        server.fields.add("routed_experts")
        with pytest.raises(ServerError, match="start vLLM with --enable-return-routed-experts"):
            capture_engine(url, engine="vllm", prompts=prompts, retries=0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"prompt_token_ids": [1], "choices": []}, "answered 0 choices for 1 prompts"),
        ([], "answered 0 choices"),
    ],
)
def test_answers_to_chats_of_another_form_are_one_line(prompts, answer, message):
    with chat_server() as (server, url):
        server.chat = lambda question: answer
        with pytest.raises(TielineError, match=message) as problem:
            capture_engine(url, engine="vllm", prompts=prompts, retries=0)
    assert "\n" not in str(problem.value)


@pytest.mark.parametrize("box", [None, "x", [], {"routed_experts": "AAAA"}, {"input_ids": [1]}])
def test_a_chat_of_sglang_without_its_fields_is_tokenised_here(box, prompts, monkeypatch):
    tokenizer = load_demo_tokenizer()
    tokenizer.chat_template = TEMPLATE
    monkeypatch.setattr("tieline.engines.server_prompts.load_tokenizer", lambda name: tokenizer)
    with chat_server() as (server, url):
        server.chat = lambda question: {"choices": [{"index": 0}], "sglext": box}
        result = capture_engine(url, engine="sglang", prompts=prompts, retries=0)
    assert "chats tokenised by the server" not in result.settings


def test_too_few_rows_for_a_chat_are_refused(prompts):
    with chat_server() as (server, url):
        server.route = lambda prompts: [rule_routes(ids[1:]) for ids in prompts]
        with pytest.raises(ServerError, match="2 rows for a prompt of 3 tokens"):
            capture_engine(url, engine="vllm", prompts=prompts, retries=0)


def test_a_model_without_a_chat_template_is_one_line():
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    with pytest.raises(TielineError, match=r"line 3: the chat cannot be tokenised here: .*chat"):
        prompt_ids(chat, load_demo_tokenizer(), "line 3")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_part_of_the_first_prompt(name, tmp_path):
    (tmp_path / name).write_bytes(b'\xef\xbb\xbf"One"\r\n"Two"\r\n')
    texts = [content for _, content in read_prompts(tmp_path / name)]
    assert texts == (["One", "Two"] if name == "a.jsonl" else ['"One"', '"Two"'])


def test_a_text_that_is_not_utf8_is_refused_with_its_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"One\ncaf\xe9 au lait\n")
    with pytest.raises(TielineError, match=r"a\.txt: line 2 is not UTF-8 text: byte 0xe9"):
        read_prompts(tmp_path / "a.txt")


def test_prompts_are_lines_json_or_chats(tmp_path):
    tokenizer = load_demo_tokenizer()
    tokenizer.chat_template = TEMPLATE

    def read_ids(path):
        return [prompt_ids(content, tokenizer, label) for label, content in read_prompts(path)]

    (tmp_path / "a.txt").write_text("One line\n\nAnother\n")
    first, second = read_ids(tmp_path / "a.txt")
    assert first == tokenizer("One line")["input_ids"]
    lines = ["Another", [1, 2], {"token_ids": [3]}, {"prompt": "Another"}]
    lines.append({"messages": [{"role": "user", "content": "Another"}]})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert read_ids(tmp_path / "a.jsonl") == [second, [1, 2], [3], second, second]


NO_CHAT = '{"messages": []}'


@pytest.mark.parametrize("line", ["{", "3", "[]", '[1, "a"]', "[-1]", '{"a": 1}', '""', NO_CHAT])
def test_prompts_of_another_form_are_refused_with_their_line(line, tmp_path):
    (tmp_path / "a.jsonl").write_text(f"[1]\n{line}\n")
    reason = "line 2: (not valid|needs a text)"
    with chat_server() as (_, url), pytest.raises(TielineError, match=reason):
        capture_engine(url, engine="vllm", prompts=tmp_path / "a.jsonl", retries=0)
