"""Every fault is found, named and counted in arrays that have it, and in no others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tieline.trace.readers import ReadOptions, Routes, read_routes
from tieline.trace.route_table import row_hashes
from tieline.trace.soundness import log10_copies_bound, soundness_findings
from tieline.trace.token_fit import token_fit_findings

ROWS, LAYERS, K, EXPERTS = 300, 5, 3, 32


def sound(rows=ROWS, layers=LAYERS, k=K, experts=EXPERTS, seed=0, vocabulary=40, skew=0.5):
    """Routes that follow from the token and from noise, with their tokens."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocabulary, rows)
    scores = rng.normal(size=(layers, vocabulary, experts))[:, tokens] * 1.5
    scores += rng.normal(size=scores.shape) + skew * rng.normal(size=(layers, 1, experts))
    return np.argsort(-scores, axis=2)[..., :k].transpose(1, 0, 2), tokens


IDS, TOKENS = sound()


def check(ids, n_experts=None, **fields):
    return soundness_findings(Routes(ids, "array", "a", **fields), n_experts)


def only(findings, severity="unsound"):
    return {x.kind: x for x in findings if x.severity == severity}


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from([20, 100, 500]),
    st.integers(1, 6),
    st.integers(1, 4),
    st.sampled_from([8, 64]),
    st.floats(0, 1.5),
    st.booleans(),
)
def test_sound_files_are_called_sound(seed, rows, layers, k, experts, skew, complete):
    ids, tokens = sound(rows, layers, k, experts, seed, skew=skew)
    findings = check(ids, experts if complete else None, tokens=tokens if complete else None)
    findings += token_fit_findings(Routes(ids, "array", "a", tokens=tokens))
    assert {finding.severity for finding in findings} <= {"note"}, findings


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64])
def test_nothing_but_zeros(dtype):
    (finding,) = check((IDS * 0).astype(dtype))
    assert (finding.kind, finding.severity, finding.count) == ("all-zero", "unsound", ROWS)
    assert "kernel" in finding.cause
    (finding,) = check(np.full_like(IDS, -1))
    assert finding.kind == "all-zero"
    assert check(np.zeros((3, 2, 1), int)) == []  # too few to say


@pytest.mark.parametrize(
    ("rows", "severity"),
    [
        (slice(0, 4), "unsound"),
        (slice(90, 91), "unsound"),
        (slice(250, None), "suspicious"),
        (slice(ROWS - 1, None), "note"),
    ],
)
def test_rows_that_nothing_was_written_to(rows, severity):
    ids = IDS.copy()
    ids[rows] = 0
    findings = only(check(ids), severity)
    assert findings["all-zero"].count == len(ids[rows])
    assert ("duplicate-expert" in findings) == (severity != "note")
    if severity == "unsound":
        assert findings["all-zero"].where == f"row {rows.start}"


def test_padding_between_documents_is_at_their_ends():
    ids, documents = IDS.copy(), np.repeat([0, 1, 2], 100)
    ids[[99, 199, 299]] = 0
    findings = check(ids, documents=documents)
    assert only(findings, "note")["all-zero"].count == 3
    assert only(findings) == {}
    assert "all-zero" in only(check(ids))


def test_a_stale_row_and_a_repeated_token_are_told_apart():
    ids = IDS.copy()
    ids[150:] = ids[150]
    finding = only(check(ids))["repeated-rows"]
    assert finding.count >= 150
    assert "150 times in a row" in finding.message
    assert "pass the tokens" in finding.cause
    assert "repeated-rows" in only(check(ids, tokens=TOKENS))
    repeated = TOKENS.copy()
    repeated[150:] = repeated[150]
    assert only(check(ids, tokens=repeated)) == {}
    few = IDS.copy()
    few[200:210] = few[200]
    assert only(check(few)) == {}
    assert "repeated-rows" in only(check(few), "suspicious")
    few[200:220] = few[200]
    assert "repeated-rows" in only(check(few, tokens=TOKENS))


def test_the_row_of_two_common_tokens_is_no_stale_row():
    ids, tokens = IDS.copy(), TOKENS.copy()
    rng = np.random.default_rng(0)
    tokens[rng.permutation(ROWS)[:40]] = rng.choice([50, 51], 40, p=[0.7, 0.3])
    ids[tokens >= 50] = ids[0]
    assert only(check(ids, tokens=tokens)) == {}
    assert "repeated-rows" in only(check(ids, tokens=TOKENS))


def test_weights_that_are_no_numbers_or_of_another_sum():
    weights = np.random.default_rng(0).random(IDS.shape) + 0.1
    weights /= weights.sum(2, keepdims=True)
    assert only(check(IDS, weights=weights)) == {}
    torn = weights.copy()
    torn[[7, 9, 200], 2] *= 1.6
    finding = only(check(IDS, weights=torn))["weights"]
    assert (finding.case, finding.count, finding.evidence["row"]) == ("other-sums", 3, 7)
    assert "layer 2" in finding.where
    torn[8, 1, 0] = np.nan
    finding = next(x for x in check(IDS, weights=torn) if x.case == "not-finite")
    assert (finding.severity, finding.count, finding.evidence["row"]) == ("unsound", 1, 8)


def test_weights_that_nothing_normalises_may_have_any_sum():
    rng = np.random.default_rng(0)
    assert only(check(IDS, weights=rng.random(IDS.shape))) == {}
    near = 0.25 + 0.01 * rng.normal(size=IDS.shape)  # of a router that hardly prefers an expert
    assert only(check(IDS, weights=near)) == {}
    dropped = np.full(IDS.shape, 1 / K)
    dropped[:, :, 0] += rng.random(IDS.shape[:2]) / 9
    dropped[:, :, 1] -= dropped[:, :, 0] - 1 / K
    assert only(check(IDS, weights=dropped)) == {}
    dropped[::20, :, 2] = 0  # an expert at its capacity
    assert only(check(IDS, weights=dropped)) == {}


def test_equal_rows_throughout_are_suspicious():
    ids = np.repeat(IDS[:1], 80, axis=0)
    finding = only(check(ids), "suspicious")["constant-layer"]
    assert (finding.case, finding.count) == ("all-constant", 80)
    assert "constant-layer" in only(check(ids[:, :1], tokens=TOKENS[:80]), "suspicious")
    assert only(check(ids, tokens=np.full(80, 3)), "suspicious") == {}
    assert only(check(ids[:20]), "suspicious") == {}


@pytest.mark.parametrize("layers", [1, 3])
def test_a_long_warm_up_before_other_rows_is_no_constant_layer(layers):
    ids = np.concatenate([np.repeat(IDS[:1], 5000, axis=0), IDS])[:, :layers]
    assert "constant-layer" not in {finding.kind for finding in check(ids)}


def test_copies_of_whole_documents_are_no_stale_rows():
    ids = np.concatenate([IDS[:10]] * 30)
    assert only(check(ids, documents=np.repeat(np.arange(30), 10))) == {}


def test_the_bound_on_coincidences():
    assert log10_copies_bound(5, 10, 0.5) == 0
    assert log10_copies_bound(10, 10, 0.1) == pytest.approx(-10)
    by_hand = sum(
        float(np.prod([10 - i for i in range(m)]) / np.prod(range(1, m + 1)))
        * 0.2**m
        * 0.8 ** (10 - m)
        for m in range(6, 11)
    )
    assert np.log10(by_hand) <= log10_copies_bound(6, 10, 0.2) < 0


def test_equal_rows_share_a_code():
    ids = np.array([[1, 2], [2, 1], [1, 2], [0, 0], [256, 0], [0, 256]])
    codes = row_hashes(ids)
    assert codes[0] == codes[2]
    assert len(set(codes.tolist())) == 5


@pytest.mark.parametrize("count", [1, 30])
def test_an_expert_twice(count):
    ids = IDS.copy()
    ids[40 : 40 + count, 2, 1] = ids[40 : 40 + count, 2, 0]
    finding = only(check(ids))["duplicate-expert"]
    assert finding.count == count
    assert finding.where.startswith("row 40, layer 2: ")
    assert "one layer alone" in finding.cause
    zeros = IDS.copy()
    zeros[40, :2] = 0
    assert "placeholders" in only(check(zeros))["duplicate-expert"].cause


def test_ids_that_count_from_one():
    ids, _ = sound(experts=8)
    assert not only(check(ids), "suspicious")
    finding = only(check(ids + 1), "suspicious")["out-of-range"]
    assert "expert 0" in finding.message
    assert "count from 1" in finding.cause


def test_ids_that_no_expert_has():
    ids = IDS.copy()
    ids[7, 1, 2] = EXPERTS + 1
    finding = only(check(ids, EXPERTS))["out-of-range"]
    assert finding.count == 1
    assert finding.where == f"row 7, layer 1: {EXPERTS + 1}"
    assert "draft" in finding.cause
    physical = np.where(IDS == 3, EXPERTS + 2, IDS)
    assert "physical" in only(check(physical, EXPERTS))["out-of-range"].cause
    assert "count from 1" in only(check(IDS + 1, EXPERTS))["out-of-range"].cause
    holes = IDS.copy()
    holes[7, 1, 2] = -1
    assert "mixed" in only(check(holes))["out-of-range"].cause
    assert "wrapped" in only(check(IDS.astype(np.uint8), 300))["out-of-range"].message
    draft = IDS.copy()
    draft[:, 3] += EXPERTS
    assert "layer 3" in only(check(draft), "suspicious")["out-of-range"].message


def test_layers_that_are_dense_constant_or_narrow():
    dense = IDS.copy()
    dense[:, 0] = 0
    findings = check(dense)
    assert only(findings) == {}
    assert only(findings, "note")["constant-layer"].count == 1
    constant = IDS.copy()
    constant[:, 4] = constant[0, 4]
    assert only(check(constant))["constant-layer"].where == "layer 4"
    assert "constant-layer" in only(check(constant[:40]), "suspicious")
    narrow, rng = sound(2000)[0], np.random.default_rng(1)
    narrow[:, 1] = np.argsort(rng.random((2000, 8)), axis=1)[:, :K]
    assert "experts 0 ... 7 alone" in only(check(narrow), "suspicious")["constant-layer"].message


def test_rows_that_do_not_fit_their_tokens():
    def row_findings(ids, *documents, start=None):
        return check_routes(read_routes(ids, ReadOptions(tokens=documents, start=start)))

    def check_routes(routes):
        return {x.severity: x for x in soundness_findings(routes) if x.kind == "row-count"}

    assert row_findings(IDS, TOKENS) == {}
    assert "the last token of 1" in row_findings(IDS[:-1], TOKENS)["note"].message
    assert "start=199" in row_findings(IDS[200:], TOKENS)["unsound"].message
    assert row_findings(IDS[200:], TOKENS, start=200) == {}
    assert "several requests" in row_findings(IDS, TOKENS[:100])["unsound"].message
    assert "2 documents" in row_findings(IDS, TOKENS[:100], TOKENS[:20])["unsound"].message


def test_experts_that_nobody_chose():
    rng = np.random.default_rng(0)
    scores = rng.random((1000, 3, 16))
    scores[:, 1, 5] = -1
    finding = only(check(np.argsort(-scores, axis=2)[..., :2], 16), "note")["dead-experts"]
    assert finding.count == 1
    assert finding.where == "layer 1: [5]"
    scores[..., 4:8] = -1
    finding = only(check(np.argsort(-scores, axis=2)[..., :2], 16), "suspicious")["dead-experts"]
    assert "experts 4 ... 7" in finding.message
    outside = np.argsort(-scores, axis=2)[..., :2]
    outside[:9, 0, 1] = 200  # not one of the 16 experts, and neither are the ids between
    assert {x.kind: x.count for x in check(outside, 16)}["dead-experts"] == finding.count
    few = np.argsort(-scores, axis=2)[:20, :, :2]
    assert "dead-experts" not in {x.kind for x in check(few, 16)}  # chance may explain it


def test_one_id_everywhere_is_an_array_that_nothing_was_written_to():
    (finding,) = soundness_findings(Routes(np.full((40, 2, 2), 3), "array", "a"))
    assert (finding.case, finding.severity, finding.count) == ("no-layer", "unsound", 2)
    assert "no token was routed" in finding.message
