"""The setting in which each claim of our own is tested, and what would change its verdict."""

READINGS = {
    "p5-law": (
        "two experts, a score density that is flat over the ramp, noise small against it",
        "a ramp below the bound",
    ),
    "p5-frontier": (
        "two experts, a flat density, normal noise of any size",
        "a ramp below the frontier",
    ),
    "p5-gates": (
        "orthogonal experts of equal size, k = 1, a flat density",
        "a product outside the stated share of the bound",
    ),
    "p5-lipschitz": (
        "16 experts, k = 2, ties of order 1 to 7",
        "a slope above 1/ε",
    ),
    "p5-layers": (
        "the demo model, k = 2 of 16, nothing renormalised, noise of the choice alone; a tenth of "
        "the tokens inside the band at most",
        "a mean prediction (in full, any) more than 25 % off, or D outside 1 to 2 frontiers",
    ),
    "p5-doubling": (
        "softmax routers linear in z(x), any number of atoms; perturbed cosine and tanh here",
        "a vanishing ratio at k = 2k* - 1 with the rows centred",
    ),
    "p5-reflection": (
        "sigmoid gates, odd experts, N > N*, dense or sparse; on every parameter set that holds "
        "the reflected atoms",
        "experts of one sign, or a parameter set without negatives",
    ),
    "p5-contact": (
        "sigmoid gates with full score, sparse, two atoms in a cell, any expert",
        "a split of two atoms with contact beyond the stated order",
    ),
    "p5-corrected-bound": (
        "sigmoid gates with full score, sparse, one expert too many, tanh; masses bounded away "
        "from 0; one input here, any number in the proof",
        "a pair of atoms along which the ratio falls with the radius",
    ),
    "p5-structured": (
        "affine routers, top k, any drift and any covariance; the trained model in the box, its "
        "first router, with m and Σ of fp8",
        "a path law outside the bounds, or a shorter step that changes the set",
    ),
    "p5-real-noise": (
        "the trained model in the box, the whole of it in fp8 (e4m3), perturbations of each "
        "router's input; tokens of the law and of the test apart",
        "a router whose flips differ from those of N(m, Σ) by more than a tenth and four standard "
        "errors",
    ),
    "p5-levels": (
        "affine routers, every position; N grows with d and k fixed",
        "a router with more cells than the bound",
    ),
    "p5-sphere": (
        "softmax scores, where a vector may be subtracted from all rows; rows in general position",
        "a token whose experts are ranked in another order",
    ),
    "p5-zero": (
        "the scores alone, without projection; every pair of tokens",
        "a pair of tokens above the bound",
    ),
    "p5-soft-slope": (
        "one wall, a density and experts that are continuous beside it, L smooth; layers above "
        "that choose themselves add their own walls",
        "a loss of degree three whose slope differs",
    ),
}
