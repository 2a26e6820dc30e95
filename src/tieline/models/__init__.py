"""Hugging Face models: family facts, capture, smooth routing, a kernel for the experts.

Importing this registers the experts implementation "tieline" with transformers.
"""

from tieline.models.capture import Recorder, capture
from tieline.models.experts import register_kernel
from tieline.models.families import (
    FAMILIES,
    GroupRule,
    RouterFamily,
    family_of,
    find_routers,
    register_family,
)
from tieline.models.family_table import TRANSFORMERS_FAMILIES
from tieline.models.model import load_smoothed
from tieline.models.router_output_layouts import (
    DenseLayout,
    Layout,
    ScoresLayout,
    SortedLayout,
    TupleLayout,
)
from tieline.models.saved_models import load_pretrained
from tieline.models.smoothed_model import LayerSmoothing, Smoothing, smooth_, unsmooth_

__all__ = [
    "FAMILIES",
    "TRANSFORMERS_FAMILIES",
    "DenseLayout",
    "GroupRule",
    "LayerSmoothing",
    "Layout",
    "Recorder",
    "RouterFamily",
    "ScoresLayout",
    "Smoothing",
    "SortedLayout",
    "TupleLayout",
    "capture",
    "family_of",
    "find_routers",
    "load_pretrained",
    "load_smoothed",
    "register_family",
    "register_kernel",
    "smooth_",
    "unsmooth_",
]

register_kernel()
