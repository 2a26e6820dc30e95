"""How near tokens are to a tie: masses, densities, orders, distances, volumes, diffusion.

measure.boundary, masses     gaps of scores, and the mass of tokens near a tie
gaussian                     near-ties of independent normal scores
ties, tubes                  ties of affine routers, and the volume near them
exit_time                    when a random walk of the input changes the choice
structured                   the same with a drift, any covariance, and an adversary
occupation, tie_crossing     time near ties; the output of a layer across a tie
"""

from tieline.lab.geometry.exit_time import *  # noqa: F403
from tieline.lab.geometry.gaussian import *  # noqa: F403
from tieline.lab.geometry.masses import *  # noqa: F403
from tieline.lab.geometry.occupation import *  # noqa: F403
from tieline.lab.geometry.structured import *  # noqa: F403
from tieline.lab.geometry.tie_crossing import *  # noqa: F403
from tieline.lab.geometry.ties import *  # noqa: F403
from tieline.lab.geometry.tubes import *  # noqa: F403
from tieline.measure.boundary import *  # noqa: F403
