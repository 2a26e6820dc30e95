"""How near tokens are to a tie: boundary masses, densities, orders, distances."""

from tieline.geometry.boundary import (
    Mass,
    ambiguity_mass,
    boundary_mass_pair,
    boundary_mass_top,
    pair_gap,
    top_gap,
)
from tieline.geometry.gaussian import (
    gaussian_budget_epsilon,
    gaussian_gap_density,
    gaussian_gap_mass,
    gaussian_near_ties,
    gaussian_order_shares,
    gaussian_pair_density,
)
from tieline.geometry.order import tie_order

__all__ = [
    "Mass",
    "ambiguity_mass",
    "boundary_mass_pair",
    "boundary_mass_top",
    "gaussian_budget_epsilon",
    "gaussian_gap_density",
    "gaussian_gap_mass",
    "gaussian_near_ties",
    "gaussian_order_shares",
    "gaussian_pair_density",
    "pair_gap",
    "tie_order",
    "top_gap",
]
