"""A function that returns wrong numbers changes the verdict of the claim that rests on it."""

import sys

import pytest

from tests.papers.paper2.test_planted import PLANTED as PLANTED_2
from tests.papers.paper3.test_planted import PLANTED as PLANTED_3
from tests.papers.paper4.test_planted import PLANTED as PLANTED_4
from tests.papers.registry.plants import plant
from tests.papers.registry.test_claims_can_fail import PLANTED, RUN
from tests.papers.registry.test_rate_claims import CLAIMS as RATES
from tieline.papers.registry import all_claims
from tieline.papers.runner import run_claim

PLANTS = {
    "p0-asm3.4": ("exponent", "half as much again"),
    "p0-asm4.2": ("margin_tail", "half as much again"),
    "p0-asm4.3": ("exponent", "half as much again"),
    "p0-asm5.11": ("pupil", "nothing"),
    "p0-asm5.13": ("derivative_transfer", "one more"),
    "p0-asm5.14": ("two_cells", "one more"),
    "p0-cor4.4": ("math.hypot", "one more"),
    "p0-eq3.8": ("math.exp", "half as much again"),
    "p0-eq3.9": ("drawn_router", "nothing"),
    "p0-eq5.3": ("ambiguity_mass", "half as much again"),
    "p0-eq6.2": ("torch.sigmoid", "half as much again"),
    "p0-eq6.3": ("draws", "half as much again"),
    "p0-eq6.4": ("draws", "half as much again"),
    "p0-eq6.6": ("operator", "half as much again"),
    "p0-eq6.8": ("operator", "one more"),
    "p0-lem5.7": ("drawn_router", "nothing"),
    "p0-lem6.1": ("mean_estimate", "half as much again"),
    "p0-prop3.5": ("mean_estimate", "half as much again"),
    "p0-prop3.7": ("drawn_router", "nothing"),
    "p0-prop5.10": ("wall_variation", "one more"),
    "p0-prop6.3": ("alignment_rate", "half as much again"),
    "p0-rem3.2": ("torch.sigmoid", "half as much again"),
    "p0-rem3.3": ("ambiguity_mass", "half as much again"),
    "p0-sec2-pair": ("pair_gap", "half as much again"),
    "p0-thm4.7": ("gamma_convergence", "one more"),
    "p0-thm5.17-matching": ("pupil", "nothing"),
    "p0-thm5.17-recovery": ("_minimiser", "half as much again"),
    "p0-thm5.17-saddles": ("find_critical_points", "one more"),
    "p1-corA.12": ("exponent", "one more"),
    "p1-corA.23": ("face_exit", "the other sign"),
    "p1-corA.28": ("hits", "half as much again"),
    "p1-def4.1": ("gap", "one more"),
    "p1-def4.6": ("linf_distance", "half as much again"),
    "p1-fig1": ("layer_pair", "the other sign"),
    "p1-fig3": ("layer_pair", "the other sign"),
    "p1-lemA.16": ("slice_bounds", "one more"),
    "p1-lemA.27": ("annulus", "half as much again"),
    "p1-lemA.29": ("math.sqrt", "half as much again"),
    "p1-propA.13": ("tube_fraction", "half as much again"),
    "p1-propA.14": ("exponent", "half as much again"),
    "p1-propA.15": ("tube_fraction", "one more"),
    "p1-propA.2": ("router", "nothing"),
    "p1-propA.3": ("router", "nothing"),
    "p1-propA.6": ("sampled_slice_density", "the other sign"),
    "p1-propA.7": ("layer_pair", "the other sign"),
    "p1-table8": ("gain_in_errors", "half as much again"),
    "p1-thm4.4": ("extrapolated", "half as much again"),
    "p1-thm4.7": ("extrapolated", "half as much again"),
    "p1-thm5.3": ("_near_ties", "one more"),
    "p1-thmA.19": ("band_ratio", "half as much again"),
    "p1-thmA.22": ("drawn_cell", "half as much again"),
    "p2-def1": ("dependent", "half as much again"),
    "p2-eq5": ("voronoi_loss", "the other sign"),
    "p2-sec4": ("population_minimiser", "one more"),
    "p2-thm5": ("largest_gap", "one more"),
    "p3-asm4.22": ("curve", "half as much again"),
    "p3-def3.5": ("np.where", "half as much again"),
    "p3-def4.8": ("position_failures", "half as much again"),
    "p3-def5.8": ("mixture", "half as much again"),
    "p3-ex4.6": ("np.linalg.solve", "half as much again"),
    "p3-prop4.10": ("dense_regions", "half as much again"),
    "p3-rem4.15": ("np.cos", "one more"),
    "p3-rem4.20": ("sharp_bound", "half as much again"),
    "p3-rem4.25": ("np.eye", "one more"),
    "p3-rem4.7": ("np.exp", "nothing"),
    "p3-table1": ("paper_capacities", "half as much again"),
    "p3-thm4.14": ("math.sqrt", "the other sign"),
    "p3-thm4.5-supports": ("bent_supports", "half as much again"),
    "p4-def1": ("strong_counts", "half as much again"),
    "p4-def3": ("strong_counts", "nothing"),
    "p4-eq11": ("example", "half as much again"),
    "p4-eq52": ("example", "half as much again"),
    "p4-eq53": ("example", "half as much again"),
    "p4-prop5": ("without_row", "one more"),
    "p4-thm5": ("largest_gap", "one more"),
}
"""By claim a function in the namespace of its module, and what is done to its numbers."""
ELSEWHERE = {*PLANTED, *PLANTED_2, *PLANTED_3, *PLANTED_4, *RATES, "p4-table1-heads"}
"""Claims whose plants are in other tests."""
NONE_YET = {"p1-thm4.2", "p1-thm5.1", "p1-thmA.30", "p1-fig4", "p1-fig5", "p1-fig6-7",
            "p3-def3.1", "p3-cor4.29", "p4-prop3"}  # fmt: skip
"""Claims for which no plant was found yet."""


def test_every_claim_that_is_tested_has_a_plant_or_is_named():
    tested = {name for name, claim in all_claims().items() if not claim.untestable}
    papers = {name for name in tested if not name.startswith("p5-")}
    assert papers - {*PLANTS} - ELSEWHERE == NONE_YET


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_altered_numbers_change_the_verdict(name, monkeypatch, no_axis_checks):
    claim = all_claims()[name]
    place, alteration = PLANTS[name]
    *path, last = place.split(".")
    owner = sys.modules[claim.test.__module__]
    for step in path:
        owner = getattr(owner, step)
    plant(owner, last, alteration, monkeypatch)
    spoiled = run_claim(claim, RUN)
    assert spoiled.error == ""
    assert spoiled.changed
