"""The run-time checks of annotations, made so that seven thousand tests can afford them.

The import hook of jaxtyping decorates every function of the package with `jaxtyped`, which compiles
four functions for each at import and checks the arguments twice at every call. The decorator here
makes the same check on the first call of a function, by one function of beartype: all arguments and
the result, with the names of axes held together over the call. Left to jaxtyping are generators,
whose bodies run after the call, annotations in quotes, which it reads when a function is defined,
and axes that are computed from an argument.
"""

import dataclasses
import functools
import inspect
import typing

import jaxtyping
from beartype import BeartypeConf, beartype

_by_jaxtyping = jaxtyping.jaxtyped
_by_beartype = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def install(package):
    """Check the annotations of every function and data class of a package not yet imported."""
    jaxtyping.jaxtyped = jaxtyped
    jaxtyping.install_import_hook(package, "beartype.beartype")


def jaxtyped(thing=None, *, typechecker=None):
    """In place of `jaxtyping.jaxtyped`, for what its import hook decorates."""
    if thing is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if inspect.isclass(thing):
        return _data_class(thing)
    if isinstance(thing, (classmethod, staticmethod)):
        return type(thing)(jaxtyped(thing.__func__, typechecker=typechecker))
    return _checked(thing) if _as_usual(thing) else _by_jaxtyping(thing, typechecker=typechecker)


def _data_class(cls):
    made = vars(cls).get("__init__")
    if dataclasses.is_dataclass(cls) and made and not hasattr(made, "__wrapped__"):
        cls.__init__ = jaxtyped(made, typechecker=beartype)
    return cls


def _as_usual(function):
    """Whether a function is none of those that are left to jaxtyping."""
    late = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if not inspect.isfunction(function) or any(kind(function) for kind in late):
        return False
    parts = list(_parts(list(function.__annotations__.values())))
    quoted = any(isinstance(part, (str, typing.ForwardRef)) for part in parts)
    return not quoted and not any("{" in part.dim_str for part in parts if _has_axes(part))


def _checked(function):
    check = None

    @functools.wraps(function)
    def called(*args, **kwargs):
        nonlocal check
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if check is None:
            check = _check(function)
        return check(*args, **kwargs)

    return called


def _check(function):
    check = _by_beartype(function)
    if not any(map(_has_axes, _parts(list(function.__annotations__.values())))):
        return check

    def called(*args, **kwargs):
        with _by_jaxtyping("context"):  # equal names mean equal sizes within this call alone
            return check(*args, **kwargs)

    return called


def _parts(hint):
    yield hint
    if typing.get_origin(hint) is not typing.Literal:
        for part in hint if isinstance(hint, list) else typing.get_args(hint):
            yield from _parts(part)


def _has_axes(hint):
    return inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
