"""Estimation of mixtures of experts by least squares: models, losses, identifiability, rates."""

from typing import TYPE_CHECKING

from tieline.lab.estimation.fit import FitResult, FitWarning, population_minimiser
from tieline.lab.estimation.identifiability import (
    Identifiability,
    canonical,
    identifiability,
    identifiability_table,
    symmetries,
)
from tieline.lab.estimation.losses import (
    matched_errors,
    quotient_loss,
    quotient_losses,
    regression_distance,
    voronoi_loss,
    voronoi_losses,
)
from tieline.lab.estimation.model import MoEModel, MoEParameters, quadratic_parameters
from tieline.lab.estimation.rate_plan import (
    SETTINGS,
    RatePlan,
    Setting,
    SmallDesign,
    case_of,
    named_case,
    setting,
    small_design,
)
from tieline.lab.estimation.rates import RateStudy, rate_study

if TYPE_CHECKING:
    from tieline.lab.estimation.regressor import MoERegressor

__all__ = [
    "SETTINGS",
    "FitResult",
    "FitWarning",
    "Identifiability",
    "MoEModel",
    "MoEParameters",
    "MoERegressor",
    "RatePlan",
    "RateStudy",
    "Setting",
    "SmallDesign",
    "canonical",
    "case_of",
    "identifiability",
    "identifiability_table",
    "matched_errors",
    "named_case",
    "population_minimiser",
    "quadratic_parameters",
    "quotient_loss",
    "quotient_losses",
    "rate_study",
    "regression_distance",
    "setting",
    "small_design",
    "symmetries",
    "voronoi_loss",
    "voronoi_losses",
]


def __getattr__(name: str) -> object:
    """Import `MoERegressor` on first use: it needs scikit-learn, an extra of this package."""
    if name != "MoERegressor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from tieline.lab.estimation.regressor import MoERegressor
    except ModuleNotFoundError as error:
        needs = "MoERegressor needs scikit-learn: pip install 'tieline[estimation]'"
        raise ModuleNotFoundError(needs, name=error.name) from error
    return MoERegressor
