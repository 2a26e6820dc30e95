"""Routers, gates, experts, dispatch and the layer that composes them.

routers, gates               tokens → scores → weights
smooth_gates                 gates that are continuous at ties
dispatch                     the experts of non-zero weight, on the CPU and on accelerators
activations, buffer_pool     what experts apply between their maps, memory for their results
layer, losses, baselines     experts and layer, its auxiliary losses, layers to compare with
"""

from tieline.routing.activations import *  # noqa: F403
from tieline.routing.baselines import *  # noqa: F403
from tieline.routing.dispatch import *  # noqa: F403
from tieline.routing.gates import *  # noqa: F403
from tieline.routing.layer import *  # noqa: F403
from tieline.routing.losses import *  # noqa: F403
from tieline.routing.routers import *  # noqa: F403
from tieline.routing.smooth_gates import *  # noqa: F403
