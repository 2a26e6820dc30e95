"""Section 4.2: whether every coalition can be reached."""

import itertools

import numpy as np

from tieline.studies.checks import at_least, at_most, near
from tieline.studies.claim import Evidence, Run, Verdict
from tieline.studies.paper3.problems import drawn, router
from tieline.studies.registry import claim
from tieline.tropical import attainability, count_cells, zaslavsky
from tieline.tropical.affine import chosen


@claim(
    "p3-lem4.18",
    "Lemma 4.18",
    "every coalition reached",
    statement="Some router chooses every set of k experts on a set of positive measure.",
    tested="The construction W x = 1_S where rank W = N; weights on the moment curve; drawn "
    "routers with 8 experts, k = 4, on the plane, where Radon's theorem forbids it.",
    expected=Verdict.CONDITION,
    condition="rank [W 1] = N, or k or N - k at most (d+1)/2; impossible for k >= ⌊(d+3)/2⌋ and "
    "N - k >= d + 2",
    seconds=1,
)
def reachability(run: Run) -> Evidence:
    """Cells by construction, on the moment curve, and the most found where some must lack."""
    W, reached = drawn(run, 1).standard_normal((6, 6)), 0
    for coalition in itertools.combinations(range(6), 3):
        wanted = np.isin(np.arange(6), coalition).astype(float)
        mask = chosen((W @ np.linalg.solve(W, wanted))[None], 3)[0]
        reached += bool((mask == wanted.astype(bool)).all())
    t = np.linspace(-1, 1, 9)
    curve = np.column_stack([t, t**2, t**3])
    moment = int(count_cells(curve, -(t**4), 2))
    most = max(int(count_cells(*router(run, 20 + s, 8, 2), 4)) for s in range(run.size(200, 4_000)))
    return Evidence(
        [
            at_least("most cells of 8 experts, k = 4, on the plane", most, 70),
            near("coalitions reached by construction, N = d = 6", reached, 20, 0, part="condition"),
            near("cells on the moment curve, N = 9, k = 2, d = 3", moment, 36, 0, part="condition"),
            near("70 cells cannot be had", float(attainability(8, 4, 2) == "by none"), 1, 0,
                 part="corrected"),
            at_most("the most that Φ leaves", most, zaslavsky(8, 3) - 8, part="corrected"),
        ],
        paper=70,
        corrected="fewer than 70",
        measured=most,
    )  # fmt: skip
