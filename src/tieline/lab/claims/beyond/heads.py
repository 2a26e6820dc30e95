"""Attention heads of both kinds with one expert for each token: how fast they are learned.

Paper 4 compares the kinds with more experts than the truth (`p4-table1`); heads have as many.
"""

from tieline.lab.claims.claim import ClaimRun, claim
from tieline.lab.claims.evidence import (
    Check,
    Evidence,
    FigureData,
    at_least,
    at_most,
    chart,
    dots,
    line,
    near,
    none_of,
)
from tieline.lab.estimation.attention_heads import (
    AttentionComparison,
    StudentCurve,
    compare_attention,
)

HALF = (-0.62, -0.40)
"""Slopes that count as n^-1/2 at these sample sizes."""


@claim("p5-heads", "softmax and sigmoid heads are learned alike", number="heads", seconds=3)
def heads_learned_alike(run: ClaimRun) -> Evidence:
    """A head with one expert for each token, N = N*, is learned at n^-1/2 under softmax and under
    sigmoid attention; which kind needs fewer samples is a matter of constants and of the family.

    Setting: heads as in practice: one expert for each token, N = N*; tied and untied students.
        Paper 4's Table 1 is about N > N*, and neither supported nor refuted by it
    Tested: Teacher heads with the same B and v for both kinds, students fitted by least squares, 48
        times at each size; as heads (B, v) and as untied mixtures with a quadratic score and a
        linear expert for each token; the constants from the information matrix.
    Overturned by: a slope of either kind outside -.62 to -.40
    """
    options = {"others": False, "seed": run.seed}
    tied = compare_attention(
        (400, 1600, 6400), repetitions=run.size(48, 200), families=("head",), **options
    )
    untied = compare_attention(
        (2000, 8000),
        repetitions=run.size(6, 48),
        tokens=run.size(2, 3),
        families=("mixture",),
        **options,
    )
    soft, sigmoid = (tied.curve("head", kind, kind) for kind in ("softmax", "sigmoid"))
    ratios = tied.sample_ratio("head"), untied.sample_ratio("mixture")
    constants = _error_constant(soft) / _error_constant(sigmoid)
    return Evidence.of(
        _as_half(soft),
        _as_half(sigmoid),
        *(check for curve in untied.curves for check in _as_predicted(curve)),
        none_of("fits that did not converge", soft.failed + sigmoid.failed),
        near("function: softmax over sigmoid constant, tied", constants, 1, 1e-9),
        paper=-0.5,
        measured=f"softmax needs {ratios[0]:.2f} (tied) and {ratios[1]:.2f} (untied) samples for "
        f"one of sigmoid; slopes {soft.experts_rate} softmax, {sigmoid.experts_rate} sigmoid",
        figure=_head_error_chart(tied),
        note="A head has one expert for each token, neither more nor fewer than its teacher, and "
        "then both kinds are regular least-squares problems. Which kind needs more samples is a "
        "matter of constants, and changes with the family. Students of the other kind do not reach "
        "the teacher at all: they stay at the misfit of their best member.",
    )


def _as_half(curve: StudentCurve) -> list[Check]:
    """Both slopes of a tied student near -1/2, the constant as predicted."""
    name = f"{curve.student} head"
    return [
        at_least(f"{name}: slope of v", curve.experts_rate.slope, HALF[0]),
        at_most(f"{name}: slope of v", curve.experts_rate.slope, HALF[1]),
        at_least(f"{name}: slope of f", curve.function_rate.slope, HALF[0]),
        at_most(f"{name}: slope of f", curve.function_rate.slope, HALF[1]),
        *_as_predicted(curve),
    ]


def _as_predicted(curve: StudentCurve) -> list[Check]:
    """‖f̂ - f*‖ √n at the largest n over √(ν rank I)."""
    ratio = curve.function[-1] * curve.sizes[-1] ** 0.5 / _error_constant(curve)
    name = f"{curve.family} {curve.student}: error of f over its constant"
    return [near(name, ratio, 1, 0.25)]


def _error_constant(curve: StudentCurve) -> float:
    """‖f̂ - f*‖ √n of a student as its Fisher information predicts."""
    assert curve.predicted_function is not None
    return curve.predicted_function


def _head_error_chart(comparison: AttentionComparison) -> FigureData:
    """Errors of the values of both heads against n, beside the predicted ones."""
    series = []
    for kind in ("softmax", "sigmoid"):
        curve = comparison.curve("head", kind, kind)
        assert curve.predicted_experts is not None
        limits = [curve.predicted_experts / n**0.5 for n in curve.sizes]
        series += [
            dots(f"{kind} head", curve.sizes, curve.experts),
            line(f"{kind}, from the information", curve.sizes, limits, dashed=True),
        ]
    return chart("samples n", "error of v", *series, log="xy")
