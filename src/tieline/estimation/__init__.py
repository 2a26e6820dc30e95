"""Estimation of mixtures of experts by least squares: models, losses, identifiability, rates."""

from tieline.estimation.model import MoEModel
from tieline.estimation.parameters import MoEParameters

__all__ = ["MoEModel", "MoEParameters"]
