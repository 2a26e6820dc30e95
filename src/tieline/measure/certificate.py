"""Which choices of experts no order of summation can change: a forward error bound per score.

With bitwise equal router input x and stored weights w_e, exact scores z_e = Σ_i x_i w_ei and

    B_e = γ_d(u) Σ_i |x_i w_ei| + u_out (|z_e| + γ_d(u) Σ_i |x_i w_ei|),   γ_d(u) = d u / (1 - d u),

every evaluation whose operations satisfy fl(a ∘ b) = (a ∘ b)(1 + δ), |δ| <= u, in any order, and
whose result is rounded once with |δ| <= u_out, is within B_e of z_e. So if z_i - z_j > B_i + B_j
for every chosen i and every other j, all of them choose the same experts (Higham, Accuracy and
Stability of Numerical Algorithms, sec. 3.1).

The share of tokens that are not certified is an upper bound on the share that another kernel of the
router's product alone can change. Not covered: TF32, fp8 and truncating tensor-core adds (other
constants), selection on computed softmax or sigmoid values, selection biases and groups (their
roundings come on top), and whatever differs before the router.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from tieline.core.errors import require
from tieline.core.ranking import topk_mask

__all__ = ["UNIT_ROUNDOFF", "certified_choices", "score_error_bound"]

UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""u of formats that round to nearest."""


def score_error_bound(
    inputs: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "experts dim"],
    *,
    unit: float = UNIT_ROUNDOFF["float32"],
    output_unit: float = 0.0,
    exact_products: bool = False,
) -> tuple[Float[Tensor, "tokens experts"], Float[Tensor, "tokens experts"]]:
    """Return exact scores in float64 and B_e, which bounds the error of any evaluation.

    Args:
        inputs: router inputs as they are stored.
        weight: router rows as they are stored.
        unit: u of the products and sums.
        output_unit: u of the format in which scores are stored; 0 if it is that of the sums.
        exact_products: products have no rounding, as those of two bf16 numbers in float32: d - 1
            roundings in place of d. Where d u >= 1 nothing is bounded, and B is infinite.
    """
    x, w = inputs.double(), weight.double()
    require(0 < unit < 1 and 0 <= output_unit < 1, f"need 0 < u < 1, got {unit=}, {output_unit=}")
    steps = x.shape[-1] - int(exact_products)
    exact, total = x @ w.T, x.abs() @ w.abs().T
    if steps * unit >= 1:
        return exact, torch.full_like(exact, torch.inf)
    # the float64 scores here are themselves off by this much at most
    own = x.shape[-1] * 2.0**-53 * total
    inner = steps * unit / (1 - steps * unit) * total
    return exact, own + inner + output_unit * (exact.abs() + inner + own)


def certified_choices(
    inputs: Float[Tensor, "tokens dim"],
    weight: Float[Tensor, "experts dim"],
    k: int,
    *,
    unit: float = UNIT_ROUNDOFF["float32"],
    output_unit: float = 0.0,
    exact_products: bool = False,
) -> Bool[Tensor, " tokens"]:
    """Return the tokens whose k experts every evaluation within the bound chooses.

    min over the chosen of z - B exceeds the max over the others of z + B; arguments as for
    `score_error_bound`.
    """
    scores, bound = score_error_bound(
        inputs, weight, unit=unit, output_unit=output_unit, exact_products=exact_products
    )
    chosen = topk_mask(scores, k)
    low = (scores - bound).masked_fill(~chosen, torch.inf).amin(dim=-1)
    high = (scores + bound).masked_fill(chosen, -torch.inf).amax(dim=-1)
    return low > high
