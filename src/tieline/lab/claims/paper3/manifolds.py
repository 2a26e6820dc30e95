"""Section 4.3: the number of pieces that a manifold of inputs meets."""

import itertools
import math

import numpy as np

from tieline.lab.claims.claim import ClaimRun, Verdict, claim
from tieline.lab.claims.evidence import (
    Evidence,
    at_least,
    at_most,
    chart,
    corrected,
    dots,
    line,
    near,
    none_of,
    qualified,
    within,
)
from tieline.lab.claims.routing_problems import (
    bisect_segments,
    dense_regions,
    numpy_generator,
)
from tieline.lab.power_law import exponent
from tieline.lab.tropical import (
    expected_kinks,
    expected_switches,
    paper_effective_bound,
    pieces_along,
    zaslavsky,
)

QUARTER = math.pi / 2
"""Spherical length of the segment between two orthogonal unit vectors."""


def crofton_pieces(n_experts: int, k: int, d_hidden: int, length: float) -> float:
    """Expected pieces 1 + (L/π)(kH + ρ) of a Gaussian layer along a curve of length L."""
    switches = 0.0 if k == n_experts else expected_switches(n_experts, k, length)
    return 1 + switches + expected_kinks(k, d_hidden, length)


def mean_pieces_along_segment(
    run: ClaimRun, shape: tuple[int, int, int, int], n: int, *, biases: bool = False
) -> tuple[float, float]:
    """Mean pieces of drawn layers (N, k, H, d) between two axes, with standard error.

    The router has no bias, as in the paper; experts have normal ones with `biases`.
    """
    experts, k, width, dim = shape
    r, ends = numpy_generator(run, 500 + width), np.eye(dim)[:2]
    counts = np.array(
        [
            pieces_along(
                ends,
                r.standard_normal((experts, dim)),
                None,
                k,
                r.standard_normal((experts, width, dim)),
                r.standard_normal((experts, width)) if biases else None,
            ).pieces
            for _ in range(n)
        ]
    )
    return float(counts.mean()), float(counts.std()) / math.sqrt(n)


def space_curve(t: np.ndarray) -> np.ndarray:
    """A closed curve of R³ that lies in no plane."""
    return np.stack([np.cos(t), np.sin(t), 0.5 * np.sin(2 * t)], axis=-1)


def crossings_of(normal: np.ndarray, offset: float) -> tuple[np.ndarray, np.ndarray]:
    """Parameters t at which the curve meets a plane, and the sine of the angle there."""
    t = np.linspace(0, 2 * math.pi, 4_001)
    side = space_curve(t) @ normal + offset
    low, high = t[:-1][side[:-1] * side[1:] < 0], t[1:][side[:-1] * side[1:] < 0]
    start = space_curve(low) @ normal + offset
    low = bisect_segments(lambda t: (space_curve(t) @ normal + offset) * start > 0, low, high, 50)
    along = np.stack([-np.sin(low), np.cos(low), np.cos(2 * low)], axis=-1)
    return low, np.abs(along @ normal) / np.linalg.norm(along, axis=1) / np.linalg.norm(normal)


@claim("p3-asm4.22", "transversality")
def manifold_transversality(run: ClaimRun) -> Evidence:
    """Hyperplanes with weights drawn from a density meet a manifold transversally with probability
    one: j of them in codimension j, or not at all.

    Setting: an assumption on drawn weights; a closed curve of R³
    Tested: Angles at which drawn planes cross a closed curve of R³; points of the curve on two
        planes; a plane that was chosen to touch.
    Overturned by: a drawn plane that touches the curve
    """
    r = numpy_generator(run, 1)
    planes = [(r.standard_normal(3), r.standard_normal()) for _ in range(run.size(100, 1_000))]
    met = [crossings_of(*plane) for plane in planes]
    sine = min(float(s.min()) for _, s in met if len(s))
    crossings = [t for t, _ in met if len(t)]
    common = sum(
        bool((np.abs(a[:, None] - b) < 1e-9).any()) for a, b in itertools.combinations(crossings, 2)
    )
    touching = np.array([1.0, 0.0, 0.0])  # x = 1 touches the curve at t = 0
    side = space_curve(np.linspace(-0.1, 0.1, 201)) @ touching - 1
    return Evidence.of(
        at_least("smallest sine at a crossing", sine, 1e-9),
        none_of("pairs of planes that meet on the curve", common),
        corrected(none_of("points of the curve beyond a touching plane", int((side > 0).sum()))),
        paper="with probability one",
        corrected="of drawn weights; trained ones may touch",
        measured=f"smallest sine {sine:.2g} of {sum(len(t) for t in crossings)} crossings",
    )


@claim("p3-rem4.23", "what breaks transversality costs regions")
def without_transversality(run: ClaimRun) -> Evidence:
    """Any violation of transversality strictly lowers the number of regions.

    Setting: arrangements of lines in the plane: against the largest number, as the remark means it
    Tested: Three lines through one point, two parallel ones, two equal ones, each among six drawn
        lines: regions against Φ(6, 2) and against the same lines moved by 1e-3.
    Overturned by: a degenerate arrangement with Φ(6, 2) regions
    """
    degenerate, moved = degenerate_counts(run)
    most = zaslavsky(6, 2)
    return Evidence.of(
        at_most("most regions of a degenerate arrangement", max(degenerate.values()), most - 1),
        near("least after moving the lines", min(moved), most, 0),
        paper=f"< {most}",
        measured=", ".join(f"{name} {count}" for name, count in degenerate.items()),
    )


def degenerate_counts(run: ClaimRun) -> tuple[dict[str, int], list[int]]:
    """Regions of three degenerate arrangements of six lines, and after a small perturbation."""
    r = numpy_generator(run, 64)
    V, c = r.standard_normal((6, 2)), r.standard_normal(6)
    point = np.array([0.3, -0.2])
    through, parallel, equal = (V.copy(), c.copy()), (V.copy(), c.copy()), (V.copy(), c.copy())
    through[1][:3] = -V[:3] @ point
    parallel[0][1] = parallel[0][0]
    equal[0][1], equal[1][1] = equal[0][0], equal[1][0]
    cases = {"through one point": through, "parallel": parallel, "equal": equal}
    counts = {name: sampled_regions(r, *case) for name, case in cases.items()}
    moved = [
        dense_regions(v + 1e-3 * r.standard_normal((6, 2)), o + 1e-3 * r.standard_normal(6))
        for v, o in cases.values()
    ]
    return counts, moved


def sampled_regions(r: np.random.Generator, V: np.ndarray, c: np.ndarray) -> int:
    """Count regions of lines by signs at random points of three scales; exact for few lines."""
    x = np.concatenate([s * r.standard_normal((60_000, 2)) for s in (0.5, 3.0, 100.0)])
    return len(np.unique(x @ V.T + c > 0, axis=0))


@claim("p3-prop4.24", "dense regions on a manifold")
def effective_dense(run: ClaimRun) -> Evidence:
    """A smooth manifold of dimension d_eff meets at most Φ(H, d_eff) regions of a dense layer.

    Setting: any smooth submanifold, as printed: a circle; then flats
    Tested: Activation patterns on a circle cut by H lines near its centre; segments and planes cut
        by drawn hyperplanes.
    Overturned by: a manifold inside a flat of its own dimension among the hypotheses
    Condition: the manifold lies in a flat of dimension d_eff; a circle meets 2H regions
    """
    r, width = numpy_generator(run, 1), 8
    angle = math.pi * (np.arange(width) + r.uniform(0.2, 0.8, width)) / width
    V, c = np.stack([np.cos(angle), np.sin(angle)], axis=1), 0.01 * r.standard_normal(width)
    t = np.linspace(0, 2 * math.pi, 100_001)
    circle = len(np.unique(np.stack([np.cos(t), np.sin(t)], axis=1) @ V.T + c > 0, axis=0))
    ends = r.standard_normal((2, 4)) * 50
    flat = [r.standard_normal((width, 4)), r.standard_normal(width)]
    way = ends[0] + np.linspace(0, 1, 100_001)[:, None] * (ends[1] - ends[0])
    segment = len(np.unique(way @ flat[0].T + flat[1] > 0, axis=0))
    plane = dense_regions(flat[0] @ r.standard_normal((4, 2)), flat[1])
    return Evidence.of(
        at_most("regions met by a circle, H = 8", circle, zaslavsky(width, 1)),
        qualified(
            at_most("regions met by a segment in R⁴", segment, zaslavsky(width, 1)),
            at_most("regions met by a plane in R⁴", plane, zaslavsky(width, 2)),
        ),
        corrected(near("regions met by the circle", circle, 2 * width, 0)),
        paper=zaslavsky(width, 1),
        corrected=2 * width,
        measured=circle,
        note="A curved manifold meets a hyperplane more than once; Zaslavsky counts flats.",
    )


@claim("p3-rem4.25", "order on a manifold")
def effective_order(run: ClaimRun) -> Evidence:
    """Drawn dense layers have Θ(H^d_eff) regions on a manifold.

    Setting: segments and planes, drawn neurons; an order
    Tested: Mean pieces along a segment against 1 + (L/π)H; regions on a plane in R⁵; exponents.
    Overturned by: an exponent other than d_eff
    """
    widths, n = [8, 32, 128], run.size(100, 1_000)
    means = [mean_pieces_along_segment(run, (1, 1, h, 6), n) for h in widths]
    r = numpy_generator(run, 1)
    turn = np.linalg.qr(r.standard_normal((5, 2)))[0]
    plane = [dense_regions(r.standard_normal((h, 5)) @ turn, r.standard_normal(h)) for h in widths]
    checks = [
        near("exponent on a segment", exponent(widths, [m - 1 for m, _ in means]), 1, 0.05),
        near("exponent on a plane", exponent(widths, plane), 2, 0.1),
        within("pieces on a segment, H = 128", *means[-1], crofton_pieces(1, 1, 128, QUARTER)),
    ]
    return Evidence.of(checks, paper="d_eff", measured=exponent(widths, [m - 1 for m, _ in means]))


@claim("p3-thm4.26", "upper bound on a manifold", expected=Verdict.FAILS, seconds=1)
def effective_upper(run: ClaimRun) -> Evidence:
    """The expected pieces of a top-k layer on a manifold are at most C(N, k) Vol(π(M)) /
    Vol(S^{d-1}) Φ(kH, d_eff) + O((kH)^{d_eff - 1}).

    Setting: isotropic routers, a curve in R⁸ (d_eff = 1 < d - 1, as the manifold hypothesis has
        it). Two readings: length as its volume, for experts without and with bias; and the
        (d-1)-volume of the curve, 0, which leaves the O((kH)^(d_eff - 1)) = O(1)
    Tested: Mean pieces of drawn layers (N = 2, k = 1, d = 8) along a quarter circle of directions
        at two widths: what one more neuron adds, which the O(1) does not touch, without bias (½ by
        Crofton) and with normal biases (⅓: the signs at the ends have correlation ½).
    Overturned by: d_eff = d - 1, or Crofton's constant in place of the ratio of volumes
    """
    narrow, wide, n = 16, 128, run.size(200, 2_000)
    (low, e), (high, f) = (mean_pieces_along_segment(run, (2, 1, h, 8), n) for h in (narrow, wide))
    slope, error = (high - low) / (wide - narrow), math.hypot(e, f) / (wide - narrow)
    bound = [paper_effective_bound(2, 1, h, 1, 8, QUARTER) for h in (narrow, wide)]
    stated = (bound[1] - bound[0]) / (wide - narrow)
    (below, g), (above, h) = (
        mean_pieces_along_segment(run, (2, 1, h, 8), n, biases=True) for h in (narrow, wide)
    )
    biased, biased_error = (above - below) / (wide - narrow), math.hypot(g, h) / (wide - narrow)
    widths = [narrow, 64, wide]
    return Evidence.of(
        at_most("length as volume, no bias: pieces per neuron", slope, stated, 4 * error),
        at_most("length as volume, biases: pieces per neuron", biased, stated, 4 * biased_error),
        at_most("volume 0, biases: pieces per neuron", biased, 0, 4 * biased_error),
        corrected(
            within("pieces per neuron with biases", biased, biased_error, 1 / 3),
            within("pieces per neuron, Crofton", slope, error, 0.5),
            within("pieces at H = 128, Crofton", high, f, crofton_pieces(2, 1, wide, QUARTER)),
        ),
        paper=stated,
        corrected=0.5,
        measured=f"{slope:.3f} without bias, {biased:.3f} with biases",
        figure=chart(
            "H",
            "pieces, N = 2, k = 1, d = 8",
            dots("drawn layers", [narrow, wide], [low, high], [e, f]),
            line("1 + (L/π)(kH + ρ)", widths, [crofton_pieces(2, 1, h, QUARTER) for h in widths]),
            line(
                "the bound",
                widths,
                [paper_effective_bound(2, 1, h, 1, 8, QUARTER) for h in widths],
                dashed=True,
            ),
        ),
        note="The bound divides a length by a 7-dimensional volume: it has no meaning for "
        "d_eff < d - 1.",
    )


def pieces_over_bound(n_experts: int) -> float:
    """Expected pieces along a quarter circle over the paper's formula, k = 4, H = 8, d = 8."""
    pieces = crofton_pieces(n_experts, 4, 8, QUARTER)
    return pieces / paper_effective_bound(n_experts, 4, 8, 1, 8, QUARTER)


@claim("p3-thm4.27", "lower bound on a manifold", expected=Verdict.FAILS, seconds=1)
def effective_lower(run: ClaimRun) -> Evidence:
    """The expected pieces are at least c C(N, k) Vol(π(M)) / Vol(S^{d-1}) (kH)^d_eff, c depending
    on the manifold alone.

    Setting: isotropic routers, experts without bias (biases lower the pieces further), a curve in
        R⁸, c free of N as printed, length as its volume; with the (d-1)-volume 0 it says nothing
    Tested: The largest c that the expectation along a quarter circle allows, for N = 8 ... 512; the
        expectation against drawn layers.
    Overturned by: a constant that may depend on N
    """
    experts, k = [8, 32, 128, 512], 4
    left, exact = [pieces_over_bound(n) for n in experts], crofton_pieces(32, k, 8, QUARTER)
    mean, error = mean_pieces_along_segment(run, (32, k, 8, 8), run.size(200, 2_000))
    return Evidence.of(
        at_least("constant at N = 512 over that at N = 8", left[-1] / left[0], 0.1),
        corrected(
            within("mean pieces, N = 32", mean, error, exact),
            at_most(
                "switches from N = 128 to 512, ratio",
                expected_switches(512, k, 1.0) / expected_switches(128, k, 1.0),
                4,
            ),
        ),
        paper="a constant",
        corrected=exact,
        measured=mean,
        figure=chart("N", "largest c, k = 4", line("c", experts, left), log="xy"),
        note="Pieces along a curve grow no faster than N; C(N, k) grows like N^k. Measured: mean "
        "pieces at N = 32, k = 4, H = 8.",
    )


@claim("p3-rem4.28", "Θ of the effective capacity", expected=Verdict.FAILS)
def effective_theta(_run: ClaimRun) -> Evidence:
    """The expected pieces on a manifold are Θ(Vol(π(M))/Vol(S^{d-1}) C(N, k) (kH)^d_eff).

    Setting: isotropic routers, a curve in R⁸, length as its volume, k = 4, H = 8; a constant that
        depends on the manifold alone
    Tested: The exact expectation over the formula, N = 8 to 512.
    Overturned by: a constant that may depend on N, or d_eff = d - 1
    """
    experts = [8, 32, 128, 512]
    ratios = [pieces_over_bound(n) for n in experts]
    return Evidence.of(
        at_least("ratio at N = 512 over that at N = 8", ratios[-1] / ratios[0], 0.1),
        corrected(at_most("exponent of the ratio in N", exponent(experts, ratios), -2)),
        paper="a constant",
        corrected="1 + (L/π)(kH + ρ), which grows no faster than N",
        measured=", ".join(f"{ratio:.2g}" for ratio in ratios),
        figure=chart(
            "N", "expected pieces over the formula", line("k = 4", experts, ratios), log="xy"
        ),
    )


@claim("p3-cor4.29", "ratio of the bounds")
def bound_ratio_resilience(_run: ClaimRun) -> Evidence:
    """The bounds of Thm 4.26 and Prop. 4.24 are in the ratio O(C(N, k) k^d_eff).

    Setting: a ratio of two formulas, not of pieces, as its title says
    Tested: The ratio of the two formulas at large H; the ratio of the expectations along a curve.
    Overturned by: a ratio other than C(N, k) k^d_eff
    """
    n, k, width = 16, 4, 100_000
    ratio = math.comb(n, k) * zaslavsky(k * width, 3) / zaslavsky(width, 3)
    true = crofton_pieces(n, k, width, QUARTER) / crofton_pieces(1, 1, width, QUARTER)
    return Evidence.of(
        near("ratio over C(N, k) k³", ratio / (math.comb(n, k) * k**3), 1, 1e-3),
        corrected(near("ratio of expected pieces on a curve", true, k, 0.01)),
        paper=math.comb(n, k) * k,
        corrected=k,
        measured=true,
        note="The bounds are in this ratio; the pieces on a curve (paper's value 7280) are in the "
        "ratio k of active neurons.",
    )


@claim("p3-rem4.30", "rank condition")
def rank_condition(run: ClaimRun) -> Evidence:
    """For kH < d_eff the hyperplanes form no bounded cell and the higher terms vanish.

    Setting: hyperplanes in R³
    Tested: Bounded regions (all, less those of the neurons without bias) for n = 1 ... 5 in R³.
    Overturned by: a bounded cell of fewer than d_eff hyperplanes
    """
    r, all_regions, bounded = numpy_generator(run, 1), [], []
    for n in range(1, 6):
        V, c = r.standard_normal((n, 3)), r.standard_normal(n)
        all_regions.append(dense_regions(V, c))
        bounded.append(all_regions[-1] - dense_regions(V, np.zeros(n)))
    return Evidence.of(
        none_of("bounded regions of fewer than 3 planes", sum(bounded[:2])),
        near("regions of 2 planes", all_regions[1], 2**2, 0),
        corrected(
            near("bounded regions of 3 planes", bounded[2], 0, 0),
            near("bounded regions of 4 planes", bounded[3], 1, 0),
            near("bounded regions of 5 planes", bounded[4], math.comb(4, 3), 0),
        ),
        paper="none for kH < d_eff",
        corrected="none for kH <= d_eff",
        measured=f"{bounded} bounded for n = 1 ... 5 in R³",
    )
