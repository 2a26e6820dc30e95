"""Section 6: symmetry breaking, by the gradient, the response model and the reduced update."""

import math

import torch
from torch import Tensor

from tieline.core.statistics import mean_estimate
from tieline.lab.claims.claim import ClaimRun, Verdict, claim
from tieline.lab.claims.evidence import (
    Evidence,
    FigureData,
    at_least,
    at_most,
    chart,
    corrected,
    line,
    near,
    none_of,
    qualified,
    sampled,
    standard_errors_off,
)
from tieline.lab.limits.symmetry_breaking import (
    Response,
    SymmetryBreaking,
    alignment_rate,
    alignment_step,
    coupled_modes,
    operator,
    relabelled,
    response_constant,
    symmetry_breaking,
)

V = torch.tensor([0.8, 0.6], dtype=torch.float64)
D = torch.tensor([1.0, 0.3], dtype=torch.float64)
SIGMA = torch.tensor([[1.5, 0.4], [0.4, 0.8]], dtype=torch.float64)


def gaussian_draws(run: ClaimRun, n: int) -> Tensor:
    """Draw inputs from N(0, SIGMA)."""
    return run.normal(n, 2, stream=1) @ torch.linalg.cholesky(SIGMA).T


def two_sided_target(x: Tensor, v: Tensor, d: Tensor) -> Tensor:
    """The teacher's output: d·x/2 where v·x >= 0, and -d·x/2 on the other side."""
    return torch.where(x @ v >= 0, 0.5, -0.5) * (x @ d)


@claim("p0-eq6.2", "gradient of the risk in the router", number="eq. 6.1, 6.2")
def router_gradient(run: ClaimRun) -> Evidence:
    """∇_u L = -(4/τ) E[(Y - h) p_1 p_2 (f_1 - f_2) X].

    Setting: every parameter; one drawn sample
    Tested: Automatic differentiation of the sampled risk against the formula on the same sample.
    Overturned by: a difference beyond rounding
    """
    x = gaussian_draws(run, run.size(20_000, 200_000))
    tau, u = 0.7, torch.tensor([0.3, -0.2], dtype=torch.float64, requires_grad=True)
    target = two_sided_target(x, V, D)
    first, second = (
        x @ torch.tensor([0.2, 0.1]).double() + 0.1,
        x @ torch.tensor([-0.1, 0.3]).double(),
    )
    p = torch.sigmoid(2 * (x @ u) / tau)
    h = p * first + (1 - p) * second
    (auto,) = torch.autograd.grad((target - h).square().mean(), u)
    inner = (target - h) * p * (1 - p) * (first - second)
    formula = -4 / tau * (inner[:, None] * x).mean(dim=0)
    difference = (auto - formula).abs().max().item()
    checks = [at_most("largest difference", difference, 1e-12)]
    return Evidence.of(checks, paper="equal", measured=difference)


@claim("p0-eq6.3", "response model, an assumption", expected=Verdict.FAILS)
def response_model(run: ClaimRun) -> Evidence:
    """Assumed, as a reduced model and not as a theorem: near u = 0 the product of residual and
    contrast is odd in u·x to first order, so that the update of the router is linear in u, without
    a drift.

    Setting: an assumption that the paper calls a reduced model, not a theorem; tested on the
        two-expert model of the same section
    Tested: Whether the two-expert model of the same section meets it: the gradient at u = 0 with a
        small contrast δ of the experts, by sampling; the true descent beside the reduced one.
    Overturned by: a two-expert model whose gradient at u = 0 has no drift at a nonzero contrast
    """
    x, tau = gaussian_draws(run, run.size(400_000, 4_000_000)), 0.5
    contrast = 0.1 * D
    target = two_sided_target(x, V, D)
    drift = mean_estimate(target * (x @ contrast) * (x @ V) / tau)
    modes = coupled_modes(V, D, tau, SIGMA, intercept=0.0)
    closed = (V @ modes.matrix @ contrast).item() / (2 * tau)
    paths = symmetry_breaking(V, D, tau=1.0, step_size=0.1, steps=60, covariance=SIGMA)
    value, error = drift.value or 0.0, drift.standard_error or 0.0
    return Evidence.of(
        near("component of -∇_u L along v at u = 0", value, 0, 4 * error),
        corrected(
            sampled("the drift and M_e δ/2τ", drift, closed),
            near(
                "growth per step and that of the coupled modes",
                paths.growth,
                paths.predicted_growth,
                0.02,
            ),
            at_least(
                "growth of the reduced model over the true one",
                (paths.paper_growth - 1) / (paths.growth - 1),
                1.2,
            ),
        ),
        paper=f"no drift; growth {paths.paper_growth:.4f} per step",
        corrected=f"drift {closed:.6f}; growth {paths.predicted_growth:.4f}",
        measured=f"drift {value:.6f}; growth {paths.growth:.4f}",
        figure=_norms_chart(paths),
        note="Router and contrast drive each other: modes ±|λ|/(√2 τ), one of them growing "
        "whatever the sign of λ.",
    )


def _norms_chart(paths: SymmetryBreaking) -> FigureData:
    """Chart of ‖u‖ against the step, for the reduced model and the true descent."""
    steps = range(len(paths.norms))
    curves = [
        line("reduced model", steps, paths.reduced_norms, dashed=True),
        line("true descent", steps, paths.norms),
    ]
    return chart("step", "‖u‖", *curves, log="y")


@claim("p0-eq6.4", "the operator M", number="eq. 6.4, 6.5")
def symmetric_linearisation(run: ClaimRun) -> Evidence:
    """Under the response model, ψ(·, t) odd and differentiable at 0 for each t, the linear update
    has the symmetric matrix M = E[g(v·X)(d·X) XXᵀ].

    Setting: the response model with the regularity that is printed: odd and differentiable at 0
    Tested: The closed form against samples of the definition, entry by entry, sign and tanh; and
        the linearisation of (6.2) with the response put in, by differences: one that is dominated,
        and one with a jump in the slab 0 < ||t| - 1| < |s|, differentiable at s = 0 for every t.
    Overturned by: a domination of ψ among the hypotheses; then it holds as it stands
    Condition: |ψ(s, t)| <= |s| G(t) with E[G(v·X)‖X‖³] finite, so that limit and expectation may be
        exchanged
    """
    x = gaussian_draws(run, run.size(400_000, 4_000_000))
    checks = []
    for g in (Response("sign"), Response("tanh", 2.0)):
        closed = operator(V, D, SIGMA, g).matrix
        terms = (g(x @ V) * (x @ D))[:, None, None] * x[:, :, None] * x[:, None, :]
        worst = standard_errors_off(terms, closed)
        name = f"largest deviation in standard errors, {g.kind}"
        skew = (closed - closed.T).abs().max().item()
        checks += qualified(at_most(name, worst, 4))
        checks += qualified(near(f"asymmetry, {g.kind}", skew, 0, 0))
    tau, g = 0.5, Response("tanh", 2.0)
    exact = -(operator(V, D, SIGMA, g).matrix @ V) / tau
    spread = {}
    for jump, step in ((False, 1e-4), (True, 1e-2)):
        derivative = _response_gradient(x, step * V, tau, g, jump=jump) / step
        spread[jump] = (derivative - exact).norm().item() / exact.norm().item()
    name = "relative error of -Mv/τ as a derivative"
    checks += qualified(at_most(f"{name}, dominated response", spread[False], 0.02))
    checks.append(at_most(f"{name}, a jump in a thin slab", spread[True], 0.02))
    return Evidence.of(
        checks,
        paper="M",
        measured=f"within {spread[False]:.2%}; {spread[True]:.0%} off with the jump",
        note="The slab has a mass of order |s|, as the linear term has a size: the jump adds a "
        "term of first order, though the response is differentiable at 0 for every t.",
    )


def _response_gradient(x: Tensor, u: Tensor, tau: float, g: Response, *, jump: bool) -> Tensor:
    """Gradient of eq. 6.2 with the product of eq. 6.3, ψ(s, t) = sinh(s) g(t).

    With the jump, sgn(s) sgn(t) is added in the slab 0 < ||t| - 1| < |s|.
    """
    s, t = x @ u, x @ V
    p = torch.sigmoid(2 * s / tau)
    deviation = (t.abs() - 1).abs()
    slab = s.sign() * t.sign() * ((deviation > 0) & (deviation < s.abs())) if jump else 0.0
    product = (torch.sinh(s) * g(t) + slab) * (x @ D)
    return -4 / tau * ((p * (1 - p) * product)[:, None] * x).mean(dim=0)


@claim("p0-lem6.1", "Gaussian moment along the separator")
def separator_moment(run: ClaimRun) -> Evidence:
    """vᵀMv = κ_g (d·Σv) √(vᵀΣv) with κ_g = E[g(G)G³]/s³ > 0.

    Setting: Gaussian inputs, g odd with g(z)z >= 0; sign and tanh in R⁵, an equality
    Tested: Samples of E[g(v·X)(d·X)(v·X)²] for sign and tanh in five dimensions, and the quadratic
        form of the closed M.
    Overturned by: a moment outside four standard errors
    """
    factor = run.normal(5, 5, stream=1)
    sigma = factor @ factor.T / 5 + 0.3 * torch.eye(5, dtype=torch.float64)
    v, d = run.normal(5, stream=2), run.normal(5, stream=3)
    v = v / v.norm()
    x = run.normal(run.size(400_000, 4_000_000), 5, stream=4) @ torch.linalg.cholesky(sigma).T
    checks, spread = [], math.sqrt((v @ sigma @ v).item())
    for g in (Response("sign"), Response("tanh", 0.7)):
        side = x @ v
        moment = mean_estimate(g(side) * (x @ d) * side.square())
        stated = response_constant(g, spread) * (d @ sigma @ v).item() * spread
        closed = (v @ operator(v, d, sigma, g).matrix @ v).item()
        checks += [
            sampled(f"sampled, {g.kind}", moment, stated, resolution=0.1),
            near(f"vᵀMv of the closed matrix, {g.kind}", closed, stated, 1e-10),
            at_least(f"κ_g, {g.kind}", response_constant(g, spread), 1e-3),
        ]
    return Evidence.of(checks, paper=checks[0].reference, measured=checks[0].measured)


@claim("p0-lem6.2", "sign response")
def sign_response(run: ClaimRun) -> Evidence:
    """κ_sign = 2√(2/π), whatever the scale.

    Setting: the sign response at every scale, an equality
    Tested: Quadrature of E|G|³/s³ at three scales to nine digits.
    Overturned by: a ninth digit that differs
    """
    stated = 2 * math.sqrt(2 / math.pi)
    values = [response_constant(Response("sign"), s) for s in (0.1, 1.0, 7.0)]
    checks = [
        near(f"κ at scale {s}", k, stated, 1e-9) for s, k in zip((0.1, 1, 7), values, strict=True)
    ]
    return Evidence.of(checks, paper=stated, measured=values[1])


@claim("p0-eq6.7", "without loss of generality d·Σv > 0", expected=Verdict.FAILS)
def positive_drive_generality(run: ClaimRun) -> Evidence:
    """Replacing v by -v and swapping the sides leaves the teacher as it is, so d·Σv may be taken
    positive.

    Setting: every teacher; one with d·Σv < 0
    Tested: The relabelled teacher must give the same targets: then d changes sign with v, and d·Σv
        and M stay. A teacher with d·Σv < 0 in both models.
    Overturned by: a relabelling that keeps the targets and changes the sign of d·Σv
    """
    d = -D
    x = gaussian_draws(run, run.size(2_000, 20_000))
    new_v, new_d = relabelled(V, d)
    outputs_before = two_sided_target(x, V, d)
    outputs_after = two_sided_target(x, new_v, new_d)
    flipped = two_sided_target(x, -V, d)
    change = (outputs_before - outputs_after).abs().max().item()
    product = (new_d @ SIGMA @ new_v).item()
    reduced = operator(V, d, SIGMA)
    true = coupled_modes(V, d, 1.0, SIGMA)
    return Evidence.of(
        at_least("d·Σv after the relabelling that keeps the teacher", product, 0),
        corrected(
            near("targets of the relabelled teacher", change, 0, 1e-12),
            at_least(
                "targets when v alone is flipped",
                (outputs_before - flipped).abs().max().item(),
                0.1,
            ),
            at_most("vᵀMv of the reduced model", reduced.rayleigh, -0.1),
            at_least("growth of the true model all the same", true.rates[0].item(), 0.1),
        ),
        paper="d·Σv > 0",
        corrected="swapping sides also flips d",
        measured=f"{product:.6f}; vᵀMv = {reduced.rayleigh:.4f}; true growth {true.rates[0]:.4f}",
    )


@claim("p0-eq6.6", "reduced update")
def reduced_update(run: ClaimRun) -> Evidence:
    """u_{t+1} = (I + (η/τ) M) u_t to first order.

    Setting: the reduced update itself, an identity of matrices
    Tested: Fifty steps of the update against its spectral form.
    Overturned by: a difference beyond rounding
    """
    spectrum = operator(V, D, SIGMA)
    u, push = torch.tensor([0.3, -0.7], dtype=torch.float64), 0.05
    components = spectrum.eigenvectors.T @ u
    for _ in range(50):
        u = alignment_step(u, spectrum.matrix, push)
    closed = spectrum.eigenvectors @ ((1 + push * spectrum.eigenvalues) ** 50 * components)
    distance = ((u - closed).norm() / closed.norm()).item()
    checks = [at_most("relative distance", distance, 1e-12)]
    return Evidence.of(checks, paper="equal", measured=distance)


@claim("p0-prop6.3", "instability of the symmetric router")
def symmetric_router_instability(run: ClaimRun) -> Evidence:
    """If d·Σv ≠ 0, M has a positive eigenvalue whose eigenvector is not orthogonal to v, and the
    reduced update grows along it by 1 + ηλ/τ a step, more for smaller τ.

    Setting: d·Σv ≠ 0 as printed, both signs; the reduced model
    Tested: Drawn teachers in three dimensions: signs, overlaps, and the growth of the iterated
        update.
    Overturned by: a proof for d·Σv < 0, where vᵀMv is negative
    Condition: d·Σv > 0, which is no loss of generality only in words (eq. 6.7), and the reduced
        model, not the true descent (eq. 6.3)
    """
    stable, unstable, worst, least = 0, 0, math.inf, math.inf
    for i in range(run.size(100, 1_000)):
        v, d = run.normal(3, stream=2 * i), run.normal(3, stream=2 * i + 1)
        v = v / v.norm()
        spectrum = operator(v, d)
        positive = (d @ v).item() > 0
        stable += not positive and spectrum.rayleigh < 0
        unstable += positive and spectrum.rayleigh <= 0
        if positive:
            worst = min(worst, spectrum.eigenvalues[0].item())
            growing = spectrum.overlap[spectrum.eigenvalues > 0]
            least = min(least, growing.max().item())
    spectrum = operator(V, D, SIGMA)
    slow, quick = (
        alignment_rate(spectrum.eigenvalues, 0.1, tau).amplification for tau in (1.0, 0.1)
    )
    return Evidence.of(
        none_of("teachers with vᵀMv < 0", stable),
        qualified(
            none_of("teachers with d·Σv > 0 and vᵀMv <= 0", unstable),
            at_least("smallest leading eigenvalue, d·Σv > 0", worst, 1e-6),
            at_least("smallest overlap with v", least, 1e-6),
            near("growth per step at τ = 1", slow, 1 + 0.1 * spectrum.eigenvalues[0].item(), 1e-12),
            at_least("growth at τ = 0.1 over that at τ = 1", quick, slow),
        ),
        paper="λ_+ > 0",
        corrected="if d·Σv > 0",
        measured=f"smallest λ_1 = {worst:.4f}; {stable} teachers with vᵀMv < 0",
    )


@claim("p0-eq6.8", "spectral form and alignment", number="eq. 6.8, 6.9")
def spectral_alignment(run: ClaimRun) -> Evidence:
    """Components grow like (1 + ηλ_i/τ)^t; u/‖u‖ tends to the leading eigenvector.

    Setting: the reduced update with a simple leading eigenvalue
    Tested: The iterated update: ratio of components after t steps against ρ^t, and the angle.
    Overturned by: a ratio of components other than ρ^t
    """
    spectrum = operator(V, D, SIGMA)
    rate = alignment_rate(spectrum.eigenvalues, 0.1, 0.5)
    u = torch.tensor([0.1, -0.9], dtype=torch.float64)
    start = spectrum.eigenvectors.T @ u
    angles, steps, components = [], 15, start
    for _ in range(steps):
        u = alignment_step(u, spectrum.matrix, 0.2)
        components = spectrum.eigenvectors.T @ u
        angles.append((components[0].abs() / u.norm()).item())
    stated = (rate.ratio**steps * start[1] / start[0]).item()
    return Evidence.of(
        near("ratio of components", (components[1] / components[0]).item() / stated, 1, 1e-9),
        at_least("cosine with the leading eigenvector", angles[-1], 0.999),
        near("the sign condition holds", float(rate.sign_stable), 1, 0),
        paper=stated,
        measured=(components[1] / components[0]).item(),
        figure=chart("step", "|cos(u, w_1)|", line("reduced model", range(1, steps + 1), angles)),
    )


@claim("p0-eq6.10", "rate of alignment and its saturation", number="eq. 6.10, 6.11")
def alignment_saturation(run: ClaimRun) -> Evidence:
    """ρ(τ) = (1 + ηλ_2/τ)/(1 + ηλ_1/τ) = 1 - (η/τ)(λ_1 - λ_2) + O((η/τ)²), t_align ≍ τ/(η(λ_1 -
    λ_2)); for τ → 0 it saturates at λ_2/λ_1.

    Setting: two eigenvalues, an expansion in η/τ and a limit for τ → 0
    Tested: The expansion's order, the time to shrink the ratio by e, and the limit.
    Overturned by: an error of the expansion of another order than 2
    """
    values = operator(V, D, SIGMA).eigenvalues
    pushes = [0.004, 0.002, 0.001]
    rates = [alignment_rate(values, push, 1.0) for push in pushes]
    errors = [abs(r.ratio - r.ratio_first_order) for r in rates]
    order = math.log(errors[0] / errors[2]) / math.log(4)
    drives = torch.tensor([2.0, 0.5], dtype=torch.float64)
    taus = [10.0**k for k in (1, 0, -1, -2, -3, -4)]
    curve = [alignment_rate(drives, 0.1, tau).ratio for tau in taus]
    checks = [
        near("order of the error of the expansion", order, 2, 0.05),
        near(
            "t_align over the exact time at η/τ = 0.001",
            rates[-1].steps / rates[-1].steps_exact,
            1,
            0.05,
        ),
        near("ρ at τ = 1e-4", curve[-1], 0.25, 1e-3),
    ]
    figure = chart("τ", "ρ(τ)", line("λ = 2, ½; η = 0.1", taus, curve), log="x")
    return Evidence.of(checks, paper=0.25, measured=curve[-1], figure=figure)
