"""The setting in which each claim of paper 2 is tested, and what would change its verdict."""

NO_START = "the start radius of the paper's runs, or a loss that does not depend on it"

DIRECTION = (
    "direction alone, of small models in paired runs; arithmetic of the printed table beside it"
)
DIRECTION_TOLD = "an interval of paired runs on one side of zero; runs at the paper's size"

READINGS = {
    "p2-eq2": ("the model as written, d = 4, 3 ReLU experts", "a value that differs"),
    "p2-eq8": ("the model as written, d = 4, 3 ReLU experts", "a value that differs"),
    "p2-eq4": ("every expert; tanh, d = 4", "a radial derivative that is not zero (vanilla)"),
    "p2-lem3": ("orders 1 to 3, d = 3", "a derivative that is not zero"),
    "p2-eq5": ("the definition, 1000 atoms against 5", "an atom in another cell"),
    "p2-L1r": ("the definition, r = 1, 2, 3", "a digit that differs"),
    "p2-eq11": ("the definition", "a digit that differs"),
    "p2-eq13": ("the definition", "a digit that differs"),
    "p2-def1": (
        "the definition as written, all derivatives up to order two at distinct parameters; the "
        "paper's own examples (ReLU, tanh, uᵖ), d = 2",
        "a definition modulo z_u x_v = z_v x_u; tanh and GELU then pass the split test",
    ),
    "p2-def2": (
        "the definition as written, first derivatives at any distinct parameters, d = 2",
        "generic parameters, and experts without degree, among the hypotheses",
    ),
    "p2-prop1": (
        "perturbed cosine, any number of atoms, last bias 0 as in (A.3); its hypothesis is met: "
        "the softmax weights of the moved rows are equal, so that every expert serves",
        "a last router row that is fixed too, fewer than 2k* atoms, and experts like tanh: then it "
        "holds (docs/estimation.md)",
    ),
    "p2-thm2": (
        "over-specified (k = k* + 1), vanilla cosine, loss L_{1,r}",
        "a lower bound on the ratio along longer rows",
    ),
    "p2-thm5": (
        "exact (k = k*), vanilla cosine, loss L_{1,r}",
        "a lower bound on the ratio along longer rows",
    ),
    "p2-thm4": (
        "over-specified, perturbed cosine, loss L_2, G near G*. The counterexample (all rows v(β) "
        "moved) meets every hypothesis, for it serves for all experts; the condition is tested "
        "with k = k* + 1 and tanh",
        "a vanishing ratio with the last row fixed, k < 2k* and tanh experts",
    ),
    "p2-thm6": (
        "exact, perturbed cosine, loss L_3, G near G*; tanh",
        "a vanishing ratio with the last row fixed",
    ),
    "p2-thm1": (
        "exact and over-specified, vanilla cosine, ‖f̂ - f*‖; tanh, two experts in the plane",
        "a slope outside -1/2 ± 0.1 in either setting",
    ),
    "p2-thm3": (
        "exact and over-specified, perturbed cosine, ‖f̂ - f*‖; tanh, two experts in the plane",
        "a slope outside -1/2 ± 0.1 in either setting",
    ),
    "p2-thm2-rate": (
        "over-specified (k = k* + 1), vanilla cosine: what the paper draws from its minimax bound "
        "for experts; at one truth, tanh, experts after matching",
        "an expert error that stops falling, or a proof for the worst truth that is not about the "
        "length of a row",
    ),
    "p2-thm5-rate": (
        "exact (k = k*), vanilla cosine, experts after matching; tanh",
        "an n·MSE of the experts that grows over the Cramér-Rao limit",
    ),
    "p2-thm4-rate": (
        "over-specified (k = k* + 1), perturbed cosine, L_2 raw and up to the shift; tanh",
        "a quotient slope outside -1/2 ± 0.14",
    ),
    "p2-thm6-rate": (
        "exact (k = k*), perturbed cosine, L_3 raw and up to the shift; tanh and ReLU",
        "a quotient slope outside -1/2 ± 0.14",
    ),
    "p2-table1": (
        "the table's setting is that of the theorems, k > k*; exact beside it. Nine entries, "
        "distance of experts",
        "an expert that the function determines in one of the three entries n^-1/4, k > k*",
    ),
    "p2-sec4": (
        "misspecified: data of a linear router, a perturbed cosine fitted, k = 2 and 3",
        "a minimiser that leaves an atom without mass",
    ),
    "p2-fig1a": ("exact, raw L_3, from two start radii; d = 2, ReLU", NO_START),
    "p2-fig1b": (
        "over-specified (k = k* + 1), raw L_2, from two start radii; d = 2, tanh",
        NO_START,
    ),
    "p2-fig2a": ("misspecified, raw loss against Ḡ, from two start radii; ReLU", NO_START),
    "p2-fig2b": ("linear router exact, perturbed misspecified, raw losses; squares", NO_START),
    "p2-table2": (DIRECTION, DIRECTION_TOLD),
    "p2-table3": ("arithmetic of the printed table", "runs at the paper's size"),
    "p2-table4": ("arithmetic of the printed table", "runs at the paper's size"),
    "p2-table5": ("arithmetic of the printed table", "runs at the paper's size"),
}
