"""Estimation of mixtures of experts by least squares: models, losses, identifiability, rates."""

from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters, quadratic_parameters
from tieline.estimation.symmetry import canonical, symmetries
from tieline.estimation.voronoi import voronoi_loss, voronoi_losses

__all__ = [
    "MoEModel",
    "MoEParameters",
    "canonical",
    "quadratic_parameters",
    "symmetries",
    "voronoi_loss",
    "voronoi_losses",
]
