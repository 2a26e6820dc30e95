"""Soft against hard routing: risks, their limit as the temperature falls, and its landscape.

risk               soft and hard risks of any mixture, their decomposition and constants
two_cells          two affine experts under a Gaussian input, to twelve digits
temperature_limit  τ → 0: first order of L_τ - L_0, margin tail behind its bounds, Γ-convergence
wall_integrals     boundary mass and derivatives of the hard risk as integrals over a wall
recovery           errors of a student against its teacher
saddle             derivatives of L_τ and its critical points
continuity_cost    least cost of a continuous choice, and the cost of particular gates
symmetry_breaking  gradient descent from nearly equal experts
"""

from tieline.lab.limits.continuity_cost import *  # noqa: F403
from tieline.lab.limits.recovery import *  # noqa: F403
from tieline.lab.limits.risk import *  # noqa: F403
from tieline.lab.limits.saddle import *  # noqa: F403
from tieline.lab.limits.symmetry_breaking import *  # noqa: F403
from tieline.lab.limits.temperature_limit import *  # noqa: F403
from tieline.lab.limits.two_cells import *  # noqa: F403
from tieline.lab.limits.wall_integrals import *  # noqa: F403
