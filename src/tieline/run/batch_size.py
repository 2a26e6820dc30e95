"""Halve the batch size of a job and begin anew when the memory of a device runs out."""

import gc
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch

from tieline.core.errors import TielineError
from tieline.core.setting_fields import Settings

FULL = ("out of memory", "can't allocate memory")
"""What torch's allocators say of a device that is full, beside `torch.OutOfMemoryError`."""

Job = TypeVar("Job", bound=Callable[..., Any])


class BatchSizeWarning(UserWarning):
    """A job ran with fewer sequences per forward pass than asked for, to fit into memory."""


def halves_batches(settings_class: type[Settings]) -> Callable[[Job], Job]:
    """Let a job halve `batch_size` and begin anew when memory runs out, with a warning.

    Jobs of several processes (`parallel`) and comparisons of two batch sizes (`batch_size_b`) raise
    instead: the other processes would wait, and the comparison would be another one.
    """

    def decorate(job: Job) -> Job:
        @wraps(job)
        def run_with_smaller_batches(*sources: Any, **arguments: Any) -> Any:
            """Run the job until its batches fit."""
            options = {name: arguments.pop(name, None) for name in ("settings", "progress")}
            settings: Any = settings_class.of(options["settings"], arguments)
            while True:
                problem = _result_or_problem(job, sources, settings, options["progress"])
                if not isinstance(problem, str):
                    return problem[0]
                settings = _with_half_batches(settings_class, settings, problem)

        return run_with_smaller_batches  # type: ignore[return-value]

    return decorate


def _result_or_problem(
    job: Callable[..., Any], sources: tuple[Any, ...], settings: Any, progress: Any
) -> str | tuple[Any]:
    """The result of the job in a tuple, or what a full device said; its frames are freed then."""
    on_host = torch.get_default_device().type == "cpu"  # where a mode would only cost time
    try:
        # jobs name the device of the model; all else is on the host
        with nullcontext() if on_host else torch.device("cpu"):
            return (job(*sources, settings=settings, progress=progress),)
    except RuntimeError as problem:
        if not is_out_of_memory(problem):
            raise
        return str(problem).partition("\n")[0]


def _with_half_batches(settings_class: type[Settings], settings: Any, problem: str) -> Any:
    """Settings with half of the sequences per pass; raises where that cannot be or must not."""
    fixed = settings.parallel or getattr(settings, "batch_size_b", None)
    if settings.batch_size == 1 or fixed:
        advice = "give a smaller batch_size" if fixed else "shorten sequence_length"
        raise TielineError(
            f"out of memory with {settings.batch_size} sequences per forward pass: {advice}, or "
            f"take a device with more memory ({problem})"
        )
    half = settings.batch_size // 2
    warnings.warn(
        f"out of memory with {settings.batch_size} sequences per forward pass: starting again with "
        f"{half}; batch_size={half} avoids the first attempt",
        BatchSizeWarning,
        stacklevel=3,
    )
    gc.collect()  # what the failed attempt holds in cycles; allocators empty their own cache
    return settings_class.of(settings, {"batch_size": half})


def is_out_of_memory(problem: BaseException) -> bool:
    """Return whether an error says that a device is full."""
    message = str(problem).lower()
    return isinstance(problem, torch.OutOfMemoryError) or any(text in message for text in FULL)
