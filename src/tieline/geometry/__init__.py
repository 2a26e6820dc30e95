"""How near tokens are to a tie: masses, densities, orders, distances, volumes, diffusion.

boundary, gaussian           gaps and near-ties of scores; those of independent normal scores
distance, load               distance to the nearest tie, expert use
flips, rounding              how often noise and low precision change the choice
measures                     all of these for a trace or a summary
ties, tubes, slice_density   ties of affine routers, and the volume near them
diffusion, exit_time         when a random walk of the input changes the choice
structured                   the same with a drift, any covariance, and an adversary
occupation, walk             time near ties; the output of a layer across a tie
"""

from tieline.geometry.boundary import *  # noqa: F403  # noqa: F403
from tieline.geometry.diffusion import *  # noqa: F403
from tieline.geometry.exit_time import *  # noqa: F403
from tieline.geometry.gaussian import *  # noqa: F403
from tieline.geometry.occupation import *  # noqa: F403
from tieline.geometry.slice_density import *  # noqa: F403
from tieline.geometry.structured import *  # noqa: F403
from tieline.geometry.ties import *  # noqa: F403
from tieline.geometry.tubes import *  # noqa: F403
from tieline.geometry.walk import *  # noqa: F403
