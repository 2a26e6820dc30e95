"""Hugging Face models: family facts, capture, smooth routing, upcycling, a kernel for the experts.

Importing this registers the experts implementation "tieline" and the attention function
"tieline_sigmoid" with transformers.
"""

from tieline.lab.attention.in_models import attend_, register_attention
from tieline.lab.on_model.rerouted_model import Rerouting, reroute_, unreroute_
from tieline.lab.on_model.upcycled_model import Upcycling, upcycle_
from tieline.models.capture import Recorder, capture
from tieline.models.changes import load_pretrained
from tieline.models.families import (
    FAMILIES,
    GroupRule,
    RouterFamily,
    family_of,
    find_routers,
    register_family,
)
from tieline.models.family_table import TRANSFORMERS_FAMILIES
from tieline.models.kernel import register_kernel
from tieline.models.layouts import DenseLayout, Layout, ScoresLayout, SortedLayout, TupleLayout
from tieline.models.loading import load_smoothed
from tieline.models.smooth import LayerSmoothing, Smoothing, smooth_, unsmooth_
from tieline.models.support import support_table

__all__ = [
    "FAMILIES",
    "TRANSFORMERS_FAMILIES",
    "DenseLayout",
    "GroupRule",
    "LayerSmoothing",
    "Layout",
    "Recorder",
    "Rerouting",
    "RouterFamily",
    "ScoresLayout",
    "Smoothing",
    "SortedLayout",
    "TupleLayout",
    "Upcycling",
    "attend_",
    "capture",
    "family_of",
    "find_routers",
    "load_pretrained",
    "load_smoothed",
    "register_attention",
    "register_family",
    "register_kernel",
    "reroute_",
    "smooth_",
    "support_table",
    "unreroute_",
    "unsmooth_",
    "upcycle_",
]

register_attention()
register_kernel()
