"""The papers and their claims, and how claims are selected by name.

The `MODULES` of a paper's package name the files with its claims; a claim is a function under
`@claim(...)`, which adds a record to `CLAIMS`. `docs/ledger.md` shows how to add one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, update_wrapper
from importlib import import_module
from inspect import cleandoc
from typing import Any

from tieline.core.errors import ParameterError, require
from tieline.lab.claims.claim import Claim, Evidence, Real, Verdict

__all__ = ["CLAIMS", "PAPERS", "Paper", "all_claims", "claim", "select"]


@dataclass(frozen=True)
class Paper:
    """A paper of the ledger: its short name, title, and the package with its claims."""

    name: str
    title: str
    package: str


PAPERS: dict[int, Paper] = {
    0: Paper("boundary-mass", "Boundary mass and the soft-to-hard limit", "paper0"),
    1: Paper("discontinuities", "Discontinuities of sparse mixtures of experts", "paper1"),
    2: Paper("perturbed-cosine", "Perturbed cosine routers and their estimation", "paper2"),
    3: Paper("tropical", "Tropical geometry of mixtures of experts", "paper3"),
    4: Paper("sigmoid-attention", "Sigmoid against softmax attention as mixtures", "paper4"),
    5: Paper("beyond", "Beyond the papers", "beyond"),
}

CLAIMS: dict[str, Claim] = {}
"""Filled by importing the packages of the papers, which `all_claims` does."""

_FILES: dict[str, str] = {}
"""The module that registered each claim."""

NUMBERED = {"asm": "Assumption", "cor": "Cor.", "def": "Def.", "eq": "eq.", "ex": "Ex.",
            "fig": "Figure", "lem": "Lemma", "prop": "Prop.", "rem": "Rem.", "sec": "sec.",
            "table": "Table", "thm": "Thm"}  # fmt: skip
"""Titles of the numbered statements of a paper, by their names in ids."""


TEXTS = {
    "Setting": "setting",
    "Tested": "tested",
    "Overturned by": "overturned_by",
    "Condition": "condition",
    "Undecided": "undecided",
    "Untestable": "untestable",
}
"""Fields of a claim that its test's docstring gives, by the words that begin them."""

EXCEPTIONS = {
    "untestable": Verdict.UNTESTABLE,
    "undecided": Verdict.UNDECIDED,
    "condition": Verdict.CONDITION,
}
"""Expected verdicts of claims that have these fields."""


def claim(
    id: str,  # noqa: A002 - the field's name in the record
    title: str,
    *,
    number: str = "",
    expected: Verdict = Verdict.HOLDS,
    seconds: Real = 0.2,
    full_seconds: Real | None = None,
    together: str = "",
    given: Mapping[str, Any] | None = None,
    **texts: str,
) -> Callable[[Callable[..., Evidence]], Callable[..., Evidence]]:
    """Register the decorated function as the test of a claim; fields as in `Claim`.

    The number is read from the id ("p3-thm4.5" is Thm 4.5) unless it is given, and the texts from
    the function's docstring (`docstring_texts`) unless they are. A condition, or the reason why the
    claim is undecided or cannot be tested, is that of the expected verdict. One function may test
    several claims, each with the arguments `given`; the lowest of them is registered first.
    """
    numbered = re.match(r"p\d+-([a-z]+)([A-Z\d][^-]*)", id)
    if not number and numbered is not None and numbered[1] in NUMBERED:
        number = f"{NUMBERED[numbered[1]]} {numbered[2]}"

    def add(test: Callable[..., Evidence]) -> Callable[..., Evidence]:
        module = _FILES.setdefault(id, test.__module__)
        require(module == test.__module__, f"two claims are called {id!r}")
        fields: dict[str, Any] = docstring_texts(test.__doc__ or "") | texts
        CLAIMS[id] = Claim(
            id=id,
            paper=int(id[1 : id.index("-")]),
            number=number,
            title=title,
            expected=next((EXCEPTIONS[name] for name in EXCEPTIONS if name in fields), expected),
            test=update_wrapper(partial(test, **given), test) if given else test,
            seconds=seconds,
            full_seconds=full_seconds,
            together=together,
            **fields,
        )
        return test

    return add


def docstring_texts(docstring: str) -> dict[str, str]:
    """Return the texts of a claim by field: the statement, then those that `TEXTS` begin.

    Each begins a line; its further lines are indented.
    """
    pieces = re.split(rf"^({'|'.join(TEXTS)}): ", cleandoc(docstring), flags=re.MULTILINE)
    names = ["statement", *(TEXTS[heading] for heading in pieces[1::2])]
    return {
        name: re.sub(r"[ \n]+", " ", text).strip(" \n")
        for name, text in zip(names, pieces[::2], strict=True)
    }


def all_claims() -> dict[str, Claim]:
    """Return every claim by its id, in the order of the papers and of their files."""
    modules = []
    for paper in PAPERS.values():
        package = import_module(f"tieline.lab.claims.{paper.package}")
        modules += [f"{package.__name__}.{module}" for module in package.MODULES]
    for module in modules:
        import_module(module)
    # a module may have been imported, and its claims registered, before those of earlier papers
    return {
        name: CLAIMS[name] for name in sorted(CLAIMS, key=lambda name: modules.index(_FILES[name]))
    }


def select(names: Sequence[str]) -> list[Claim]:
    """Return the claims with these names: "all", papers by number or name, or ids."""
    claims, chosen = all_claims(), {}
    for name in names or ["all"]:
        matches = [claim for claim in claims.values() if name in _names(claim)]
        if not matches:
            papers = ", ".join(f"{number} ({paper.name})" for number, paper in PAPERS.items())
            raise ParameterError(
                f"no paper or claim is called {name!r}: papers are {papers}; --list shows claims"
            )
        chosen |= {claim.id: claim for claim in matches}
    return list(chosen.values())


def _names(claim: Claim) -> set[str]:
    paper = PAPERS[claim.paper]
    return {"all", claim.id, str(claim.paper), f"p{claim.paper}", paper.name, paper.package}
