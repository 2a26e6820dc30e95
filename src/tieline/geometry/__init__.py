"""How near tokens are to a tie: masses, densities, orders, distances, volumes, diffusion."""

from tieline.geometry.boundary import (
    Mass,
    ambiguity_mass,
    boundary_mass_pair,
    boundary_mass_top,
    in_band,
    linf_distance,
    pair_gap,
    top_gap,
)
from tieline.geometry.diffusion import (
    exit_curve,
    exit_orders,
    normalised_distances,
    sample_exits,
    top_k_cell,
)
from tieline.geometry.exit_time import (
    exit_bounds,
    face_exit,
    face_quantile,
    score_flip_times,
    trace_flip_times,
    two_face_exit,
)
from tieline.geometry.gaussian import (
    gaussian_budget_epsilon,
    gaussian_gap_density,
    gaussian_gap_mass,
    gaussian_near_ties,
    gaussian_order_shares,
    gaussian_pair_density,
)
from tieline.geometry.occupation import flat_occupation, occupation_bounds, sampled_occupation
from tieline.geometry.order import tie_order
from tieline.geometry.slice_density import (
    band_ratio,
    sampled_slice_density,
    slice_bounds,
    slice_density,
    tube_ratio,
)
from tieline.geometry.ties import (
    distance_to_tie,
    nearest_tie_point,
    tie_component,
    tie_flat,
    tie_sets,
)
from tieline.geometry.tubes import (
    ball_volume,
    gaussian_slab,
    sampled_tube,
    surface_density,
    tie_tube,
    tube_fraction,
    tube_leading_term,
)
from tieline.geometry.walk import difference_by_step, step_exponent, walk_across

__all__ = [
    "Mass",
    "ambiguity_mass",
    "ball_volume",
    "band_ratio",
    "boundary_mass_pair",
    "boundary_mass_top",
    "difference_by_step",
    "distance_to_tie",
    "exit_bounds",
    "exit_curve",
    "exit_orders",
    "face_exit",
    "face_quantile",
    "flat_occupation",
    "gaussian_budget_epsilon",
    "gaussian_gap_density",
    "gaussian_gap_mass",
    "gaussian_near_ties",
    "gaussian_order_shares",
    "gaussian_pair_density",
    "gaussian_slab",
    "in_band",
    "linf_distance",
    "nearest_tie_point",
    "normalised_distances",
    "occupation_bounds",
    "pair_gap",
    "sample_exits",
    "sampled_occupation",
    "sampled_slice_density",
    "sampled_tube",
    "score_flip_times",
    "slice_bounds",
    "slice_density",
    "step_exponent",
    "surface_density",
    "tie_component",
    "tie_flat",
    "tie_order",
    "tie_sets",
    "tie_tube",
    "top_gap",
    "top_k_cell",
    "trace_flip_times",
    "tube_fraction",
    "tube_leading_term",
    "tube_ratio",
    "two_face_exit",
    "walk_across",
]
