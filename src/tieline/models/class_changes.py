"""Change what one object does by its class: a subclass of its class, of the same name.

Assigning `__class__` keeps parameters, state-dict keys, hooks, `isinstance` and every other
instance of the class.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


def make_subclass(cls: type, name: str | None = None, **members: Any) -> type:
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
    original = getattr(cls, method)

    @functools.wraps(original)
    def wrapped_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return after(self, (args, kwargs), original(self, *args, **kwargs))

    return make_subclass(cls, name, **{method: wrapped_method}, **members)


@contextmanager
def swapped_class(thing: Any, cls: type) -> Iterator[None]:
    """Give an object another class inside the block."""
    original = type(thing)
    thing.__class__ = cls
    try:
        yield
    finally:
        thing.__class__ = original


def restore_class(thing: Any) -> None:
    """Give an object back the class that it had before its last subclass."""
    thing.__class__ = type(thing).__mro__[1]


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a function that reads values from what `torch.compile` traces."""
    return cast(Callable[..., Any], torch.compiler.disable(function))


class ClassRecipe(NamedTuple):
    """How a subclass is made: `maker(*arguments)`, classes among the arguments as recipes."""

    maker: Callable[..., type]
    arguments: tuple[Any, ...]

    def make_class(self) -> type:
        """Make the class, or return it if `maker` remembers it."""
        return self.maker(
            *(a.make_class() if isinstance(a, ClassRecipe) else a for a in self.arguments)
        )


RECIPE = "tieline_recipe"
"""Attribute of a class with its recipe."""


def pickled_by(cls: type, maker: Callable[..., type], *arguments: Any) -> type:
    """Let instances of `cls` be pickled, though no module holds it: `maker` makes it again.

    Args:
        cls: what `maker(*arguments)` returned.
        maker: a function of a module.
        arguments: of the function; a class among them may itself be one that was made.
    """
    recipes = [a.__dict__.get(RECIPE, a) if isinstance(a, type) else a for a in arguments]

    def reduce_by_recipe(self: Any, protocol: Any) -> tuple[Any, ...]:
        _, _, *state = super(cls, self).__reduce_ex__(protocol)
        return _instance_of, (getattr(cls, RECIPE),), *state

    setattr(cls, RECIPE, ClassRecipe(maker, tuple(recipes)))
    cls.__reduce_ex__ = reduce_by_recipe  # type: ignore[method-assign]
    return cls


def _instance_of(recipe: ClassRecipe) -> Any:
    """An instance without state of the class that a recipe makes."""
    cls: Any = recipe.make_class()
    return cls.__new__(cls)
