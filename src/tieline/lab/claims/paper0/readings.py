"""The setting in which each claim of paper 0 is tested, and what would change its verdict."""

READINGS = {
    "p0-sec2-gauge": (
        "any mixture; here 4 experts at τ = 0.3, one shift of all scores and all relabellings",
        "a prediction that changes by more than rounding",
    ),
    "p0-def3.1": (
        "the definition and identity (3.6) as written, Gaussian inputs, ε = 0.1, τ = 0.3",
        "a token that one side counts and the other does not",
    ),
    "p0-rem3.2": (
        "every pair and every ε in (0, 1/2), in exact arithmetic; float64 for ε >= 1e-6",
        "a pair for which weight and slab disagree at an ε that float64 resolves",
    ),
    "p0-rem3.3": (
        "two experts, a curved router, ε = 0.1",
        "a mass that quadrature and counts do not share",
    ),
    "p0-sec2-pair": (
        "an inequality for every router; its size for independent normal scores, 2 to 256 experts",
        "an input whose top gap is smaller than its smallest pair gap",
    ),
    "p0-eq5.3": (
        "definition of the K-way region, 8 experts, ε = 0.1",
        "a weight above 1 - ε inside the region, or below outside",
    ),
    "p0-rem5.4": (
        "every router; normal scores of 2 to 64 experts, five temperatures",
        "one violation of the chain",
    ),
    "p0-asm3.4": (
        "an assumption, not a theorem: what decides it is measured, on a router that meets it and "
        "on a smooth one that does not",
        "a proof that smooth routers cannot have a vanishing gradient on a wall",
    ),
    "p0-eq3.8": (
        "under Assumption 3.4: a sphere and a curved wall under a Gaussian",
        "a level-set integral that is not the density of S",
    ),
    "p0-prop3.5": (
        "two experts, under Assumption 3.4, a curved wall; an equality to first order",
        "a constant that the surface integral does not give, or a remainder of order τ",
    ),
    "p0-lem3.6": (
        "one pair under Assumption 3.4, a curved wall; an equality to first order",
        "a remainder that is not o(w)",
    ),
    "p0-eq3.9": (
        "any number of experts, an upper bound; affine routers under a Gaussian, E = 4 and 12",
        "a mass above the sum of the pairs' constants by more than o(τ)",
    ),
    "p0-prop3.7": (
        "under Assumption 3.4, an upper bound with some constant; 8 experts, δ up to 0.1",
        "a mass above C_margin δ with C_margin as in the proof",
    ),
    "p0-ex3.8": (
        "the example's own setting: a linear router, N(0, Σ) with a drawn Σ in R⁴",
        "a count outside four standard errors of (3.11)",
    ),
    "p0-lem5.7": (
        "a fixed router under Assumption 3.4, an upper bound for small τ; 6 experts",
        "a mass above the pairs' slabs, or an exponent other than 1",
    ),
    "p0-lem4.1": (
        "every score vector; 2 to 64 experts, three temperatures",
        "one weight above its bound",
    ),
    "p0-asm4.2": (
        "an assumption: one C and α for all admissible routers; judged by fitted (C, α)",
        "a class of routers for which twins cannot occur; then it holds as it stands",
    ),
    "p0-asm4.3": (
        "an assumption of convenience, as the paper says; tanh against affine experts",
        "a rate that is lost without the bound, for affine experts under a Gaussian",
    ),
    "p0-cor4.4": (
        "one fixed router under Assumptions 3.4 and 4.3, an upper bound; 4 bounded experts",
        "a gap above C_co τ at a small τ",
    ),
    "p0-thm4.5": (
        "all parameters under (4.4) and Assumption 4.3, an upper bound for τ in (0, 1]",
        "a gap above C_sh τ^α, or a step of the proof that fails on a sample",
    ),
    "p0-thm4.7": (
        "the theorem's own: compact parameters and one margin tail (4.4) for all of them, met by "
        "unit normals; a free router scale is not compact and breaks (4.4)",
        "a compact set with (4.4) on which infima or minimisers do not converge",
    ),
    "p0-asm5.11": (
        "an assumption on all student parameters; bounded experts of one family",
        "a family that gives every expert its own range of functions",
    ),
    "p0-asm5.12": (
        "an assumption with the linear router as its example, D = 4",
        "a realised velocity that is not affine on the wall",
    ),
    "p0-asm5.13": (
        "an assumption near critical points; two affine experts under a Gaussian",
        "a bounded Hessian of L_τ at the teacher as τ falls",
    ),
    "p0-asm5.14": (
        "an assumption on every wall that is not the teacher's; all walls through the origin",
        "a neutral motion with negative second variation at every wall",
    ),
    "p0-lem5.15": (
        "symmetric matrices, any size; 6 × 6 drawn and the extreme case",
        "one eigenvalue above the bound",
    ),
    "p0-lem5.5": (
        "bounded students and teachers, any ε; students at one distance, four temperatures",
        "a boundary part above C · BM",
    ),
    "p0-prop5.8": (
        "bounded students, every cell; students at four distances, two temperatures",
        "a cell with negative slack",
    ),
    "p0-prop5.10": (
        "a wall away from junctions, one-sided traces of μ; the paper writes d/dε at 0, which has "
        "two sides",
        "a formula for the derivative at 0⁻ as well, or the words 'at 0⁺' in the statement",
    ),
    "p0-lem5.16": (
        "its hypotheses are met: bounded, specialised experts, 2ε B_stu <= √γ/2; every parameter "
        "and every permutation, as printed",
        "a statement for the best permutation only, or E_gap at the actual θ",
    ),
    "p0-thm5.17-matching": (
        "the definition of π in the proof; 3 experts, all relabellings",
        "a relabelling that the assignment does not find",
    ),
    "p0-thm5.17-recovery": (
        "global minimisers, small τ; two affine experts in the plane (moments stand for bounds), "
        "best of several critical points, some C_1 and C_2",
        "errors that grow as τ falls, or ratios without a bound",
    ),
    "p0-thm5.17-saddles": (
        "all critical points with another partition than the teacher's, however slightly; two "
        "experts in the plane at τ = 0.3",
        "the words 'further than O(τ) from the teacher' in the statement, or a minimum far from it",
    ),
    "p0-eq6.2": (
        "every parameter; one drawn sample",
        "a difference beyond rounding",
    ),
    "p0-eq6.3": (
        "an assumption that the paper calls a reduced model, not a theorem; tested on the "
        "two-expert model of the same section",
        "a two-expert model whose gradient at u = 0 has no drift at a nonzero contrast",
    ),
    "p0-eq6.4": (
        "the response model with the regularity that is printed: odd and differentiable at 0",
        "a domination of ψ among the hypotheses; then it holds as it stands",
    ),
    "p0-lem6.1": (
        "Gaussian inputs, g odd with g(z)z >= 0; sign and tanh in R⁵, an equality",
        "a moment outside four standard errors",
    ),
    "p0-lem6.2": (
        "the sign response at every scale, an equality",
        "a ninth digit that differs",
    ),
    "p0-eq6.7": (
        "every teacher; one with d·Σv < 0",
        "a relabelling that keeps the targets and changes the sign of d·Σv",
    ),
    "p0-eq6.6": (
        "the reduced update itself, an identity of matrices",
        "a difference beyond rounding",
    ),
    "p0-prop6.3": (
        "d·Σv ≠ 0 as printed, both signs; the reduced model",
        "a proof for d·Σv < 0, where vᵀMv is negative",
    ),
    "p0-eq6.8": (
        "the reduced update with a simple leading eigenvalue",
        "a ratio of components other than ρ^t",
    ),
    "p0-eq6.10": (
        "two eigenvalues, an expansion in η/τ and a limit for τ → 0",
        "an error of the expansion of another order than 2",
    ),
}
