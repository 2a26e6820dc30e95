"""The annotation checks agree with those of jaxtyping and are active in the package."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import beartype
import jaxtyping
import pytest
import torch
from jaxtyping import Float, Int, TypeCheckError
from torch import Tensor

from tests import axes
from tieline.core.statistics import mean_estimate
from tieline.lab.geometry.exit_time import FlipTimes, exit_bounds

ORIGINAL = partial(axes._by_jaxtyping, typechecker=beartype.beartype)
AXES, ROWS, BOX = torch.ones(2, 3), torch.ones(3, 4), torch.ones(5, 2, 3)


def product(a: Float[Tensor, "n m"], b: Float[Tensor, "m k"], out: int = 0) -> Float[Tensor, "n k"]:
    return (a @ b, (a @ b).T, (a @ b).long())[out]


def outer(x: Float[Tensor, "m n"], inner: object) -> Float[Tensor, "m k"]:
    return inner(x, ROWS)  # the same names with other sizes


def either(a: "Float[Tensor, ' n'] | None", rest: list[Int[Tensor, " n"]]) -> None:
    pass


def square(x: Float[Tensor, "n n"], pairs: Float[Tensor, "_ 2"]) -> None:
    pass


def triples(x: Float[Tensor, "n 3"] | Float[Tensor, "m n"], y: Float[Tensor, " n"]) -> None:
    pass


def scaled(x: Float[Tensor, "*n k"], y: Float[Tensor, "*n 1"], out: int = 0) -> Float[Tensor, "*n"]:
    return (x.sum(-1), x, x.sum(-1).flatten())[out]


def spread(x: Float[Tensor, "*#n"], y: Float[Tensor, "*#n"], z: Float[Tensor, "*n"]) -> None:
    pass


def last(x: Float[Tensor, "... k"], y: Float[Tensor, "k ..."]) -> None:
    pass


def counted(n: int, x: Float[Tensor, " {n}"]) -> int:
    return len(x)


def labelled(name: str, sizes: Sequence[int], answer: object = 1.0) -> float:
    return answer


def rows(x: Float[Tensor, "n m"], n: int) -> Iterator[Tensor]:
    yield from x[:n]


@dataclass(frozen=True)
class Pair:
    first: Float[Tensor, " n"]
    second: Float[Tensor, " n"]


class Holder:
    @classmethod
    def of(cls, n: int) -> "int":
        return n

    @staticmethod
    def at(n: int) -> int:
        return n

    @property
    def wrong(self) -> int:
        return "no"


def methods(check):
    return type(
        "Checked",
        (),
        {
            "of": check(vars(Holder)["of"]),
            "at": check(vars(Holder)["at"]),
            "wrong": check(vars(Holder)["wrong"]),
        },
    )


def pair(check):
    return check(dataclass(type("Pair", (), {"__annotations__": Pair.__annotations__})))


CALLS = {
    "good product": lambda check: check(product)(AXES, ROWS),
    "axes of two arguments": lambda check: check(product)(AXES, AXES),
    "axes of the result": lambda check: check(product)(AXES, ROWS, 1),
    "dtype of the result": lambda check: check(product)(AXES, ROWS, out=2),
    "dtype of an argument": lambda check: check(product)(AXES, ROWS.long()),
    "not a tensor": lambda check: check(product)(AXES, 3),
    "dimensions": lambda check: check(product)(AXES[0], ROWS),
    "plain type": lambda check: check(product)(AXES, ROWS, "one"),
    "good nothing": lambda check: check(either)(None, [torch.ones(2).long()]),
    "a list beside its axis": lambda check: check(either)(torch.ones(3), [torch.ones(2).long()]),
    "good square": lambda check: check(square)(AXES[:, :2], ROWS[:, :2]),
    "no square": lambda check: check(square)(AXES, ROWS[:, :2]),
    "a size": lambda check: check(square)(AXES[:, :2], ROWS),
    "good axis of the second choice": lambda check: check(triples)(ROWS[:2], ROWS[0]),
    "axis of the choice that failed": lambda check: check(triples)(ROWS[:2], ROWS[0, :2]),
    "good parameter": lambda check: check(square)(torch.nn.Parameter(ROWS[:2, :2]), ROWS[:, :2]),
    "parameter": lambda check: check(square)(torch.nn.Parameter(AXES), ROWS[:, :2]),
    "good axes of any number": lambda check: check(scaled)(BOX, BOX[..., :1]),
    "good axes of number 0": lambda check: check(scaled)(AXES[0], AXES[0, :1]),
    "no axis beside those": lambda check: check(scaled)(AXES[0, 0], AXES[0, :1]),
    "other axes of any number": lambda check: check(scaled)(BOX, AXES[:, :1]),
    "a size after those": lambda check: check(scaled)(BOX, BOX),
    "all axes returned": lambda check: check(scaled)(BOX, BOX[..., :1], 1),
    "another shape returned": lambda check: check(scaled)(BOX, BOX[..., :1], 2),
    "good parameter of any axes": lambda check: check(scaled)(
        torch.nn.Parameter(BOX), BOX[..., :1]
    ),
    "good axes to broadcast": lambda check: check(spread)(AXES, AXES[:1], AXES),
    "less than was broadcast": lambda check: check(spread)(AXES, AXES[:1], AXES[:1]),
    "good last and first axis": lambda check: check(last)(BOX, ROWS),
    "last axis without a name": lambda check: check(last)(BOX, AXES),
    "good count": lambda check: check(counted)(2, torch.ones(2)),
    "an axis from an argument": lambda check: check(counted)(3, torch.ones(2)),
    "good name": lambda check: check(labelled)("a", [1, 2]),
    "name": lambda check: check(labelled)(3, [1]),
    "sequence": lambda check: check(labelled)("a", [None]),
    "result": lambda check: check(labelled)("a", [1], "b"),
    "good rows": lambda check: list(check(rows)(AXES, 1)),
    "rows of nothing": lambda check: list(check(rows)(AXES[0], 1)),
    "good pair": lambda check: pair(check)(AXES[0], AXES[1]),
    "pair of two sizes": lambda check: pair(check)(AXES[0], AXES[:, 0]),
    "good class": lambda check: methods(check).of(3),
    "class": lambda check: methods(check).of("3"),
    "good static": lambda check: methods(check).at(3),
    "static": lambda check: methods(check).at("3"),
    "property": lambda check: methods(check)().wrong,
    "good call inside": lambda check: check(outer)(AXES, check(product)),
}


def refused(call, check):
    """Whether a call is refused; a second call must give the same answer."""
    checked, refusals = (lambda function: check(function)), []
    for _ in range(2):
        try:
            call(checked)
        except TypeCheckError:
            refusals.append(True)
        else:
            refusals.append(False)
    assert refusals[0] == refusals[1]
    return refusals[0]


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_refused_as_by_jaxtyping(name, monkeypatch):
    checker = partial(axes.jaxtyped, typechecker=beartype.beartype)
    was_refused = refused(CALLS[name], checker)
    hints = type(Float[Tensor, "n"])
    assert hints.__instancecheck__ is axes.is_array
    monkeypatch.setattr(hints, "__instancecheck__", axes._is_array_by_jaxtyping)
    assert was_refused == refused(CALLS[name], ORIGINAL)
    assert was_refused != name.startswith("good")


def test_names_of_axes_hold_for_one_call_only():
    checked = axes.jaxtyped(product, typechecker=beartype.beartype)
    assert checked(AXES, ROWS).shape == (2, 4)
    assert checked(ROWS, ROWS.T).shape == (3, 3)
    with pytest.raises(TypeCheckError, match="b="):
        checked(ROWS, ROWS)


def test_the_package_is_checked():
    assert jaxtyping.jaxtyped is axes.jaxtyped
    with pytest.raises(TypeCheckError):
        exit_bounds(torch.ones(2, 3).long(), torch.ones(2))
    with pytest.raises(TypeCheckError):
        mean_estimate([1.0])
    two, three = torch.ones(2), torch.ones(3)
    with pytest.raises(TypeCheckError):
        FlipTimes(two, *[torch.ones(4, 2)] * 3, torch.ones(4, 3), three, 1)


def test_the_check_can_be_turned_off(no_axis_checks):
    checked = axes.jaxtyped(product, typechecker=beartype.beartype)
    assert checked(AXES, ROWS, 2).dtype == torch.int64
