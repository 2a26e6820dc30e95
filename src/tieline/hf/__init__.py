"""Hugging Face models: family facts, capture, smooth routing, upcycling, a kernel for the experts.

Importing this registers the experts implementation "tieline" and the attention function
"tieline_sigmoid" with transformers.
"""

from tieline.hf.attention import attend_, register_attention
from tieline.hf.capture import Recorder, capture
from tieline.hf.changes import load_pretrained
from tieline.hf.families import (
    FAMILIES,
    Groups,
    RouterFamily,
    family_of,
    find_routers,
    register_family,
)
from tieline.hf.family_table import TRANSFORMERS_FAMILIES
from tieline.hf.kernel import register_kernel
from tieline.hf.loading import load_smoothed
from tieline.hf.reroute import Rerouting, reroute_, unreroute_
from tieline.hf.smooth import LayerSmoothing, Smoothing, smooth_, unsmooth_
from tieline.hf.support import support_table
from tieline.hf.upcycle import Upcycling, upcycle_

__all__ = [
    "FAMILIES",
    "TRANSFORMERS_FAMILIES",
    "Groups",
    "LayerSmoothing",
    "Recorder",
    "Rerouting",
    "RouterFamily",
    "Smoothing",
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
