"""The run-time checks of annotations, made so that seven thousand tests can afford them.

The import hook of jaxtyping decorates every function of the package with `jaxtyped`, which compiles
four functions for each at import and checks the arguments twice at every call. The decorator here
makes the same check on the first call of a function, by one function of beartype: all arguments and
the result, with the names of axes held together over the call. Left to jaxtyping are generators,
whose bodies run after the call, annotations in quotes, which it reads when a function is defined,
and axes that are computed from an argument. Whether a tensor has the axes of an annotation is
decided here where they are single names and sizes, as most are, and by jaxtyping elsewhere.
"""

import dataclasses
import functools
import inspect
import typing

import jaxtyping
import torch
from beartype import BeartypeConf, beartype
from jaxtyping import _array_types, _storage
from torch import Tensor

_by_jaxtyping = jaxtyping.jaxtyped
_is_array_by_jaxtyping = _array_types._MetaAbstractArray.__instancecheck__
_by_beartype = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def install(package):
    """Check the annotations of every function and data class of a package not yet imported."""
    jaxtyping.jaxtyped = jaxtyped
    _array_types._MetaAbstractArray.__instancecheck__ = is_array
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
        _storage.push_shape_memo({})  # equal names mean equal sizes within this call alone
        try:
            return check(*args, **kwargs)
        finally:
            _storage.pop_shape_memo()

    return called


def is_array(hint, value):
    """Whether a value is an array of the type and axes of a hint, in place of `isinstance`."""
    axes = _single_axes(hint)
    if axes is None or type(value) is not Tensor:
        return _is_array_by_jaxtyping(hint, value)
    shape = value.shape
    if len(shape) != len(axes) or not _has_type(hint, value.dtype):
        return False
    sizes, added = _storage.get_shape_memo()[0], {}
    for axis, size in zip(axes, shape, strict=True):
        if axis is None:
            continue
        expected = axis if type(axis) is int else sizes.get(axis)
        if expected is None:
            expected = added.setdefault(axis, size)
        if expected != size:
            return False
    sizes.update(added)
    return True


@functools.cache
def _single_axes(hint):
    """Name, size or None (any size) of every axis; None where jaxtyping has to read them."""
    if not isinstance(hint, type) or getattr(hint, "array_type", None) is not Tensor:
        return None
    axes = []
    for axis in hint.dims:
        if type(axis) is _array_types._NamedDim and not (axis.broadcastable or axis.treepath):
            axes.append(axis.name)
        elif type(axis) is _array_types._FixedDim and not axis.broadcastable:
            axes.append(axis.size)
        elif axis is _array_types._anonymous_dim:
            axes.append(None)
        else:
            return None
    return tuple(axes)


@functools.cache
def _has_type(hint, dtype):
    """Whether tensors of this type and any axes are arrays of the hint's type, for jaxtyping."""
    return _is_array_by_jaxtyping(hint.dtype[Tensor, "..."], torch.empty(0, dtype=dtype))


def _parts(hint):
    yield hint
    if typing.get_origin(hint) is not typing.Literal:
        for part in hint if isinstance(hint, list) else typing.get_args(hint):
            yield from _parts(part)


def _has_axes(hint):
    return inspect.isclass(hint) and issubclass(hint, jaxtyping.AbstractArray)
