"""The setting in which each claim of paper 1 is tested, and what would change its verdict."""

FORMAL = "affine scores with linearly independent rows, the paper's assumption"

DIRECTION = (
    "direction alone, of small models in paired runs; arithmetic of the printed table beside it"
)
DIRECTION_TOLD = "an interval of paired runs on one side of zero; runs at the paper's size"

READINGS = {
    "p1-def3.1": ("all scores, ties included", "an order of tied scores that is not by index"),
    "p1-def3.2": (
        "Def. 3.2 and Def. A.5, which the paper calls equivalent, on scores full of ties",
        "one of the two definitions in place of both",
    ),
    "p1-propA.2": (f"{FORMAL}, 6 experts in R⁸", "a coalition without a ball"),
    "p1-propA.3": (f"{FORMAL}, 8 experts in R¹²", "a tube whose mass does not fall with ε"),
    "p1-propA.6": (f"{FORMAL}, orders 1 to 3 of 6 experts in R⁸", "a flat of another codimension"),
    "p1-eqA.7": (
        "the displayed identity inside the proof, as printed; drawn scores, k = 2",
        "nothing: it is the k-th smallest score. The proposition itself stands",
    ),
    "p1-def4.1": (
        "exact distances to ties of orders 1 and 2, 6 experts in R⁸",
        "a shorter way to a tie",
    ),
    "p1-lemA.16": (
        "polyhedra of a drawn router, and the case without inequalities that the lemma allows",
        "the words 'at least one inequality' in the lemma",
    ),
    "p1-lemA.17": (f"{FORMAL}, all ties and choices of 5 experts in R⁷", "a slice without one"),
    "p1-thm4.4-alpha": (
        "the bounds that Thm 4.4 states for α, inside its hypotheses: E = 4, k = 2, r = 2",
        "the upper end 1, as in the paper's own Thm A.18",
    ),
    "p1-thm4.4": (
        "orthonormal rows, E = 4, k = 2 in R⁵, orders 2 and 1; a limit ε/R → 0",
        "a ratio outside four standard errors and the stated bias",
    ),
    "p1-propA.9": ("every D, δ, ε; four cases and one by sampling", "a share that differs"),
    "p1-propA.11": (
        "δ is the signed distance, as the proposition says; both signs",
        "sgn(δ + ε) before the first term, as in its proof",
    ),
    "p1-thm4.2": (
        "an upper bound to leading order, R > ‖δ‖ + ε; order 2 of 5 experts in R⁷",
        "a share above the sum of the flats' tubes",
    ),
    "p1-corA.12": (
        "an upper bound, which the paper calls not tight; order 1 of 5 experts in R⁷",
        "a share above the sum of the facets' tubes",
    ),
    "p1-propA.13": ("codimensions 2 and 3, also cut by the ball", "a share that differs"),
    "p1-propA.14": ("codimensions 1 to 3, R from 4 to 32", "a remainder of another order than R⁻²"),
    "p1-propA.15": ("orders (2, 1), (3, 1), (3, 2)", "an error of another order than R⁻²"),
    "p1-def4.6": (
        "the definition as printed, W of full row rank; 4 experts, k = 2",
        "an infimum that is not half of the gap",
    ),
    "p1-propA.20": (
        "the characterisation as printed against Def. 4.6 as printed, W of full row rank",
        "a distance in Def. 4.6 that is the gap; the method itself uses the gap",
    ),
    "p1-thm4.7": (
        "the bands of Def. 4.6 as printed; orthonormal rows, E = 4, k = 2, R⁵, orders 2 and 1",
        "bands measured by A_J (Thm A.19), for which the formula holds on fibres",
    ),
    "p1-thmA.19": (
        "the band of the appendix by its definition and by the fibres of its proof",
        "a definition whose infimum is over the slice and sees it",
    ),
    "p1-propA.21": ("one face, every σ; distance 1, t = 1", "a law other than the reflected one"),
    "p1-thmA.22": (
        "a lower bound for every cell and time; 8 experts in R¹⁶, isotropic noise",
        "an exit probability below the bound",
    ),
    "p1-corA.23": (
        "every cell and start; 8 experts in R¹⁶",
        "a cell that keeps a path with positive probability",
    ),
    "p1-lemA.25": (f"{FORMAL}, 6 experts in R⁸", "a tie inside a cell, or a boundary without tie"),
    "p1-lemA.27": ("two and three dimensions", "a chance that does not vanish with the ball"),
    "p1-corA.28": ("the plane, three starts", "a chance that depends on the direction"),
    "p1-lemA.29": ("a drawn 2 × 5 matrix", "a covariance outside four standard errors"),
    "p1-thmA.30": (
        "every cell, almost surely; 8 experts in R¹⁶, isotropic noise, tolerance 1e-9",
        "exits at ties of order 2 whose share does not fall with the tolerance",
    ),
    "p1-thm5.1": (
        "a constant invertible σ, as the theorem says; 6 experts in R⁸, σ not isotropic",
        "an exit probability below the bound, or an exit of order 2",
    ),
    "p1-propA.31": (
        "upper bounds, n = 1, 2, 3; 5 experts in R⁷",
        "a time above the bound",
    ),
    "p1-thm5.3": (
        "upper bounds, n = 1, 2; 5 experts in R⁷, three widths",
        "a time above the sum over flats",
    ),
    "p1-sec6-smoothstep": (
        "h as a function to R, which the paper calls continuous",
        "the words 'e^h is continuous', or values in [-∞, 0]",
    ),
    "p1-sec6-gate": ("every score vector; a = 1, b = 50, ε = 0.4", "a weight that differs"),
    "p1-sec6-loss": (
        "the direction of the loss in ε, which is what the paper states; convergence at any rate "
        "is not claimed there and is shown beside it",
        "a gradient of the wrong sign",
    ),
    "p1-propA.7": ("affine scores, ReLU experts, 32 experts, top 4", "an exponent below 1"),
    "p1-fig1": (
        "drawn layers of the figure's size (the figure has a trained one, see docs/vision.md)",
        "a hard layer without jump or a smooth one with it",
    ),
    "p1-fig3": ("four drawn layers of the figure's size", "an exponent other than 0 and 1"),
    "p1-fig4": (
        "two layers (four without --fast) on the text in the box; the paper has six on WikiText",
        "a layer whose K settles elsewhere than at k*",
    ),
    "p1-fig5": ("as Figure 4, with the annealed budget", "a stage whose K misses its budget"),
    "p1-fig6-7": (
        "the trained model in the box, 16 experts, top 2, at the end of training",
        "a K(ε) that falls",
    ),
    "p1-secB.2": (
        "the comparison in words, gate by gate, on normal scores",
        "a gate with another continuity, sparsity or causality than stated",
    ),
    "p1-table1": (DIRECTION, DIRECTION_TOLD),
    "p1-table2": ("arithmetic of the printed table", "runs at the paper's size"),
    "p1-table3": (
        "direction alone, of small models on PACS from random weights, in paired runs; arithmetic "
        "of the printed table beside it",
        DIRECTION_TOLD,
    ),
    "p1-table4": (DIRECTION, DIRECTION_TOLD),
    "p1-table5": ("arithmetic of the printed table", "runs at the paper's size"),
    "p1-table6": (DIRECTION, DIRECTION_TOLD),
    "p1-table8": (DIRECTION, DIRECTION_TOLD),
}
