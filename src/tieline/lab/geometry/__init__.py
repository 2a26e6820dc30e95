"""Distances of tokens from ties: masses, densities, orders, volumes, diffusion.

measure.boundary, masses    gaps of scores, mass of tokens near a tie, normal scores
ties                        ties of affine routers; the output of a layer across a tie
tubes                       the volume near them
exit_time                   when a random walk of the input changes the choice
perturbations               the same with a drift, any covariance, and an adversary
occupation                  time near ties
"""

from tieline.lab.geometry.exit_time import *  # noqa: F403
from tieline.lab.geometry.masses import *  # noqa: F403
from tieline.lab.geometry.occupation import *  # noqa: F403
from tieline.lab.geometry.perturbations import *  # noqa: F403
from tieline.lab.geometry.ties import *  # noqa: F403
from tieline.lab.geometry.tubes import *  # noqa: F403
from tieline.measure.boundary import *  # noqa: F403
