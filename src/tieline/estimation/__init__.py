"""Estimation of mixtures of experts by least squares: models, losses, identifiability, rates."""

from tieline.estimation.distances import matched_errors, regression_distance
from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters, quadratic_parameters
from tieline.estimation.quotient import quotient_loss, quotient_losses
from tieline.estimation.settings import SETTINGS, Setting, setting
from tieline.estimation.small_designs import SmallDesign, small_design
from tieline.estimation.symmetry import canonical, symmetries
from tieline.estimation.voronoi import voronoi_loss, voronoi_losses

__all__ = [
    "SETTINGS",
    "MoEModel",
    "MoEParameters",
    "Setting",
    "SmallDesign",
    "canonical",
    "matched_errors",
    "quadratic_parameters",
    "quotient_loss",
    "quotient_losses",
    "regression_distance",
    "setting",
    "small_design",
    "symmetries",
    "voronoi_loss",
    "voronoi_losses",
]
