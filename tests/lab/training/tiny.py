"""Runs small enough for a test: seconds, on the text in the box."""

from tieline.lab.training.language_tasks import new_decoder
from tieline.lab.training.recipes import recipe_config


def tiny(gate="smoe", steps=6, **changes):
    """The smoke recipe of a gate, made smaller."""
    small = {"optim__steps": steps, "optim__batch": 4, "evaluate_items": 4, "log_every": 2}
    return recipe_config(f"demo-smoke-{gate}").replace(**(small | changes))


def tiny_decoder(gate):
    """Configuration of `tiny` and a new decoder."""
    config = tiny(gate)
    return config, new_decoder(config.model, config.gate)
