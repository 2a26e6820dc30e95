"""Definitions 1 to 4 and Propositions 2 and 5 of paper 4."""

from functools import partial

import torch

from tieline.estimation import MoEModel, MoEParameters
from tieline.estimation.rank_test import generic_atoms, rank_test, witness_atoms
from tieline.studies.checks import at_least, near
from tieline.studies.claim import Check, Evidence, Part, Run, Verdict
from tieline.studies.mixture_checks import dependent, same_function, split_checks
from tieline.studies.mixtures import drawn, inputs, split_scale, twisted, without_row
from tieline.studies.registry import claim


def family(gate, expert: str, n: int = 2, **changes) -> MoEModel:
    """A sigmoid model on the plane."""
    return MoEModel(gate, "sigmoid", expert, 2, n, **changes)


def strong_counts(run: Run, gate, experts: dict[str, dict]) -> dict[str, int]:
    """Dependent derivatives of the strong definition, by expert."""
    x, counts = inputs(run, 800, 2), {}
    for name, form in experts.items():
        model = family(gate, **form)
        counts[name] = dependent(rank_test(model, generic_atoms(model, 2), "strong", x))
    return counts


LAYERED = {
    "two-layer ReLU": {"expert": "two_layer", "activation": "relu"},
    "two-layer GELU": {"expert": "two_layer", "activation": "gelu"},
}


@claim(
    "p4-def1",
    "Def. 1",
    "strong identifiability and its examples",
    statement="The derivatives of F in (A, b, η) of orders one and two at A = b = 0 are "
    "independent for two-layer ReLU and GELU experts, not for polynomial ones.",
    tested="Rank of the normalised Gram matrix at two generic experts (d = 2, symmetric A); the "
    "split test besides.",
    expected=Verdict.FAILS,
    seconds=12,
)
def strong(run: Run) -> Evidence:
    """Dependent derivatives under the fully quadratic score."""
    counts = strong_counts(run, "quadratic", LAYERED)
    return Evidence(
        [
            *(near(f"dependent derivatives, {name}", n, 0, 0) for name, n in counts.items()),
            *(at_least(f"{name}: at least the three of ∂A ~ ∂b∂b", n, 6, part="corrected")
              for name, n in counts.items()),
            *split_checks(run, partial(family, "quadratic"),
                          dict.fromkeys(("tanh", "gelu", "relu"), "not identifiable")),
        ],
        paper=0,
        corrected="no expert: ∂F/∂A_uv is a multiple of ∂²F/∂b_u∂b_v at A = b = 0",
        measured=f"{counts}",
    )  # fmt: skip


@claim(
    "p4-def3",
    "Def. 3",
    "partial-strong identifiability and its examples",
    statement="Without b the derivatives of orders one and two at A = 0 are independent for "
    "two-layer ReLU and GELU experts and for uᵖ, linear ones included.",
    tested="Rank at two generic experts (d = 2); the split test besides.",
    expected=Verdict.FAILS,
    seconds=12,
)
def partial_strong(run: Run) -> Evidence:
    """Dependent derivatives under the partially quadratic score."""
    forms = {**LAYERED, "u²": {"expert": "polynomial"}, "linear": {"expert": "linear"}}
    counts = strong_counts(run, "partial", forms)
    cases = {"tanh": "identifiable", "gelu": "identifiable", "relu": "up to scale",
             "polynomial": "up to scale", "linear": "not identifiable"}  # fmt: skip
    return Evidence(
        [
            *(near(f"dependent derivatives, {name}", n, 0, 0) for name, n in counts.items()),
            *split_checks(run, partial(family, "partial"), cases),
        ],
        paper=0,
        corrected="tanh, GELU pass the split test; ReLU, u² up to scale; linear experts do not",
        measured=f"{counts}",
        note="x₁²·x₂² = (x₁x₂)² makes second derivatives in A dependent for every expert; linear "
        "experts at A = 0 are linear in η, so that any split of η is invisible.",
    )


def weak_checks(run: Run, gate) -> list[Check]:
    """Dependent first derivatives at generic parameters and at proportional experts."""
    x, checks = inputs(run, 600, 2), []
    forms: dict[str, dict] = {
        "two-layer GELU": LAYERED["two-layer GELU"],
        "u²": {"expert": "polynomial"},
        "ReLU": {"expert": "relu"},
        "tanh": {"expert": "tanh"},
    }
    for name, form in forms.items():
        model = family(gate, **form)
        generic = dependent(rank_test(model, generic_atoms(model, 2), "weak", x))
        same = dependent(rank_test(model, witness_atoms(model), "weak", x))
        part: Part = "condition"
        checks.append(near(f"dependent, {name}", generic, 0, 0, part=part))
        checks.append(near(f"dependent at proportional experts, {name}", same, 0, 0))
    return checks


CONDITION = (
    "A symmetric, and no two atoms of one row whose experts are multiples of one another: the "
    "definition asks for any distinct parameters"
)


@claim(
    "p4-def2",
    "Def. 2",
    "weak identifiability and its examples",
    statement="The first derivatives of F in (A, b, c, η) are independent at any distinct "
    "parameters, for two-layer networks and polynomial experts.",
    tested="Rank at two generic atoms (d = 2, symmetric A), and at two atoms with proportional "
    "experts.",
    expected=Verdict.CONDITION,
    condition=CONDITION,
)
def weak(run: Run) -> Evidence:
    """First derivatives, fully quadratic score."""
    checks = weak_checks(run, "quadratic")
    return Evidence(checks, paper=0, measured=max(c.measured for c in checks))


@claim(
    "p4-def4",
    "Def. 4",
    "partial-weak identifiability and its examples",
    statement="The same without b.",
    tested="Rank at two generic atoms (d = 2), and at two atoms with proportional experts.",
    expected=Verdict.CONDITION,
    condition=CONDITION,
)
def partial_weak(run: Run) -> Evidence:
    """First derivatives, partially quadratic score."""
    checks = weak_checks(run, "partial")
    return Evidence(checks, paper=0, measured=max(c.measured for c in checks))


def same_functions(run: Run, gate, loss: str) -> Evidence:
    """Different measures of one function: antisymmetric parts, mass against scale, a split."""
    tanh, relu = family(gate, "tanh", 3), family(gate, "relu", 3)
    truth, flat = drawn(run, tanh), without_row(drawn(run, relu, stream=2))
    bias, experts = flat.bias.clone(), flat.experts.clone()
    bias[0] = torch.logit(flat.bias[0].sigmoid() / 2)
    experts[0] *= 2
    pairs = {
        "antisymmetric part": (tanh, truth, twisted(truth)),
        "half the mass, twice the scale": (relu, flat, MoEParameters(flat.router, bias, experts)),
        "ReLU split": (relu, flat, split_scale(relu, flat)),
    }
    return same_function(
        pairs,
        inputs(run, 2000, 2),
        loss,
        4,
        corrected="up to the antisymmetric part of A and, at zero rows, mass against scale",
    )


@claim(
    "p4-prop2",
    "Prop. 2",
    "identifiability, fully quadratic score",
    statement="If two mixtures are the same function, they are the same measure.",
    tested="Three pairs of different measures of one function: A with an antisymmetric part; a "
    "ReLU expert under a zero row with half the mass and twice the scale; the same split in two.",
    expected=Verdict.FAILS,
)
def measures(run: Run) -> Evidence:
    """Fully quadratic."""
    return same_functions(run, "quadratic", "L1")


@claim(
    "p4-prop5",
    "Prop. 5",
    "identifiability, partially quadratic score",
    statement="The same for the partially quadratic score.",
    tested="The same three pairs without b.",
    expected=Verdict.FAILS,
)
def partial_measures(run: Run) -> Evidence:
    """Partially quadratic."""
    return same_functions(run, "partial", "L4")
