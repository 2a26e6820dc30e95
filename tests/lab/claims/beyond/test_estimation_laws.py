"""A wrong value planted in the comparison of heads changes its verdict."""

from dataclasses import replace

from tests.lab.claims.claim.test_claims_can_fail import RUN
from tieline.lab.claims.beyond import estimation_laws
from tieline.lab.claims.claim import all_claims
from tieline.lab.claims.ledger import run_claim


def test_slow_students_change_the_verdict(monkeypatch, no_axis_checks):
    claim = all_claims()["p5-heads"]
    comparisons = {}

    def once(*args, **kwargs):
        key = kwargs["families"]
        if key not in comparisons:
            comparisons[key] = real(*args, **kwargs)
        return comparisons[key]

    real = estimation_laws.compare_attention
    monkeypatch.setattr(estimation_laws, "compare_attention", once)
    honest = run_claim(claim, RUN)
    assert not honest.changed, (honest.error, honest.evidence)
    tied = comparisons[("head",)]

    def slow(curve):
        return replace(curve, experts_rate=replace(curve.experts_rate, slope=-0.07))

    comparisons[("head",)] = replace(tied, curves=tuple(slow(curve) for curve in tied.curves))
    assert run_claim(claim, RUN).changed
    wrong = tuple(replace(curve, predicted_function=0.9) for curve in tied.curves)
    comparisons[("head",)] = replace(tied, curves=wrong)
    assert run_claim(claim, RUN).changed
