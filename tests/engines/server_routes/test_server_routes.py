"""Routes of running servers: the forms of vLLM and SGLang, bad answers, prompts, traces."""

import numpy as np
import pytest
import torch

import tieline
from tests.engines.servers import EXPERTS, LAYERS, K, LittleServer, npy_text, rule_routes, serving
from tieline.core.errors import TielineError
from tieline.engines.engine_capture import capture_engine
from tieline.engines.server_client import ServerError
from tieline.engines.server_routes import RouteServer
from tieline.run.shared_settings import CaptureSettings
from tieline.trace.store import load_trace, save_trace

PROMPTS = [[5, 6, 7, 8], [9, 4], [3, 3, 3, 3, 3, 3]]
FAST = {"retries": 0, "tokenizer": "demo"}


def opened(url, engine="vllm", **options):
    return RouteServer.open(url, engine, CaptureSettings(engine=engine, **FAST | options))


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_routes_of_a_batch_are_those_of_its_prompts(engine):
    with serving(LittleServer()) as url:
        server = opened(url, engine)
        answers = server.route(PROMPTS)
    for answer, ids in zip(answers, PROMPTS, strict=True):
        assert np.array_equal(answer.experts, rule_routes(ids))
    assert (server.model, server.root, server.version) == ("served", "demo", "0.32.0")


def test_the_version_is_read_where_sglang_states_it():
    server = LittleServer()
    server.version_path = "/server_info"
    with serving(server) as url:
        assert opened(url, "sglang").version == "0.32.0"


def test_without_completions_the_path_of_token_ids_is_asked():
    server = LittleServer()
    server.paths = {"/inference/v1/generate"}
    with serving(server) as url:
        server_routes = opened(url)
        for _ in range(2):
            answers = server_routes.route(PROMPTS)
            assert [len(answer.experts) for answer in answers] == [4, 2, 6]
    paths = [path for path, question, _ in server.seen if question is not None]
    assert paths.count("/v1/completions") == 1
    assert paths.count("/inference/v1/generate") == 6


@pytest.mark.parametrize(("engine", "name"), [("vllm", "vLLM"), ("sglang", "SGLang")])
def test_an_answer_without_routes_names_the_flag(engine, name):
    server = LittleServer()
    server.fields = {"routed_experts"}
    message = f"without routes: start {name} with --enable-return-routed-experts"
    with serving(server) as url, pytest.raises(ServerError, match=message):
        opened(url, engine).route(PROMPTS)


def test_the_form_of_vllm_0_21_is_read():
    server, (ids, *_) = LittleServer(), PROMPTS
    routes = rule_routes(ids)
    choice = {"prompt_routed_experts": routes.tolist(), "routed_experts": []}
    server.answer = lambda path, question: (
        {"data": [{"id": "served"}]} if path == "/v1/models" else {"choices": [choice]}
    )
    choice["routed_experts"] = npy_text(routes[:0])
    with serving(server) as url:
        assert np.array_equal(opened(url).route([ids])[0].experts, routes)


CHOICE = {"routed_experts": npy_text(rule_routes(PROMPTS[0]))}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": []}, "answered 0 choices for 1 prompts"),
        ([], "answered 0 choices"),
        ({"choices": [{"index": 7}]}, "not numbered"),
        ({"choices": [{"index": "a"}]}, "not numbered"),
        ({"choices": [{"routed_experts": "%%%"}]}, "routed_experts"),
        ({"choices": [{"routed_experts": npy_text(np.zeros((2, 3)))}]}, "shape"),
        ({"choices": [{"routed_experts": npy_text(rule_routes([1, 2]))}]}, "2 rows for a prompt"),
        (
            {"choices": [{"routed_experts": npy_text(rule_routes([1] * 4)), "token_ids": ["x"]}]},
            "token ids must be whole numbers",
        ),
        ({"choices": [{**CHOICE, "prompt_token_ids": [1, 5, 6, 7]}]}, "other tokens"),
        ({"choices": [{**CHOICE, "prompt_token_ids": 4, "token_ids": [1]}]}, "lists of"),
        ({"choices": [{**CHOICE, "routed_experts_prompt_start": 1}]}, "from token 1 on"),
        ({"choices": [{**CHOICE, "token_ids": [1, 2]}]}, "2 new tokens .* 1 were asked"),
        ({"choices": [{"routed_experts": npy_text(rule_routes([1] * 9))}]}, "9 rows and 0 new"),
    ],
)
def test_answers_of_another_form_are_one_line(answer, message):
    server = LittleServer()
    models = {"data": [{"id": "served"}]}
    server.answer = lambda path, _: models if path == "/v1/models" else answer
    with serving(server) as url, pytest.raises(TielineError, match=message) as problem:
        opened(url).route(PROMPTS[:1])
    assert "\n" not in str(problem.value)


def test_a_time_out_that_no_socket_takes_is_refused():
    with pytest.raises(TielineError, match=r"timeout must be at most 1e[+]06, got 1e[+]10"):
        capture_engine("http://127.0.0.1:9", engine="vllm", ids=PROMPTS, timeout=1e10, retries=0)


def test_a_server_without_models_is_none():
    server = LittleServer()
    server.answer = lambda path, _: {"data": []}
    with serving(server) as url, pytest.raises(ServerError, match="names no model"):
        opened(url)


def test_sglang_without_a_shape_asks_for_one(tmp_path):
    server = LittleServer()
    server.root = str(tmp_path / "nowhere")
    with serving(server) as url, pytest.raises(ServerError, match="without a shape"):
        opened(url, "sglang", tokenizer=None).route(PROMPTS)


def test_the_engine_of_a_server_must_be_named():
    with serving(LittleServer()) as url, pytest.raises(TielineError, match="vllm or sglang"):
        capture_engine(url, ids=PROMPTS)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_captured_trace_is_saved_and_read_again(engine, tmp_path):
    events = []
    with serving(LittleServer()) as url:
        result = capture_engine(
            url, engine=engine, ids=PROMPTS, progress=lambda *x: events.append(x), **FAST
        )
    assert (result.tokens, result.documents, result.k) == (12, 3, K)
    assert (len(result.layers), result.n_experts, result.has_scores) == (LAYERS, EXPERTS, False)
    assert events[-1] == ("server", 12, 12)
    save_trace(result.trace, tmp_path / "trace")
    trace = load_trace(tmp_path / "trace")
    assert trace.tokens.tolist() == [x for ids in PROMPTS for x in ids]
    experts = torch.stack([layer.experts for layer in trace.layers], 1)
    expected = np.concatenate([rule_routes(ids) for ids in PROMPTS])
    assert np.array_equal(experts.sort(2).values.numpy(), np.sort(expected, 2))
    assert {layer.flip.value for layer in tieline.diff(trace, trace).layers} == {0}


def test_generated_tokens_have_rows_too():
    def route(prompts):
        return [rule_routes([*ids, *NEW[:-1]]) for ids in prompts]

    NEW = [11, 12, 13]
    server = LittleServer(route)
    plain = server.answer

    def answer(path, question):
        content = plain(path, question)
        for choice in content.get("choices", []):
            choice["token_ids"] = NEW
        return content

    server.answer = answer
    with serving(server) as url:
        result = capture_engine(url, engine="vllm", ids=PROMPTS[:1], new_tokens=3, **FAST)
    assert result.trace.tokens.tolist() == [5, 6, 7, 8, 11, 12]


def test_prompts_are_for_servers():
    with pytest.raises(TielineError, match="prompts is for a running server"):
        capture_engine("demo", prompts="a.txt")
