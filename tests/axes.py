"""The run-time checks of annotations, made so that seven thousand tests can afford them.

The import hook of jaxtyping decorates every function of the package with `jaxtyped`, which compiles
four functions for each at import and checks the arguments twice at every call. The decorator here
makes the same check on the first call of a function, by one function of beartype: all arguments and
the result, with the names of axes held together over the call. Left to jaxtyping are generators,
whose bodies run after the call, annotations in quotes, which it reads when a function is defined,
and axes that are computed from an argument. Whether a tensor has the axes of an annotation is
decided here where they are names and sizes, as most are, and by jaxtyping elsewhere: by either, a
name means one size, and `*name` one shape.
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
TENSORS = (Tensor, torch.nn.Parameter)
"""Types whose shapes are read here; those of other tensors are read by jaxtyping."""

ANY_NUMBER = "..."
"""Axes of any number without a name."""

_by_beartype = beartype(conf=BeartypeConf(violation_type=jaxtyping.TypeCheckError))


def install(package):
    """Check the annotations of every function and data class of a package not yet imported."""
    jaxtyping.jaxtyped = jaxtyped
    _array_types._MetaAbstractArray.__instancecheck__ = is_array
    jaxtyping.install_import_hook(package, "beartype.beartype")


def jaxtyped(decorated=None, *, typechecker=None):
    """In place of `jaxtyping.jaxtyped`, for what its import hook decorates."""
    if decorated is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if inspect.isclass(decorated):
        return _data_class(decorated)
    if isinstance(decorated, (classmethod, staticmethod)):
        return type(decorated)(jaxtyped(decorated.__func__, typechecker=typechecker))
    return (
        _checked(decorated)
        if _as_usual(decorated)
        else _by_jaxtyping(decorated, typechecker=typechecker)
    )


def _data_class(cls):
    initialise = vars(cls).get("__init__")
    if dataclasses.is_dataclass(cls) and initialise and not hasattr(initialise, "__wrapped__"):
        cls.__init__ = jaxtyped(initialise, typechecker=beartype)
    return cls


def _as_usual(function):
    """Whether a function is checked here instead of being left to jaxtyping."""
    late = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)
    if not inspect.isfunction(function) or any(kind(function) for kind in late):
        return False
    annotations = list(_parts(list(function.__annotations__.values())))
    quoted = any(isinstance(annotation, (str, typing.ForwardRef)) for annotation in annotations)
    return not quoted and not any(
        "{" in annotation.dim_str for annotation in annotations if _has_axes(annotation)
    )


def _checked(function):
    check = has_axes = None

    @functools.wraps(function)
    def called(*args, **kwargs):
        nonlocal check, has_axes
        if jaxtyping.config.jaxtyping_disable:
            return function(*args, **kwargs)
        if check is None:
            check, has_axes = _by_beartype(function), _names_axes(function)
        if not has_axes:
            return check(*args, **kwargs)
        _storage.push_shape_memo({})  # equal names mean equal sizes within this call alone
        try:
            return check(*args, **kwargs)
        finally:
            _storage.pop_shape_memo()

    return called


def _names_axes(function):
    return any(map(_has_axes, _parts(list(function.__annotations__.values()))))


def is_array(hint, value):
    """Whether a value is an array of the type and axes of a hint, in place of `isinstance`."""
    axes = _simple_axes(hint)
    if axes is None:
        return _is_array_by_jaxtyping(hint, value)
    if type(value) not in TENSORS:
        return isinstance(value, Tensor) and _is_array_by_jaxtyping(hint, value)
    shape, (first, several, last) = value.shape, axes
    start, end = len(first), len(shape) - len(last)
    if (start > end if several else start != end) or not _has_type(hint, value.dtype):
        return False
    sizes, shapes, *_ = _storage.get_shape_memo()
    rest, others = tuple(shape[start:end]), shapes.get(several)
    if others is not None and (others[0] or others[1] != rest):
        return others[0] and _is_array_by_jaxtyping(hint, value)  # of `*#name`, to broadcast with
    added = {}
    for axis, size in zip((*first, *last), (*shape[:start], *shape[end:]), strict=True):
        if axis is None:
            continue
        expected = axis if type(axis) is int else sizes.get(axis)
        if expected is None:
            expected = added.setdefault(axis, size)
        if expected != size:
            return False
    sizes.update(added)
    if several and several != ANY_NUMBER:
        shapes[several] = False, rest
    return True


@functools.cache
def _simple_axes(hint):
    """The axes before those of any number (`*name`, `...`), their name or "", the axes after them.

    Of each axis the name, the size, or None for any size; None where jaxtyping has to read them.
    """
    if not isinstance(hint, type) or getattr(hint, "array_type", None) is not Tensor:
        return None
    groups, several = [[]], ""
    for axis in hint.dims:
        if axis is _array_types._anonymous_dim:
            groups[-1].append(None)
        elif axis is _array_types._anonymous_variadic_dim:
            several = ANY_NUMBER
            groups.append([])
        elif axis.broadcastable or getattr(axis, "treepath", False):
            return None
        elif type(axis) is _array_types._NamedDim:
            groups[-1].append(axis.name)
        elif type(axis) is _array_types._FixedDim:
            groups[-1].append(axis.size)
        elif type(axis) is _array_types._NamedVariadicDim:
            several = axis.name
            groups.append([])
        else:
            return None
    return tuple(groups[0]), several, tuple(groups[-1]) if several else ()


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
