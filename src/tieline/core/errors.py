"""The errors Tieline raises: one base class, few children, each message naming value and rule."""

__all__ = [
    "ParameterError",
    "ShapeError",
    "TielineError",
    "TraceError",
    "UnsupportedModelError",
    "require",
]


class TielineError(ValueError):
    """Base of every error that a caller can cause."""


class ParameterError(TielineError):
    """A constructor or function argument breaks its rule."""


class ShapeError(TielineError):
    """A tensor does not have the shape or dtype that the callee was built for."""


class TraceError(TielineError):
    """A routing trace, summary or imported file is malformed or cannot answer the question."""


class UnsupportedModelError(TielineError):
    """A model is no Mixture of Experts, or routes in a way that scores cannot describe."""


def require(condition: bool, message: str, error: type[TielineError] = ParameterError) -> None:
    """Raise `error(message)` unless `condition` holds."""
    if not condition:
        raise error(message)
