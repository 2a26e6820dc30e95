"""Equal tokens alone reveal rows that do not belong to their tokens; sound rows are accepted."""

import numpy as np
import pytest

from tests.trace.test_soundness import sound
from tieline.trace.readers import Routes
from tieline.trace.token_fit import TokenProfiles, token_fit_findings

DOCUMENTS = np.repeat(range(6), 80)


def fit_cases(ids, tokens, documents=None):
    routes = Routes(ids, "array", "a", tokens=tokens, documents=documents)
    return {finding.case: finding for finding in token_fit_findings(routes)}


@pytest.mark.parametrize("lag", [-3, -1, 1, 2])
def test_rows_of_other_tokens_are_told_by_equal_tokens(lag):
    ids, tokens = sound(2000, vocabulary=60)
    finding = fit_cases(np.roll(ids, lag, axis=0), tokens)["lag"]
    assert finding.severity == "unsound"
    assert f"t{-lag:+d}" in finding.cause
    assert fit_cases(ids, tokens) == {}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("k", [1, 3])
def test_two_of_six_requests_exchanged(seed, k):
    ids, tokens = sound(480, 2, k, seed=seed)
    assert fit_cases(ids, tokens, DOCUMENTS) == {}
    changed = ids.copy()
    changed[DOCUMENTS == 1], changed[DOCUMENTS == 4] = ids[DOCUMENTS == 4], ids[DOCUMENTS == 1]
    (finding,) = fit_cases(changed, tokens, DOCUMENTS).values()
    assert finding.case == "exchanged-documents"
    assert set(finding.evidence["documents"]) == {"1 → 4", "4 → 1"}


def noisy(seed, strength, experts, k):
    """Routes whose scores are `strength` times those of the token, and noise of size one."""
    rng = np.random.default_rng(seed)
    tokens = rng.zipf(1.3, len(DOCUMENTS)) % 200
    scores = strength * rng.normal(size=(2, 200, experts))[:, tokens]
    scores = scores + rng.normal(size=scores.shape)
    return np.argsort(-scores, axis=2)[..., :k].transpose(1, 0, 2), tokens


@pytest.mark.parametrize("seed", range(6))
def test_two_requests_exchanged_where_the_token_decides_half(seed):
    ids, tokens = noisy(seed, 1.0, 16, 2)
    assert fit_cases(ids, tokens, DOCUMENTS) == {}
    changed = ids.copy()
    changed[DOCUMENTS == 0], changed[DOCUMENTS == 3] = ids[DOCUMENTS == 3], ids[DOCUMENTS == 0]
    finding = fit_cases(changed, tokens, DOCUMENTS)["exchanged-documents"]
    assert set(finding.evidence["documents"]) == {"0 → 3", "3 → 0"}


def few_common_tokens(seed):
    """Five documents with a common prompt; of the tokens that follow, half stand in one alone."""
    documents = np.repeat(range(5), 60)
    rng = np.random.default_rng(seed)
    tokens = np.tile(np.append(np.arange(36), np.zeros(24, int)), 5)
    tail = np.arange(300) % 60 >= 36
    tokens[tail] = rng.permuted(np.tile(np.arange(36, 60), (5, 1)), axis=1).ravel()
    alone = tail & ((np.arange(300) % 2 == 0) == (documents % 2 == 0))
    tokens[alone] = 60 + np.arange(alone.sum())
    experts = np.argsort(-rng.normal(size=(2, 400, 16)), axis=2)[..., :2]
    return experts[:, tokens].transpose(1, 0, 2), tokens, documents


@pytest.mark.parametrize("seed", range(4))
def test_exchanged_requests_are_told_by_tokens_that_only_one_of_them_shares(seed):
    ids, tokens, documents = few_common_tokens(seed)
    assert fit_cases(ids, tokens, documents) == {}
    changed = ids.copy()
    changed[documents == 1], changed[documents == 2] = ids[documents == 2], ids[documents == 1]
    finding = fit_cases(changed, tokens, documents)["exchanged-documents"]
    assert set(finding.evidence["documents"]) == {"1 → 2", "2 → 1"}


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_follow_their_tokens_a_little_are_sound(seed):
    ids, tokens = noisy(seed, 0.8, 64, 1)
    assert fit_cases(ids, tokens, DOCUMENTS) == {}


@pytest.mark.parametrize("seed", range(4))
def test_one_of_six_requests_is_a_row_late(seed):
    ids, tokens = sound(480, 2, 2, seed=seed)
    shifted = ids.copy()
    shifted[80:160] = np.roll(ids[80:160], 1, axis=0)
    (finding,) = fit_cases(shifted, tokens, DOCUMENTS).values()
    assert (finding.case, finding.evidence["shift"]) == ("shifted-documents", -1)
    assert finding.evidence["documents"] == ["1"]


def test_a_loop_that_happens_to_fit_other_tokens_proves_nothing():
    ids, tokens = sound(480, 2, 2, vocabulary=12)
    pair = [np.flatnonzero(tokens == 7)[0], np.flatnonzero(tokens == 8)[0]]
    for document, loop in ((1, [1, 2]), (3, [7, 8])):
        tokens[document == DOCUMENTS] = np.tile(loop, 40)
        ids[document == DOCUMENTS] = np.tile(ids[pair], (40, 1, 1))
    assert fit_cases(ids, tokens, DOCUMENTS) == {}


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
def test_rows_that_have_nothing_to_do_with_the_tokens(documents):
    ids, _ = sound(480, 3, 2)
    other = np.random.default_rng(5).integers(0, 40, 480)
    finding = fit_cases(ids, other, documents)["unrelated"]
    assert finding.severity == "unsound"
    assert "nothing to do with the token ids" in finding.message
    assert "tokenizer" in finding.cause


def test_few_rows_and_unknown_tokens_say_nothing():
    ids, tokens = sound(200, 3, 2)
    other = np.random.default_rng(5).integers(0, 40, 200)
    assert fit_cases(ids, other) == {}
    assert fit_cases(ids, tokens * 0 - 1) == {}


def test_profiles_are_those_of_a_loop():
    ids, tokens = sound(60, 2, 2, vocabulary=6)
    documents = np.repeat(range(3), 20)
    profiles = TokenProfiles.from_choices(ids, tokens, documents).without_document(1)
    fits = profiles.fit(ids[20:40], tokens[20:40])
    for row in range(20, 40):
        others = [t for t in range(60) if documents[t] != 1 and tokens[t] == tokens[row]]
        shares = [np.isin(ids[row, la], ids[t, la]).sum() / 4 for t in others for la in range(2)]
        expected = sum(shares) / len(others) if others else np.nan
        np.testing.assert_allclose(fits[row - 20], expected, rtol=1e-6)


def test_profiles_of_the_remaining_documents_are_those_without_two():
    ids, tokens = sound(60, 2, 2, vocabulary=6)
    profiles = TokenProfiles.from_choices(ids, tokens, np.repeat(range(4), 15))
    vocabulary = np.unique(profiles.tokens[:30])
    remaining = profiles.without_documents((0, 2), vocabulary)
    rows = np.flatnonzero(np.isin(profiles.documents, (1, 3)))
    for index, number in enumerate(vocabulary):
        mine = rows[profiles.tokens[rows] == number]
        assert remaining.counts[index] == len(mine)
        for layer in range(2):
            expected = np.bincount(ids[mine, layer].ravel(), minlength=profiles.chosen.shape[2])
            np.testing.assert_array_equal(remaining.chosen[layer, index], expected)


@pytest.mark.parametrize("side", [1, -1])
def test_a_mask_of_ones_over_padding(side):
    ids, _ = sound(400, 2, 2)
    tokens = np.random.default_rng(0).integers(5, 90, (4, 100))
    documents = np.repeat(range(4), 100)
    assert fit_cases(ids, tokens.ravel(), documents).keys() <= {"unrelated"}
    for row, count in enumerate((0, 12, 30, 9)):
        tokens[row, ::side][:count] = 2
    cases = fit_cases(ids, tokens.ravel(), documents)
    assert (cases["padding-shown"].count, cases["padding-shown"].severity) == (3, "unsound")
    assert "51 rows" in cases["padding-shown"].message
    assert "mask" in cases["padding-shown"].cause


def test_one_padded_document_is_suspicious_where_its_token_stands_nowhere_else():
    ids, _ = sound(200, 2, 2)
    tokens = np.random.default_rng(0).integers(5, 90, (2, 100))
    documents = np.repeat(range(2), 100)
    tokens[1, :12] = 2
    finding = fit_cases(ids, tokens.ravel(), documents)["padding-shown"]
    assert (finding.count, finding.severity) == (1, "suspicious")
    tokens[0, 50] = 2  # a token of the text
    assert "padding-shown" not in fit_cases(ids, tokens.ravel(), documents)
