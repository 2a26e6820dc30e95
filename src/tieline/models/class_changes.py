"""Change what one object does by its class: a subclass of its class, of the same name.

    wrapped_class     a subclass whose method returns something made of the original's output
    swapped_class     an object has another class inside a block
    restore_class     takes the last change back

Assigning `__class__` keeps parameters, state-dict keys, hooks, `isinstance` and every other
instance of the class.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def subclass(cls: type, name: str | None = None, **members: Any) -> type:
    """Make a subclass with these members, under the name of `cls` unless another is given."""
    same = {"__module__": cls.__module__, "__qualname__": cls.__qualname__} if name is None else {}
    return type(name or cls.__name__, (cls,), {"__module__": cls.__module__, **same, **members})


def wrapped_class(
    cls: type,
    method: str,
    after: Callable[[Any, Call, Any], Any],
    name: str | None = None,
    **members: Any,
) -> type:
    """Make a subclass whose `method` returns `after(self, call, output)` of the original output.

    Args:
        cls: the class.
        method: name of the method; its signature is kept.
        after: is given the object, its arguments and what the original method returned.
        name: name of the subclass; by default that of `cls`.
        members: further members of the subclass.
    """
    plain = getattr(cls, method)

    @functools.wraps(plain)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return after(self, (args, kwargs), plain(self, *args, **kwargs))

    return subclass(cls, name, **{method: wrapped}, **members)


@contextmanager
def swapped_class(thing: Any, cls: type) -> Iterator[None]:
    """Give an object another class inside the block."""
    before = type(thing)
    thing.__class__ = cls
    try:
        yield
    finally:
        thing.__class__ = before


def restore_class(thing: Any) -> None:
    """Give an object back the class that it had before its last subclass."""
    thing.__class__ = type(thing).__mro__[1]


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function that reads values from what `torch.compile` traces."""
    return cast(Callable[..., Any], torch.compiler.disable(function))
