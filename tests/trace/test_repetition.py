"""Warm-up, exact ties, stale layers and copied layers are found where they are."""

import os
from pathlib import Path

import numpy as np
import pytest

import tieline as tl
from tests.trace.test_soundness import sound
from tieline.trace.readers import Routes
from tieline.trace.repetition import repeated_row_mask, repetition_findings

REAL = Path(os.environ.get("TIELINE_DATA", "missing")) / "real-routes"
needs_logs = pytest.mark.skipif(
    not REAL.is_dir(), reason="needs the logs of real engines below TIELINE_DATA"
)


def routes(ids, **fields):
    return Routes(ids, "array", "a", **fields)


def cases(findings):
    return {finding.case: finding for finding in findings}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_warm_up_in_front_of_few_ids_is_found_and_counted(k, layers):
    ids, _ = sound(400, layers, k)
    dummy = np.broadcast_to(np.arange(3, 3 + k), (300, layers, k))
    both = np.concatenate([dummy, ids])
    finding = cases(repetition_findings(routes(both)))["warm-up"]
    assert (finding.severity, finding.count, finding.total) == ("unsound", 300, 700)
    assert finding.reason == "warm-up"
    assert "--drop warm-up" in finding.cause
    assert repeated_row_mask(routes(both)).tolist() == [True] * 300 + [False] * 400
    assert repetition_findings(routes(ids)) == []


def test_sticky_choices_and_a_repeated_token_are_no_warm_up():
    rng = np.random.default_rng(0)
    stay = rng.random(2000) < 0.9
    ids = np.zeros(2000, int)
    for row in range(1, 2000):
        ids[row] = ids[row - 1] if stay[row] else rng.integers(8)
    assert repetition_findings(routes(ids[:, None, None])) == []
    ids, tokens = sound(400, 1, 4)
    ids[100:180], tokens[100:180] = ids[100], tokens[100]
    assert repetition_findings(routes(ids, tokens=tokens)) == []
    (finding,) = repetition_findings(routes(ids))
    assert finding.severity == "suspicious"
    (finding,) = repetition_findings(routes(ids, tokens=np.arange(400)))
    assert finding.severity == "unsound"


def test_a_document_of_one_repeated_token_is_suspicious():
    ids, tokens = sound(400, 2, 4)
    both = np.concatenate([np.repeat(ids[:1], 280, axis=0), ids])
    fields = {
        "tokens": np.concatenate([np.repeat(tokens[:1], 280), tokens]),
        "documents": np.repeat([0, 1], [280, 400]),
    }
    (finding,) = repetition_findings(routes(both, **fields))
    assert (finding.severity, finding.reason) == ("suspicious", "warm-up")
    inside = {**fields, "documents": np.zeros(680, int)}
    assert repetition_findings(routes(both, **inside)) == []


def test_a_repeated_token_is_no_stale_layer():
    rng = np.random.default_rng(0)
    ids, tokens = sound(400, 3, 4)
    stretch = slice(100, 160)
    ids[stretch], tokens[stretch] = ids[100], tokens[100]
    for layer in (1, 2):  # the preceding text still changes some rows of later layers
        for row in 100 + np.flatnonzero(rng.random(60) < 0.3):
            ids[row, layer] = ids[rng.integers(400), layer]
    assert "layer-run" not in cases(repetition_findings(routes(ids)))
    assert "layer-run" not in cases(repetition_findings(routes(ids, tokens=tokens)))
    other, _ = sound(400, 3, 4, seed=1)
    ids[stretch, 1:] = other[stretch, 1:]
    assert "layer-run" in cases(repetition_findings(routes(ids)))
    assert "layer-run" not in cases(repetition_findings(routes(ids, tokens=tokens)))


def test_equal_weights_tell_a_warm_up_from_a_repeated_choice():
    ids, _ = sound(1000, 1, 4)
    ids[:80] = ids[0]
    weights = np.random.default_rng(0).random(ids.shape)
    assert (
        cases(repetition_findings(routes(ids, weights=weights)))["warm-up"].severity == "suspicious"
    )
    weights[:80] = weights[0]
    assert cases(repetition_findings(routes(ids, weights=weights)))["warm-up"].severity == "unsound"


def test_exact_ties_of_all_experts_are_named():
    ids, _ = sound(400, 1, 4)
    weights = np.random.default_rng(0).random(ids.shape)
    rows = np.random.default_rng(1).choice(400, 40, replace=False)
    ids[rows], weights[rows] = [[3, 2, 1, 0]], 0.25
    (finding,) = repetition_findings(routes(ids, weights=weights))
    assert (finding.case, finding.count, finding.severity) == ("tied-rows", 40, "unsound")
    assert "exact tie" in finding.message
    assert np.flatnonzero(repeated_row_mask(routes(ids, weights=weights))).tolist() == sorted(rows)
    uniform = np.full(ids.shape, 0.25)  # a model that weights all experts alike
    assert repetition_findings(routes(sound(400, 1, 4)[0], weights=uniform)) == []


def test_a_stale_layer_and_copied_layers():
    ids, _ = sound(400, 4, 3)
    stale = ids.copy()
    stale[100:200, 2] = stale[100, 2]
    (finding,) = repetition_findings(routes(stale))
    assert (finding.case, finding.count) == ("layer-run", 100)
    assert "layer 2" in finding.message
    copied = ids.copy()
    copied[:, 3] = copied[:, 1, ::-1]
    (finding,) = repetition_findings(routes(copied))
    assert finding.kind == "copied-layers"
    assert "layer 3 = layer 1" in finding.message
    assert repetition_findings(routes(ids)) == []


def test_a_layer_that_is_copied_in_a_part_of_the_rows():
    ids, _ = sound(400, 4, 3)
    ids[260:, 3] = ids[260:, 1]
    (finding,) = repetition_findings(routes(ids))
    assert "layer 3 = layer 1" in finding.message


def test_a_loop_of_few_tokens_with_one_choice_is_no_stale_layer():
    ids, tokens = sound(500, 3, 2)
    loop = np.tile([3, 5, 8], 40)
    ids[100:220], tokens[100:220] = ids[loop], loop
    ids[100:220, 2] = [4, 7]
    assert repetition_findings(routes(ids)) == []
    assert repetition_findings(routes(ids, tokens=tokens)) == []
    other = np.random.default_rng(0).integers(0, 40, 500)
    (finding,) = repetition_findings(routes(ids, tokens=other))
    assert finding.case == "layer-run"


@needs_logs
@pytest.mark.parametrize(
    ("name", "case", "count"),
    [
        ("qwen15moe-a100-bf16", "warm-up", 8448),
        ("qwen15moe-rtx5080-gptq4", "warm-up", 16640),
        ("olmoe-t4", "tied-rows", 2048),
    ],
)
def test_logs_of_real_engines_hold_warm_up_and_exact_ties(tmp_path, name, case, count):
    from tieline.analysis.route_files import convert

    file = REAL / f"{name}-layer0.jsonl.gz"
    result = tl.check(file)
    (finding,) = [x for x in result.findings if x.severity == "unsound"]
    assert (finding.case, finding.count) == (case, count)
    conversion = convert(file, tmp_path / "a.npz", to="npz", drop="warm-up")
    assert conversion.dropped == count
    assert tl.check(tmp_path / "a.npz").sound


@pytest.mark.parametrize("seed", range(5))
def test_a_stale_layer_beside_one_other_with_k_1(seed):
    ids, _ = sound(800, 2, 1, 16, seed=seed)
    assert repetition_findings(routes(ids)) == []
    ids[300:560, 1] = ids[300, 1]
    finding = cases(repetition_findings(routes(ids)))["layer-run"]
    assert (finding.severity, finding.evidence["layer"]) == ("unsound", "layers.1")


def test_an_expert_that_most_tokens_choose_is_no_stale_layer():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 16, (3000, 2, 1))
    ids[:, 1, 0] = np.where(rng.random(3000) < 0.8, 3, ids[:, 1, 0])
    assert repetition_findings(routes(ids)) == []
