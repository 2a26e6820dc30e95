"""Wrong values planted at the source: a function that a claim's test calls returns other numbers.

A plant names a function in the module of the test (`paper1.ties.stable_topk` is what the tests in
`paper1/ties.py` call by that name) and an alteration of every number that it returns. The check
stays as it is; what it measures is wrong.
"""

from dataclasses import fields, is_dataclass, replace

import numpy as np
import torch

from tieline.papers.claim import Check, Evidence

ALTERATIONS = {
    "half as much again": lambda value: value * 1.5,
    "one more": lambda value: value + 1,
    "the other sign": lambda value: -value,
    "nothing": lambda value: value * 0,
}


def altered(value, how):
    """The value with every number in it altered; checks and evidence are left alone."""
    if isinstance(value, bool | str | Check | Evidence) or value is None:
        return value
    if isinstance(value, int | float | np.number):
        return how(value)
    if isinstance(value, torch.Tensor):
        return how(value) if value.dtype != torch.bool else ~value
    if isinstance(value, np.ndarray):
        return how(value) if value.dtype != bool else ~value
    if isinstance(value, dict):
        return {key: altered(one, how) for key, one in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(altered(one, how) for one in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(altered(one, how) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        shown = [f.name for f in fields(value) if f.init]
        return replace(value, **{name: altered(getattr(value, name), how) for name in shown})
    return value


def plant(owner, name, alteration, monkeypatch):
    """Let a function of a module return altered numbers."""
    real, how = getattr(owner, name), ALTERATIONS[alteration]
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: altered(real(*args, **kwargs), how))
