"""Sentences of findings come from their data alone."""

import dataclasses

import numpy as np
import pytest

import tieline as tl
from tieline.analysis.check import RouteCheck
from tieline.report.words.check import CASE_TEXTS, CAUSE_TEXTS


def ids(experts=9):
    rng = np.random.default_rng(0)
    return np.stack([rng.permutation(experts)[:3] for _ in range(400)]).reshape(100, 4, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x * 0, "all 1200 ids are 0: no routes were written"),
        (lambda x: np.insert(x, 0, 0, axis=1), "1 of 5 layers are not routed"),
        (lambda x: np.where(x == 8, 40, x), "choices have an id outside 0 ... 9 - 1"),
        (lambda x: np.where(x == 1, 2, x), "choices name an expert twice"),
    ],
)
def test_a_finding_read_from_json_says_the_same(change, message):
    result = tl.check(change(ids()), n_experts=9)
    again = RouteCheck.from_dict(result.to_dict())
    assert any(message in finding.message for finding in result.findings)
    for finding, same in zip(result.findings, again.findings, strict=True):
        assert (same.message, same.where, same.cause) == (
            finding.message,
            finding.where,
            finding.cause,
        )
        fields = {field.name for field in dataclasses.fields(finding)}
        assert not fields & set(finding.sentences)


def test_every_case_and_reason_of_the_tests_has_its_text():
    assert all(text.message for text in CASE_TEXTS.values())
    assert all(text for reason, text in CAUSE_TEXTS.items() if reason)
