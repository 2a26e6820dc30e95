"""The setting in which each claim of paper 3 is tested, and what would change its verdict."""

READINGS = {
    "p3-def3.1": (
        "the definition for the paper's own layers: top-k with softmax gates (2), ReLU experts",
        "constant gates in (2), or pieces in place of affine regions",
    ),
    "p3-def3.2": ("general position, d up to 4", "a count other than Φ"),
    "p3-ex3.3": (
        "the example's 'maximum of 49 regions' for two layers of three neurons on the plane",
        "a network with 49, or the words 'at most'",
    ),
    "p3-def3.4": ("all triples of a lattice with -∞, exactly", "a law that fails"),
    "p3-def3.5": ("real exponents; nine terms on the plane", "a crease off the hypersurface"),
    "p3-def3.6": ("a drawn ReLU network with two hidden layers", "a sign change off P ⊕ Q"),
    "p3-sec3.5": ("seven experts, all k", "a score other than the sum of the k largest"),
    "p3-prop4.2": (
        "every affine top-1 router, as printed: N cells; N = 16 on the plane and N = 5 in R⁴",
        "the words 'at most N', or rank [W 1] = N among the hypotheses",
    ),
    "p3-thm4.5": (
        "a drawn router, N = 8, k = 3 on the plane; shape of cells, not their number",
        "a cell that is not convex, or neighbours more than a swap apart",
    ),
    "p3-thm4.5-cells": (
        "every affine router, as the text and App. D use it: C(N, k) cells; N = 8, d = 1 to 7",
        "rank [W 1] = N among the hypotheses",
    ),
    "p3-thm4.5-supports": (
        "every expert of every router with 1 < k < N, as printed",
        "'may be non-convex' in place of 'is', or rank [W 1] = N",
    ),
    "p3-ex4.6": ("the example: three experts, k = 2, generic planar routers", "another number"),
    "p3-rem4.7": ("exact arithmetic; float64 on the draws", "a coalition that softmax changes"),
    "p3-def4.8": (
        "'under random initialisation', biases drawn or zero, which is the usual start",
        "biases with a density among the hypotheses",
    ),
    "p3-ex4.9": ("the three drawings", "another count"),
    "p3-prop4.10": ("one dense layer, upper bound with equality in general position", "a count"),
    "p3-rem4.11": ("generic neurons, H = 8 and 96 on the plane", "an order other than H^d"),
    "p3-cor4.12": ("existence; drawn neurons and the moment curve", "fewer regions than Φ"),
    "p3-thm4.14": ("an upper bound for top-1; drawn layers", "a layer above N Φ(H, d)"),
    "p3-rem4.15": (
        "'asymptotically exact' for H much larger than N: drawn layers and placed ones, N = 4",
        "a limit of the share at 1 for drawn layers",
    ),
    "p3-cor4.16": ("existence, wide experts; sites on a circle", "a construction below the bound"),
    "p3-thm4.17": (
        "an upper bound for top-k; its general position can never be met, generic scores suffice",
        "a layer above C(N, k) Φ(kH, d)",
    ),
    "p3-lem4.18": (
        "existence of a router in the given d_in for every N and k, as printed",
        "d_in >= N - 1, or 2k - 1 <= d_in, among the hypotheses",
    ),
    "p3-thm4.19": (
        "existence with one constant for all N, as Ω says; d and k fixed, N growing. With N fixed "
        "and H growing the order H^d is right",
        "weights with more than B*, or k <= (d+1)/2 among the hypotheses",
    ),
    "p3-rem4.20": (
        "Θ in N and H, as printed",
        "an upper bound only",
    ),
    "p3-table1": (
        "the row 'Exact capacity (tight bound)', N = 16, k = 4, H = 5, d = 5",
        "the words 'upper bound'",
    ),
    "p3-ex4.21": (
        "'maximal number of linear regions' of the example's three layers",
        "the words 'at most'",
    ),
    "p3-asm4.22": (
        "an assumption on drawn weights; a closed curve of R³",
        "a drawn plane that touches the curve",
    ),
    "p3-prop4.24": (
        "any smooth submanifold, as printed: a circle; then flats",
        "a manifold inside a flat of its own dimension among the hypotheses",
    ),
    "p3-rem4.25": ("segments and planes, drawn neurons; an order", "an exponent other than d_eff"),
    "p3-thm4.26": (
        "isotropic routers, a curve in R⁸ (d_eff = 1 < d - 1, as the manifold hypothesis has it), "
        "length read as its volume; with the (d-1)-volume the bound is 0",
        "d_eff = d - 1, or Crofton's constant in place of the ratio of volumes",
    ),
    "p3-thm4.27": (
        "isotropic routers, a curve in R⁸, c free of N as printed",
        "a constant that may depend on N",
    ),
    "p3-cor4.29": (
        "a ratio of two formulas, not of pieces, as its title says",
        "a ratio other than C(N, k) k^d_eff",
    ),
    "p3-rem4.30": ("hyperplanes in R³", "a bounded cell of fewer than d_eff hyperplanes"),
    "p3-thm5.1": (
        "the formula for N → ∞ with k and m fixed, in exact integers",
        "k → ∞ as well, for which Stirling's constant tends to 1",
    ),
    "p3-cor5.3": (
        "H/m < d_eff, full active set and top-k layers in R³",
        "the condition kH >= d_eff, which splitting keeps",
    ),
    "p3-def5.5": ("the definition; 200 points, 8 experts in R³", "a change within the distance"),
    "p3-prop5.6": ("fixed d, R/‖μ‖ → 0, an equality to first order", "another constant or order"),
    "p3-eq3": (
        "isotropic routers, a ball at distance ‖μ‖; coalitions that the data reach, d = 8",
        "a count of coalitions weighted by the cap they fill",
    ),
    "p3-def5.8": ("the definition; affine experts", "a weight other than one"),
    "p3-prop5.9": ("an affine shared expert, two routers", "a carrier that depends on the router"),
    "p3-rem5.10": (
        "a given router with and without a shared expert; mixtures of 8 experts, top 2, trained on "
        "centred inputs and a target whose mean is ten times its residual, as the paper's section "
        "has it, paired starts",
        "trained routers that use no more coalitions with a carrier, or as many more with one that "
        "starts at zero",
    ),
}
