"""Hugging Face models: family facts and capture of their routing."""

from tieline.hf.capture import capture
from tieline.hf.discovery import find_routers
from tieline.hf.families import FAMILIES, Groups, RouterFamily, family_of, register_family
from tieline.hf.family_table import TRANSFORMERS_FAMILIES
from tieline.hf.recorder import Recorder
from tieline.hf.support import support_table

__all__ = [
    "FAMILIES",
    "TRANSFORMERS_FAMILIES",
    "Groups",
    "Recorder",
    "RouterFamily",
    "capture",
    "family_of",
    "find_routers",
    "register_family",
    "support_table",
]
