"""All tasks and recipes: importing this makes every one of them known.

A new kind of run is a module that registers its task and recipes, and a line in `MODULES`.
"""

from importlib import import_module

from tieline.training.recipes import RECIPES, recipe_config
from tieline.training.tasks import TASKS

__all__ = ["MODULES", "RECIPES", "TASKS", "recipe_config"]

MODULES = ["language", "recipes", "recipes_images", "recipes_sentences"]

for _module in MODULES:
    import_module(f"tieline.training.{_module}")
