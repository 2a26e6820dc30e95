"""Tropical geometry of top-k routing: cells, pieces, bounds and expectations (paper 3)."""

from tieline.tropical.advisor import advise
from tieline.tropical.capacity import (
    attainability,
    capacity_bound,
    cell_bound,
    group_coalitions,
    paper_capacities,
    sharp_bound,
    zaslavsky,
)
from tieline.tropical.cells import Cells, cells, count_cells
from tieline.tropical.checks import Count, DegenerateError
from tieline.tropical.collapse import (
    ball_meets_tie,
    cap_constant,
    cap_fraction,
    centring,
    centring_of_layer,
    saturation,
    walls_in_ball,
)
from tieline.tropical.crossings import crossings, token_pairs
from tieline.tropical.exact import count_cells_rational, count_regions_rational
from tieline.tropical.expectation import (
    expected_cells,
    expected_regions,
    log_expected_cells,
    log_expected_regions,
    pooled_block,
    wall_density,
)
from tieline.tropical.listing import Regions, regions
from tieline.tropical.manifold import (
    expected_kinks,
    expected_switches,
    paper_effective_bound,
    pieces_along,
    pieces_along_curve,
    spherical_length,
)
from tieline.tropical.patches import grid_of, pieces_on_patch
from tieline.tropical.polynomials import TropicalPolynomial, symmetric_polynomial
from tieline.tropical.presets import PRESETS, LayerShape
from tieline.tropical.rational_form import TropicalRational, rational_form
from tieline.tropical.regions import count_regions
from tieline.tropical.score_rounding import gaussian_rounding_flips
from tieline.tropical.semiring import elementary_symmetric
from tieline.tropical.slices import plane_through, slice_layer, slice_router
from tieline.tropical.voronoi import expected_voronoi_cells, k_sets, voronoi_cells
from tieline.tropical.zonotope import zonotope_counts

__all__ = [
    "PRESETS",
    "Cells",
    "Count",
    "DegenerateError",
    "LayerShape",
    "Regions",
    "TropicalPolynomial",
    "TropicalRational",
    "advise",
    "attainability",
    "ball_meets_tie",
    "cap_constant",
    "cap_fraction",
    "capacity_bound",
    "cell_bound",
    "cells",
    "centring",
    "centring_of_layer",
    "count_cells",
    "count_cells_rational",
    "count_regions",
    "count_regions_rational",
    "crossings",
    "elementary_symmetric",
    "expected_cells",
    "expected_kinks",
    "expected_regions",
    "expected_switches",
    "expected_voronoi_cells",
    "gaussian_rounding_flips",
    "grid_of",
    "group_coalitions",
    "k_sets",
    "log_expected_cells",
    "log_expected_regions",
    "paper_capacities",
    "paper_effective_bound",
    "pieces_along",
    "pieces_along_curve",
    "pieces_on_patch",
    "plane_through",
    "pooled_block",
    "rational_form",
    "regions",
    "saturation",
    "sharp_bound",
    "slice_layer",
    "slice_router",
    "spherical_length",
    "symmetric_polynomial",
    "token_pairs",
    "voronoi_cells",
    "wall_density",
    "walls_in_ball",
    "zaslavsky",
    "zonotope_counts",
]
