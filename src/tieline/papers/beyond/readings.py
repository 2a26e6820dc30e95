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
}
