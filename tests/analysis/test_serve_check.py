"""Planted dependence on the batch is named; a float32 server is silent."""

import io
import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from rich.console import Console

import tieline
from tests.engines.servers import LittleServer, rule_routes, serving
from tieline.analysis.route_files import load
from tieline.analysis.serve_check import serve_check
from tieline.core.errors import TielineError
from tieline.models.demo import load_demo_model
from tieline.report import page, summary, terminal

OPTIONS = {"tokenizer": "demo", "retries": 0, "count": 6, "length": 16, "batch_size": 3}


load_demo = cache(load_demo_model)


@cache
def prompt_layers(*ids):
    """Layers of the demo's trace of a prompt in float32, all experts in the order of scores."""
    model = load_demo()
    with torch.no_grad(), tieline.capture(model, ranks="all") as recorder:
        model(torch.tensor([ids], device=model.device))
    return recorder.trace().layers


def demo_routes(prompts):
    """Routes of the demo, prompts one by one: no batch can change them."""
    return [
        np.stack([layer.experts[:, :2].numpy() for layer in prompt_layers(*ids)], 1)
        for ids in prompts
    ]


def planted(layer, token, rank):
    """Routes in which a request of several prompts exchanges an expert of its last prompt."""

    def changed(prompts):
        answers = demo_routes(prompts)
        if len(prompts) > 1:
            ranks = prompt_layers(*prompts[-1])[layer].experts[token]
            answers[-1][token, layer] = [ranks[0], ranks[rank]]
        return answers

    return changed


def page_text(result):
    return page(result).replace("\u00a0", " ")


def test_a_float32_server_is_silent():
    with serving(LittleServer(demo_routes)) as url:
        result = serve_check(url, **OPTIONS, model="demo")
    assert result.invariant
    assert (result.prompts, result.tokens, result.layers, result.k) == (6, 96, 4, 2)
    assert [way.way for way in result.ways] == ["repeated", "cached", "batched", "after_short"]
    assert [way.near_ties for way in result.ways] == [0, 0, 0, 0]
    assert result.verdict.startswith("Batch-invariant here: all 96 tokens of 6 prompts")


@pytest.mark.parametrize(("layer", "token"), [(0, 3), (2, 15)])
def test_a_planted_dependence_on_the_batch_is_named(layer, token):
    with serving(LittleServer(planted(layer, token, 15))) as url:
        result = serve_check(url, **OPTIONS, model="demo")
    repeated, cached, batched, after_short = result.ways
    assert (repeated.flipped, cached.flipped) == (0, 0)
    for way in (batched, after_short):
        assert (way.flipped, way.prompts, way.first_flips) == (2, 2, 2)
        assert (way.first.layer, way.first.token, way.first.prompt) == (layer, token, 2)
        assert way.by_layer[layer] == 2
        assert (way.first.near_tie, way.near_ties) == (False, 0)
    assert result.batch_flips == 2
    assert "depends on the batch" in result.verdict
    text = summary(result) + str(result)
    assert "2.1 %" in text or "2.08 %" in text
    assert f"layer {layer}, token {token} of prompt 2" in page(result)
    assert "no near-ties" in page(result)
    assert "VLLM_BATCH_INVARIANT=1) keep choices that rounding changes" in page(result)
    assert "would keep" not in page(result)
    unjudged = replace(
        result,
        judged_by=None,
        ways=tuple(replace(way, near_ties=None) for way in result.ways),
    )
    assert "would keep the choice of 2 tokens (2.1 %), if rounding changed it" in page_text(
        unjudged
    )


def test_an_exchange_at_a_near_tie_is_one():
    def nearest(prompts):
        answers = demo_routes(prompts)
        if len(prompts) > 1:
            layer = prompt_layers(*prompts[-1])[1]
            token = int(layer.gap.argmin())
            ranks = layer.experts[token]
            answers[-1][token, 1] = [ranks[0], ranks[2]]
            assert layer.gap.min() < 0.05
        return answers

    with serving(LittleServer(nearest)) as url:
        result = serve_check(url, **OPTIONS | {"length": 64}, model="demo")
    assert {way.near_ties for way in result.ways[2:]} == {2}
    assert "All 4 first flips are near-ties" in page(result)
    assert "would keep the choice of 2 tokens (0.52 %)." in page_text(result)


def test_a_server_that_is_not_repeatable_is_called_so():
    state = {"requests": 0}

    def route(prompts):
        state["requests"] += 1
        return [(rule_routes(ids) + state["requests"]) % 16 for ids in prompts]

    with serving(LittleServer(route)) as url:
        result = serve_check(url, **OPTIONS)
    assert result.verdict.startswith("Not repeatable: 100 % of tokens")
    assert result.batch_flips == 0
    assert result.ways[0].near_ties is None
    assert "name the model that is served" in page(result)


def test_prefixes_are_kept_apart_but_for_the_cached_way():
    server = LittleServer()
    with serving(server) as url:
        serve_check(url, **OPTIONS)
    questions = [question for _, question, _ in server.seen if question is not None]
    salts = [question["cache_salt"] for question in questions]
    assert len(questions) == 3 * 6 + 2 * 2
    assert len(set(salts)) == len(questions) - 6
    assert salts[:6] == salts[12:18]
    assert {len(question["prompt"]) for question in questions} == {1, 3, 6}


def test_json_is_read_again_and_drawn_alike(tmp_path):
    with serving(LittleServer(planted(1, 2, 9))) as url:
        result = serve_check(url, **OPTIONS)
    file = tmp_path / "a.json"
    result.to_json(file)
    assert load(file) == result
    assert json.loads(file.read_text())["verdict"] == result.verdict
    damaged = json.loads(file.read_text())
    damaged["ways"][0]["by_layer"] = []
    file.write_text(json.dumps(damaged))
    with pytest.raises(TielineError, match="flips of 4 layers"):
        load(file)


def test_the_screen_fits_80_columns_and_40_lines():
    with serving(LittleServer(planted(1, 2, 9))) as url:
        result = serve_check(url, **OPTIONS, model="demo")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal(result, 80))
    lines = console.export_text().splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80


def test_what_is_no_address_is_refused():
    with pytest.raises(TielineError, match="no address such as"):
        serve_check("demo")


def test_a_server_that_changes_its_shape_is_refused():
    def route(prompts):
        routes = [rule_routes(ids) for ids in prompts]
        return routes if len(prompts) == 1 else [x[:, :3] for x in routes]

    with serving(LittleServer(route)) as url, pytest.raises(TielineError, match="layers, k"):
        serve_check(url, **OPTIONS)
