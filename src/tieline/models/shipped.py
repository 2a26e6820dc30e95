"""The former names of `tieline.models.demo`, kept for programs that import them."""

from tieline.models.demo import DEMO_FOLDER as SHIPPED_FOLDER
from tieline.models.demo import demo_text as shipped_text
from tieline.models.demo import demo_training_log as shipped_training_log
from tieline.models.demo import load_demo_model as load_shipped_model
from tieline.models.demo import load_demo_tokenizer as load_shipped_tokenizer

__all__ = [
    "SHIPPED_FOLDER",
    "load_shipped_model",
    "load_shipped_tokenizer",
    "shipped_text",
    "shipped_training_log",
]
