"""The errors Tieline raises: one base class, few children, each message naming value and rule."""

from collections.abc import Iterator
from contextlib import contextmanager

from tieline.core.text import printable

LONGEST_MESSAGE = 1500
"""Bytes of a message: room for any sentence of ours, and for a part of what a file says."""


def shortened_message(message: str, most: int = LONGEST_MESSAGE) -> str:
    """Return a message that is safe to print: its middle left out if long, no control characters.

    Messages quote names and values from files, which anybody may have written.
    """
    ends = message if len(message) <= 2 * most else message[:most] + message[-most:]
    safe = printable(ends)
    data = safe.encode()
    if len(data) <= most:
        return safe
    first, last = data[: most // 2], data[-most // 2 :]
    return f"{first.decode(errors='ignore')} ... {last.decode(errors='ignore')}"


class TielineError(ValueError):
    """Base of every error that a caller can cause; its message is never long."""

    def __init__(self, message: object = "", *rest: object) -> None:
        super().__init__(shortened_message(str(message)), *rest)


class ParameterError(TielineError):
    """A constructor or function argument breaks its rule."""


class ShapeError(TielineError):
    """A tensor does not have the shape or dtype that the callee was built for."""


class TraceError(TielineError):
    """A routing trace, summary or imported file is malformed or cannot answer the question."""


class UnsupportedModelError(TielineError):
    """A model is no Mixture of Experts, or routes in a way that scores cannot describe."""


class NoLogitsError(UnsupportedModelError):
    """A model gives no logits for its tokens, where predictions are to be measured."""


class NoSpaceError(TielineError, OSError):
    """The disk that an output goes to is full."""


class PrecisionWarning(UserWarning):
    """A model computes in another precision than its weights are stored in, for speed."""


class StreamingWarning(UserWarning):
    """A model does not fit into memory and is read layer by layer."""


class UnusedTensorsWarning(UserWarning):
    """The files of a model hold tensors that the model of their configuration has no use for."""


def require(condition: bool, message: str, error: type[TielineError] = ParameterError) -> None:
    """Raise `error(message)` unless `condition` holds."""
    if not condition:
        raise error(message)


def is_panic(problem: BaseException) -> bool:
    """Return whether this is a panic of a library in Rust, which no `except Exception` catches."""
    return type(problem).__name__ == "PanicException"


def first_line(problem: BaseException) -> str:
    """Return the first line of an error's message that is not empty.

    A line that ends with a colon goes on with the next one; a lookup that failed says so.
    """
    if isinstance(problem, KeyError) and len(problem.args) == 1:
        return f"nothing is named {problem.args[0]!r:.200}"
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()] or [repr(problem)]
    more = lines[1:2] if lines[0].endswith(":") else []
    return " ".join([lines[0], *more])


@contextmanager
def naming_unparsable_file(name: object) -> Iterator[None]:
    """Turn whatever a parser raises into a `TraceError` that names the file."""
    try:
        yield
    except TraceError:
        raise
    except Exception as error:
        kind = type(error).__name__
        raise TraceError(f"{name}: cannot be read: {kind}: {str(error)[:200]}") from error


class RoutingWarning(UserWarning):
    """Warning about the routing of a model in training."""
