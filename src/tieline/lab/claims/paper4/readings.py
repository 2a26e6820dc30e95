"""The setting in which each claim of paper 4 is tested, and what would change its verdict."""

NO_START = "the start and the number of fitted experts of the paper's runs"

READINGS = {
    "p4-sec2": ("one head, 5 tokens, both kinds", "a row that differs"),
    "p4-eq5": ("full and partial score, sigmoid and softmax, d = 3", "a value that differs"),
    "p4-eq8": ("linear experts, d = 2", "a residual beyond rounding"),
    "p4-prop3": (
        "the proposition as printed: c_2 = +∞; bounded inputs",
        "nothing: σ(+∞) = 1. With c_2 = -∞ it is right",
    ),
    "p4-L1": ("the definition, over-specified and sparse", "a digit that differs"),
    "p4-eq11": ("the definition, r = 2", "a digit that differs"),
    "p4-L3": (
        "the definition as printed, with the index i on both sides",
        "the index j of the cell on the right",
    ),
    "p4-eq52": ("the definition, partial score", "a digit that differs"),
    "p4-eq53": ("the definition, partial score, index of the cell", "a digit that differs"),
    "p4-def1": (
        "the definition as written, at A = b = 0 and distinct parameters; the paper's examples, "
        "two-layer ReLU and GELU, A counted symmetric",
        "a definition modulo ∂F/∂A ~ ∂²F/∂b∂b, which no expert escapes",
    ),
    "p4-def3": (
        "the definition as written, A = 0, d = 2; the paper's examples, two-layer networks (whose "
        "∂²/∂λ² is 0) and powers",
        "a definition modulo x₁²·x₂² = (x₁x₂)², and experts without outer scale",
    ),
    "p4-def2": (
        "the definition as written: any distinct parameters; the paper's examples, d = 2",
        "generic parameters and symmetric A among the hypotheses",
    ),
    "p4-def4": (
        "the definition as written: any distinct parameters; the paper's examples, d = 2",
        "generic parameters and symmetric A among the hypotheses",
    ),
    "p4-prop2": (
        "full score, any two measures with one function",
        "two measures of one function under the condition; or the condition in the statement",
    ),
    "p4-prop5": (
        "partial score, any two measures with one function",
        "two measures of one function under the condition; or the condition in the statement",
    ),
    "p4-thm1": (
        "over-specified, sparse, full score, loss L_1. No expert meets Def. 1 (`p4-def1`), so that "
        "as an implication the theorem is empty; judged is the bound for the experts that the "
        "paper says meet it, two-layer GELU and ReLU",
        "a loss with ‖Δb‖⁴ in place of ‖Δb‖², or the partial score",
    ),
    "p4-thm2": (
        "over-specified, sparse, full score, loss L_{2,r}; powers 1, 2, 3",
        "a lower bound on the ratio along splits",
    ),
    "p4-thm3": (
        "dense, full score, loss L_3; at N = N*, where the nearest best measure is the truth "
        "(N > N* in `p4-thm3-rate`); tanh, bounded parameters",
        "a vanishing ratio with symmetric A",
    ),
    "p4-thm5": (
        "dense, partial score, loss L_5, at N = N*; tanh, bounded parameters",
        "a vanishing ratio with symmetric A",
    ),
    "p4-thm4": (
        "over-specified, sparse, partial score, loss L_4. The paper's examples do not meet Def. 3 "
        "(`p4-def3`) and break the bound; tanh without outer scale passes the split test",
        "a vanishing ratio for tanh with symmetric A",
    ),
    "p4-prop1": (
        "over-specified (N = N* + 1), sparse, full score, ‖f̂ - f*‖; tanh",
        "a slope outside -1/2 ± 0.1",
    ),
    "p4-prop4": (
        "over-specified (N = N* + 1), sparse, partial score, ‖f̂ - f*‖; tanh",
        "a slope outside -1/2 ± 0.1",
    ),
    "p4-cor1": (
        "over-specified, dense, full score, distance to the best functions with more than N* "
        "experts; tanh, whose best function is f*, and e^{ηx}, whose best is not",
        "experts among the hypotheses that can vanish or be split",
    ),
    "p4-cor2": (
        "over-specified, dense, partial score, as Cor. 1",
        "experts among the hypotheses that can vanish or be split",
    ),
    "p4-thm2-rate": (
        "over-specified (N = N* + 1), sparse, full score, linear experts after matching",
        "an expert error with a slope below -0.15",
    ),
    "p4-thm3-rate": (
        "the theorem's own: N > N* (one too many), the infimum over measures of the best function, "
        "a bound in probability; tanh, full score, one truth for all seeds; N = N* beside it",
        "a slope of the median outside -1/2 ± 0.14, or experts that cannot vanish",
    ),
    "p4-thm5-rate": (
        "as Thm 3, partial score",
        "a slope of the median outside -1/2 ± 0.14, or experts that cannot vanish",
    ),
    "p4-thm4-rate": (
        "over-specified (N = N* + 1), sparse, partial score, L_4 raw and with A symmetric; tanh; "
        "one truth for all seeds",
        "a loss against the nearest measure of the same function, or experts that cannot vanish",
    ),
    "p4-thm1-rate": (
        "over-specified (N = N* + 1), sparse, full score, L_1 with A symmetric; tanh; one truth "
        "for all seeds",
        "slopes of three seeds on one side of a limit",
    ),
    "p4-table1": (
        "N > N* and dense gates, as the table; N = N* beside it; full score, linear and ReLU",
        "an expert error against the nearest measure of the best function, which the paper means",
    ),
    "p4-table1-heads": (
        "heads as in practice: one expert for each token, N = N*; tied and untied students",
        "heads with more experts than tokens",
    ),
    "p4-fig1a": ("softmax data, ReLU; raw losses from two start radii, d = 2", NO_START),
    "p4-fig1b": ("softmax data, linear; raw losses from two start radii, d = 2", NO_START),
    "p4-fig2a": ("sigmoid data, sparse, N = N*; raw losses from two start radii", NO_START),
    "p4-fig2b": ("sigmoid data, dense, N = N*; raw losses from two start radii", NO_START),
}
