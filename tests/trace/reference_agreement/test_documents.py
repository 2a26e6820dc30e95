"""Requests that were exchanged, shifted or taken from elsewhere are named document by document."""

import numpy as np
import pytest

from tests.trace.reference_agreement.test_agreement import other_precision
from tests.trace.test_soundness import sound
from tieline.trace.readers import Routes
from tieline.trace.reference_agreement import agreement_findings

DOCUMENTS = np.repeat(range(6), 50)
POSITIONS = np.tile(np.arange(50), 6)


def explained(ids, reference):
    fields = {"documents": DOCUMENTS, "positions": POSITIONS}
    return agreement_findings(
        Routes(ids, "array", "a", **fields), Routes(reference, "array", "b", **fields)
    )


def exchanged(ids, first, second):
    mixed = ids.copy()
    mixed[first == DOCUMENTS] = ids[second == DOCUMENTS]
    mixed[second == DOCUMENTS] = ids[first == DOCUMENTS]
    return mixed


@pytest.mark.parametrize("layers", [1, 5])
@pytest.mark.parametrize("seed", range(5))
def test_two_of_six_requests_exchanged(layers, seed):
    ids = sound(300, layers, seed=seed)[0]
    (finding,) = explained(exchanged(other_precision(ids), 1, 4), ids)
    assert (finding.case, finding.count, finding.total) == ("exchanged-documents", 2, 6)
    assert "1 → 4, 4 → 1" in finding.message
    assert "request id" in finding.cause
    assert explained(other_precision(ids), ids) == []


@pytest.mark.parametrize("seed", range(5))
def test_documents_that_differ_in_sixteen_tokens_are_told_apart(seed):
    ids = sound(300, 3, seed=seed)[0]
    ids[DOCUMENTS == 2] = ids[DOCUMENTS == 3]
    ids[100:116] = sound(300, 3, seed=seed + 50)[0][:16]
    (finding,) = explained(exchanged(ids, 2, 3), ids)
    assert finding.case == "exchanged-documents"
    assert explained(other_precision(ids), ids) == []


@pytest.mark.parametrize("shift", [1, -1, 3])
def test_one_of_six_requests_shifted_by_rows(shift):
    ids = sound(300, 2)[0]
    shifted = other_precision(ids)
    shifted[DOCUMENTS == 3] = np.roll(ids[DOCUMENTS == 3], shift, axis=0)
    (finding,) = explained(shifted, ids)
    assert (finding.case, finding.count) == ("shifted-documents", 1)
    assert f"{-shift:+d} places on: documents 3" in finding.message


def test_a_document_of_elsewhere():
    ids = sound(300, 3)[0]
    changed = ids.copy()
    changed[DOCUMENTS == 5] = sound(50, 3, seed=77)[0]
    (finding,) = explained(changed, ids)
    assert (finding.case, finding.count) == ("strange-documents", 1)


def test_twins_that_differ_by_noise_alone_raise_no_alarm():
    ids = sound(300, 3)[0]
    ids[DOCUMENTS == 2] = ids[DOCUMENTS == 3]
    assert explained(other_precision(ids), other_precision(ids)) == []


def test_a_layer_of_renumbered_ids_is_no_draft_model():
    ids = sound(300, 5)[0]
    renumbered = ids.copy()
    renumbered[:, 2] = np.random.default_rng(0).permutation(32)[renumbered[:, 2]]
    (finding,) = explained(renumbered, ids)
    assert finding.case == "renumbered-layers"
    assert "renumbered" in finding.message
    assert "draft" not in finding.cause


def test_a_missing_last_layer_leaves_no_hole_in_the_sentence():
    ids = sound(300, 5)[0]
    (finding,) = explained(ids[:, :4], ids)
    assert "with  " not in finding.message
    assert "agree as far as both go" in finding.message
