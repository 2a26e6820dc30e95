"""Routers, gates, experts, dispatch and the layer that composes them.

routers, gates               tokens → scores → weights
smooth, projected            gates that are continuous at ties
dispatch, grouped            the experts of non-zero weight (`buffers`: memory for them)
layer, losses, baselines     experts and layer, its auxiliary losses, layers to compare with
"""

from tieline.routing.baselines import *  # noqa: F403
from tieline.routing.dispatch import *  # noqa: F403
from tieline.routing.gates import *  # noqa: F403
from tieline.routing.layer import *  # noqa: F403
from tieline.routing.losses import *  # noqa: F403
from tieline.routing.projected import *  # noqa: F403
from tieline.routing.routers import *  # noqa: F403
from tieline.routing.smooth import *  # noqa: F403
