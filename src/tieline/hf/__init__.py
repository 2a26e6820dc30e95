"""Hugging Face models: family facts, capture of their routing, smooth routing."""

from tieline.hf.capture import capture
from tieline.hf.discovery import find_routers
from tieline.hf.families import FAMILIES, Groups, RouterFamily, family_of, register_family
from tieline.hf.family_table import TRANSFORMERS_FAMILIES
from tieline.hf.recorder import Recorder
from tieline.hf.smooth import smooth_, unsmooth_
from tieline.hf.smooth_loading import load_smoothed
from tieline.hf.smooth_records import LayerSmoothing, Smoothing
from tieline.hf.support import support_table

__all__ = [
    "FAMILIES",
    "TRANSFORMERS_FAMILIES",
    "Groups",
    "LayerSmoothing",
    "Recorder",
    "RouterFamily",
    "Smoothing",
    "capture",
    "family_of",
    "find_routers",
    "load_smoothed",
    "register_family",
    "smooth_",
    "support_table",
    "unsmooth_",
]
