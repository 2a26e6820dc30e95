"""Settings made ready for a rate study: truth drawn, reference found, grid filled in.

named_case            a published setting, or a small design, by its name
case_of               any combination of gate, link and experts
describe_settings     names with a few words
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tieline.errors import require
from tieline.estimation.model import MoEModel
from tieline.estimation.population import population_minimiser
from tieline.estimation.rate_plan import RatePlan
from tieline.estimation.settings import SETTINGS, Setting
from tieline.estimation.small_designs import well_conditioned
from tieline.estimation.starts import lift

__all__ = ["Case", "as_case", "case_of", "describe_settings", "named_case"]

POPULATION, POPULATION_STARTS, REFINED = 10_000, 3, 300_000
"""Samples without noise, starts, and samples of the last fit for the population minimiser."""


@dataclass(frozen=True, eq=False)
class Case:
    """A plan with what its setting says besides.

    Attributes:
        plan: what to fit.
        paper_slope: the printed slope, if a paper printed one.
        misfit: ‖f_Ḡ - q‖; zero where the model contains the truth.
        words: the setting in a few words.
        condition: of the information matrix at a truth that was chosen for it; None for others.
    """

    plan: RatePlan
    paper_slope: float | None = None
    misfit: float = 0.0
    words: str = ""
    condition: float | None = None


def as_case(setting: "RatePlan | Setting | MoEModel | str", **grid: Any) -> Case:
    """Whatever names a study, as a case: a plan as it is, a setting or model with its grid."""
    if isinstance(setting, RatePlan):
        return Case(replace(setting, **grid))
    if isinstance(setting, MoEModel):
        return _case_of_model(setting, **grid)
    return named_case(setting if isinstance(setting, str) else setting.name, **grid)


def named_case(name: str, seed: int = 0, **grid: Any) -> Case:
    """A published setting, or a small design `small-GATE-LINK-EXPERT`.

    Args:
        name: one of `describe_settings()`.
        seed: of the truth and of everything drawn.
        grid: fields of `RatePlan` to set: sizes, repetitions, radii, noise, ...
    """
    if name in SETTINGS:
        return _published(SETTINGS[name], seed, grid)
    parts = name.split("-")
    known = f"unknown setting {name!r}: a published one ({', '.join(SETTINGS)}) or a small design"
    require(len(parts) == 4 and parts[0] == "small", f"{known}, small-GATE-LINK-EXPERT")
    return case_of(gate=parts[1], link=parts[2], expert=parts[3], name=name, seed=seed, **grid)


def case_of(
    *,
    gate: Any = "linear",
    link: Any = "softmax",
    expert: str = "tanh",
    d: int | None = None,
    n_experts: int | None = None,
    fitted: int | None = None,
    name: str | None = None,
    draws: int = 200,
    seed: int = 0,
    **grid: Any,
) -> Case:
    """Any combination, with a truth that is the best conditioned of many draws.

    Args:
        gate: of the model.
        link: of the model.
        expert: of the model.
        d: width of inputs; that of the small designs by default.
        n_experts: experts of the truth; that of the small designs by default.
        fitted: experts that are fitted; as many as the truth has by default.
        name: of the case.
        draws: truths that are tried.
        seed: of the truth and of everything drawn.
        grid: fields of `RatePlan` to set.
    """
    small = (2, 3) if gate in ("quadratic", "partial") else (3, 4)
    model = MoEModel(gate, link, expert, d or small[0], n_experts or small[1])
    return _case_of_model(model, fitted, name, draws, seed, **grid)


def _case_of_model(
    model: MoEModel,
    fitted: int | None = None,
    name: str | None = None,
    draws: int = 200,
    seed: int = 0,
    **grid: Any,
) -> Case:
    """A model with the best conditioned of many truths."""
    wanted = fitted or model.n_experts
    require(wanted >= model.n_experts, f"fit at least the {model.n_experts} true experts: {wanted}")
    found = well_conditioned(model, seed=seed, draws=draws)
    parts = [model.gate, model.link, model.expert, f"d{model.d}", f"k{wanted}"]
    words = f"{model.gate} gate, {model.link}, {model.expert} experts, d {model.d}"
    options = {"noise": found.noise, **_loss(model, wanted), **grid}
    plan = RatePlan(
        name or "-".join(parts),
        model.with_experts(wanted),
        model,
        found.truth,
        found.truth,
        seed=seed,
        **options,
    )
    words += f", condition {found.condition:.0f}"
    return Case(plan, words=words, condition=found.condition)


def describe_settings() -> Mapping[str, str]:
    """Every name with a few words; the small designs by their pattern."""
    published = {name: _words(one) for name, one in SETTINGS.items()}
    pattern = "small-GATE-LINK-EXPERT"
    return published | {pattern: "about 30 parameters, well specified, noise 0.01"}


def _published(setting: Setting, seed: int, grid: Mapping[str, Any]) -> Case:
    """A paper's setting on its own grid, unless told otherwise."""
    truth = setting.draw_truth(seed)
    reference, misfit = truth, 0.0
    if setting.regime == "misspecified":
        found = population_minimiser(
            setting.fitted,
            lambda x: setting.truth.regression(truth, x),
            near=lift(setting.fitted, truth),
            n=POPULATION,
            starts=POPULATION_STARTS,
            refine=REFINED,
            seed=seed,
        )
        reference, misfit = found.params, found.misfit
    options = {
        "noise": setting.noise,
        "sizes": _spaced(*setting.sample_sizes),
        "repetitions": setting.repetitions,
        "loss": setting.loss,
        "paper": setting.loss_paper,
        **grid,
    }
    plan = RatePlan(
        setting.name, setting.fitted, setting.truth, truth, reference, seed=seed, **options
    )
    return Case(plan, setting.published_slope, misfit, _words(setting))


def _words(setting: Setting) -> str:
    model = setting.fitted
    return (
        f"paper {setting.paper}, figure {setting.figure}: {model.gate} {model.link}, "
        f"{model.expert} experts, {model.n_experts} for {setting.truth.n_experts}, "
        f"{setting.regime}, slope {setting.published_slope:.2f}"
    )


def _spaced(first: int, last: int, count: int = 7) -> tuple[int, ...]:
    """Sample sizes at equal ratios."""
    return tuple(round(first * (last / first) ** (i / (count - 1))) for i in range(count))


def _loss(model: MoEModel, fitted: int) -> dict[str, Any]:
    """The papers' loss for a family: exact or with more experts than needed.

    No paper has a loss for a sigmoid over a linear or cosine score; there the one of paper 2 is
    taken, whose masses are exp(bias).
    """
    over = fitted > model.n_experts
    if model.link == "softmax" or model.gate not in ("quadratic", "partial"):
        return {"loss": "L2" if over else "L3", "paper": 2}
    kinds = ("L1", "L3") if model.gate == "quadratic" else ("L4", "L5")
    return {"loss": kinds[0] if over else kinds[1], "paper": 4}
