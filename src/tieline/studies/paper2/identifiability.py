"""Definitions 1 and 2 and Proposition 1 of paper 2."""

import torch

from tieline.estimation import MoEModel
from tieline.estimation.rank_test import generic_atoms, rank_test, witness_atoms
from tieline.studies.checks import at_least, near
from tieline.studies.claim import Evidence, Part, Run, Verdict
from tieline.studies.mixture_checks import dependent, same_function, split_checks
from tieline.studies.mixtures import drawn, inputs, shift_rows, split_scale
from tieline.studies.registry import claim


def model_of(expert: str, **changes) -> MoEModel:
    """The perturbed cosine router with two experts on the plane."""
    return MoEModel(**{"gate": "perturbed", "link": "softmax", "expert": expert, "d": 2,
                       "n_experts": 2, **changes})  # fmt: skip


@claim(
    "p2-def1",
    "Def. 1",
    "strong identifiability and its examples",
    statement="The derivatives of H̃ up to order two are independent for ReLU, tanh and uᵖ, p >= "
    "2, and not for linear experts.",
    tested="Rank of the normalised Gram matrix of all derivatives at two generic atoms (d = 2); "
    "the split test besides.",
    expected=Verdict.FAILS,
    seconds=12,
)
def strong(run: Run) -> Evidence:
    """Dependent derivatives of each expert."""
    x = inputs(run, 800, 2)
    counts = {}
    for expert in ("relu", "tanh", "polynomial", "linear"):
        model = model_of(expert)
        counts[expert] = dependent(rank_test(model, generic_atoms(model, 2), "strong", x))
    linear = counts.pop("linear")
    return Evidence(
        [
            *(near(f"dependent derivatives, {name}", n, 0, 0) for name, n in counts.items()),
            at_least("dependent derivatives, linear", linear, 1),
            near("tanh: one equation per atom", counts["tanh"], 2, 0, part="corrected"),
            *split_checks(run, model_of, {"tanh": "identifiable", "gelu": "identifiable",
                                "relu": "up to scale", "polynomial": "up to scale",
                                "linear": "not identifiable"}),
        ],
        paper=0,
        corrected="tanh, GELU pass the split test; ReLU, u² up to their scale",
        measured=f"{counts}",
        note="z is parallel to x, so z_u x_v = z_v x_u and ∂²H/∂β_u∂a_v = ∂²H/∂β_v∂a_u up to lower "
        "orders: one equation per atom on the plane, for every φ. Homogeneous φ add Euler's.",
    )  # fmt: skip


@claim(
    "p2-def2",
    "Def. 2",
    "weak identifiability and its examples",
    statement="H̃ and its first derivatives are independent for ReLU, tanh and uᵖ, at any distinct "
    "parameters.",
    tested="Rank at generic atoms, and at two atoms with a = 0, whose experts are two constants.",
    expected=Verdict.CONDITION,
    condition="φ of no degree (tanh, GELU) and generic parameters: Euler's equation H = a·∂_a H + "
    "b ∂_b H makes ReLU and uᵖ dependent, and two experts with a = 0 are multiples of one function",
)
def weak(run: Run) -> Evidence:
    """Dependent first derivatives."""
    x, checks = inputs(run, 500, 2), []
    for expert in ("relu", "polynomial", "tanh", "gelu"):
        model = model_of(expert)
        generic = dependent(rank_test(model, generic_atoms(model, 2), "weak", x))
        same = dependent(rank_test(model, witness_atoms(model), "weak", x))
        smooth = expert in ("tanh", "gelu")
        part: Part = "condition" if smooth else "paper"
        checks.append(near(f"dependent, {expert}", generic, 0, 0, part=part))
        checks.append(near(f"dependent at a = 0, {expert}", same, 0, 0))
        if not smooth:
            checks.append(near(f"one equation per atom, {expert}", generic, 2, 0, part="corrected"))
    return Evidence(checks, paper=0, measured=max(c.measured for c in checks))


@claim(
    "p2-prop1",
    "Prop. 1, (A.3)",
    "identifiability of the mixing measure",
    statement="If two perturbed cosine mixtures are the same function, they are the same measure, "
    "once the last bias is 0.",
    tested="Three pairs of different measures with one function: all rows v(β) moved by one vector "
    "(tanh); one expert as two of strength 1 ± s with the same row (ReLU, u²).",
    expected=Verdict.FAILS,
)
def measures(run: Run) -> Evidence:
    """Different measures of one function."""
    x = inputs(run, 2000, 2)
    shifted = model_of("tanh", n_experts=3)
    truth = drawn(run, shifted, router=0.05)
    step = torch.tensor([0.2, -0.1], dtype=torch.float64)
    pairs = {"rows moved": (shifted, truth, shift_rows(shifted, truth, step))}
    for expert in ("relu", "polynomial"):
        model = model_of(expert, n_experts=3)
        params = drawn(run, model, stream=2)
        pairs[f"{expert} split"] = (model, params, split_scale(model, params))
    return same_function(
        pairs,
        x,
        "L2",
        2,
        corrected="G = G* up to a common shift of rows and, for φ of a degree, mass against scale",
        note="The proof takes the independence of h(·, η_i) from distinct η_i, which a homogeneous "
        "φ does not give, and β_1i = β*_1i from equal softmax weights, which only gives v_i - v_j.",
    )
