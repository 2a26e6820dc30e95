"""Verification of what a worker wrote: rows, ids, picks against sorted scores, ties apart."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tieline.core.errors import TraceError
from tieline.engines.engine_run import (
    WorkerAnswer,
    answer_trace,
    check_worker_answer,
    read_worker_answer,
    score_agreement,
)
from tieline.trace.record import check_trace

DOCUMENTS = [np.array([4, 7, 1]), np.array([2, 9])]


def worker_arrays(experts=5, k=2, layers=3, seed=0):
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(5, layers, experts)).astype(np.float32)
    picks = np.argsort(-logits, -1, kind="stable")[..., :k].astype(np.int32)
    return {
        "tokens": np.concatenate(DOCUMENTS),
        "documents": np.array([0, 0, 0, 1, 1]),
        "positions": np.array([0, 1, 2, 0, 1]),
        "picks": picks,
        "logits": logits,
        "weights": np.take_along_axis(logits, picks, -1),
    }


def answer(**changes):
    arrays = {name: x for name, x in (worker_arrays() | changes).items() if x is not None}
    facts = {"layers": [f"model.layers.{n}.mlp.gate" for n in range(3)], "dtype": "fp32"}
    return WorkerAnswer("fake", arrays, facts)


def test_a_sound_answer_becomes_a_trace_with_ranks_in_order():
    sound_answer = answer()
    check_worker_answer(sound_answer, DOCUMENTS)
    trace = answer_trace(sound_answer, {"engine": "fake"})
    check_trace(trace)
    assert trace.tokens.tolist() == [4, 7, 1, 2, 9]
    assert trace.documents.tolist() == [0, 0, 0, 1, 1]
    assert trace.provenance["ties"] == trace.provenance["off_scores"] == [0, 0, 0]
    for index, layer in enumerate(trace.layers):
        assert layer.experts[:, :2].tolist() == sound_answer.arrays["picks"][:, index].tolist()
        assert layer.scores[:, :2].tolist() == layer.weights.tolist()


def test_an_engine_that_lists_its_picks_in_another_order_has_the_same_trace():
    straight = answer_trace(answer(), {})
    turned = {
        name: x[..., ::-1] for name, x in worker_arrays().items() if name in ("picks", "weights")
    }
    other = answer_trace(answer(**turned), {})
    for mine, theirs in zip(straight.layers, other.layers, strict=True):
        assert mine.experts.tolist() == theirs.experts.tolist()
        assert mine.weights.tolist() == theirs.weights.tolist()


def test_without_scores_the_choice_keeps_the_engines_order():
    trace = answer_trace(answer(logits=None), {})
    assert trace.layers[1].scores is None
    assert trace.layers[1].experts.tolist() == worker_arrays()["picks"][:, 1].tolist()
    assert answer_trace(answer(), {}, scores=False).layers[0].scores is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"picks": None}, "no picks"),
        ({"picks": worker_arrays()["picks"][:4]}, "4 rows of picks for 5 tokens"),
        ({"logits": worker_arrays()["logits"][:3]}, "3 rows of logits for 5 tokens"),
        ({"logits": worker_arrays()["logits"][:, :2]}, "2 layers"),
        ({"picks": worker_arrays()["picks"].astype(float)}, "type float64"),
        ({"logits": np.full((5, 3, 5), np.nan)}, "NaN"),
        ({"tokens": np.array([4, 7, 1, 9, 2])}, "other tokens"),
        ({"positions": np.arange(5)}, "other positions"),
        ({"documents": None}, "other documents"),
    ],
)
def test_an_answer_that_does_not_fit_is_refused(changes, message):
    with pytest.raises(TraceError, match=message):
        check_worker_answer(answer(**changes), DOCUMENTS)


def test_layers_without_names_are_refused():
    worker_answer = WorkerAnswer("fake", worker_arrays(), {"layers": ["a"]})
    with pytest.raises(TraceError, match="3 layers of picks"):
        check_worker_answer(worker_answer, DOCUMENTS)


@pytest.mark.parametrize(("value", "message"), [(7, "outside 0"), (-1, "outside 0")])
def test_experts_that_do_not_exist_are_refused(value, message):
    picks = worker_arrays()["picks"].copy()
    picks[3, 1, 0] = value
    with pytest.raises(TraceError, match=message):
        answer_trace(answer(picks=picks), {})


def test_an_expert_picked_twice_is_refused():
    picks = worker_arrays()["picks"].copy()
    picks[2, 2] = 1
    with pytest.raises(TraceError, match="twice in 1 tokens"):
        answer_trace(answer(picks=picks), {})


@given(st.integers(0, 1000), st.integers(1, 4))
def test_agreement_is_that_of_brute_force(seed, k):
    generator = np.random.default_rng(seed)
    scores = generator.integers(0, 4, size=(20, 5)).astype(np.float32)
    picks = np.stack([generator.permutation(5)[:k] for _ in range(20)])
    tied = off_scores = 0
    for row, chosen in zip(scores, picks, strict=True):
        left = [row[e] for e in range(5) if e not in chosen]
        tied += min(row[chosen]) == max(left)
        off_scores += min(row[chosen]) < max(left)
    agreement = score_agreement(picks, scores)
    assert (agreement.tied, agreement.off_scores) == (tied, off_scores)


def test_a_tie_within_the_rounding_of_float32_is_a_tie():
    scores = np.array([[1.0, 1.0 - 2.0**-22, 0.0], [1.0, 0.999, 0.0]], np.float32)
    assert score_agreement(np.array([[1], [1]]), scores).tied == 1
    assert score_agreement(np.array([[1], [1]]), scores).off_scores == 1
    assert score_agreement(np.array([[0], [0]]), scores).off_scores == 0


def test_a_tie_stays_as_the_engine_decided_it():
    logits = np.zeros((5, 3, 5), np.float32)
    picks = np.full((5, 3, 2), [4, 2], np.int32)
    trace = answer_trace(answer(logits=logits, picks=picks, weights=None), {})
    check_trace(trace)
    assert trace.provenance["ties"] == [5, 5, 5]
    assert sorted(trace.layers[0].experts[0, :2].tolist()) == [2, 4]


def test_picks_against_the_scores_are_kept_and_counted():
    picks = np.argsort(worker_arrays()["logits"], -1)[..., :2].astype(np.int32)  # the smallest
    trace = answer_trace(answer(picks=picks, weights=None), {})
    assert trace.provenance["off_scores"] == [5, 5, 5]
    layer = trace.layers[0]
    assert sorted(layer.experts[0, :2].tolist()) == sorted(picks[0, 0].tolist())
    assert (layer.scores[:, :2].amin(1) < layer.scores[:, 2:].amax(1)).all()


def test_files_that_are_no_answers_are_refused(tmp_path):
    path = tmp_path / "answer.npz"
    path.write_bytes(b"PK nothing")
    with pytest.raises(TraceError, match="cannot be read"):
        read_worker_answer(path, "fake")
    np.savez(path, picks=np.zeros(3))
    with pytest.raises(TraceError, match="no facts"):
        read_worker_answer(path, "fake")
    facts = np.frombuffer(json.dumps([1]).encode(), np.uint8)
    np.savez(path, facts=facts)
    with pytest.raises(TraceError, match="JSON object"):
        read_worker_answer(path, "fake")
    np.savez(path, facts=np.array([{}], dtype=object))
    with pytest.raises(TraceError, match="cannot be read"):
        read_worker_answer(path, "fake")
