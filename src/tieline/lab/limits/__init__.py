"""Soft against hard routing: risks, their limit as the temperature falls, and its landscape.

risk               soft and hard risks of any mixture, their decomposition and constants
two_cells          two affine experts under a Gaussian input, to twelve digits
temperature_slope  the first order of L_τ - L_0 in τ, and the margin tail behind its bounds
surface_mass       boundary mass as a surface integral
gamma_limit        Γ-convergence of L_τ to L_0
recovery           how well a student recovers its teacher
shape_derivative   derivatives of the hard risk by the position of a wall
saddle             derivatives of L_τ and its critical points
continuity_cost    what making a choice continuous must cost, and what gates have of it
symmetry_breaking  how gradient descent breaks the symmetry of equal experts
"""

from tieline.lab.limits.continuity_cost import *  # noqa: F403
from tieline.lab.limits.gamma_limit import *  # noqa: F403
from tieline.lab.limits.recovery import *  # noqa: F403
from tieline.lab.limits.risk import *  # noqa: F403
from tieline.lab.limits.saddle import *  # noqa: F403
from tieline.lab.limits.shape_derivative import *  # noqa: F403
from tieline.lab.limits.surface_mass import *  # noqa: F403
from tieline.lab.limits.symmetry_breaking import *  # noqa: F403
from tieline.lab.limits.temperature_slope import *  # noqa: F403
from tieline.lab.limits.two_cells import *  # noqa: F403
