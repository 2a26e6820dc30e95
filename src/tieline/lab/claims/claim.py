"""Claims of the papers, the verdicts that the evidence of their tests gives, and their registry.

A test compares numbers. Each comparison (`evidence.Check`) belongs to one of three parts:

    paper        the statement as the paper makes it, in all its generality
    condition    the statement under a condition that the paper does not state
    corrected    what is true instead, or in addition

    fewer than 90 % of the fits converged     undecided
    all of `paper` passes                     holds
    else, if it is open                       undecided
    else, all of `condition` passes           holds with a condition
    else, if that is open                     undecided
    else                                      does not hold

A check is open if it does not decide: its interval reaches across a limit, its standard error is
too large, or its quantity was not measured. A part is open if one of its checks is open and
none fails.

A claim that cannot be tested here states the reason and has that verdict; its checks then cover
what can be checked, such as the arithmetic of a table. Checks of `corrected` do not decide the
verdict, but they are our own statements: one that fails or is open marks the claim as changed.

The `MODULES` of a paper's package name the files with its claims; a claim is a function under
`@claim(...)`, which adds a record to `CLAIMS`. `docs/ledger.md` shows how to add one.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial, update_wrapper
from importlib import import_module
from inspect import cleandoc
from typing import Any

import torch
from torch import Tensor

from tieline.core.errors import ParameterError, require
from tieline.lab.claims.evidence import Evidence, Part, Real

__all__ = [
    "CLAIMS",
    "PAPERS",
    "Claim",
    "ClaimOutcome",
    "ClaimRun",
    "Paper",
    "Verdict",
    "all_claims",
    "claim",
    "select",
]


class Verdict(StrEnum):
    """Whether a statement holds."""

    HOLDS = "holds"
    CONDITION = "holds with a condition"
    FAILS = "does not hold"
    UNDECIDED = "undecided"
    UNTESTABLE = "not testable here"


@dataclass(frozen=True)
class ClaimRun:
    """Sample sizes and random numbers of a test.

    Attributes:
        fast: use smaller samples: seconds per claim, with larger standard errors.
        seed: of all random numbers.
    """

    fast: bool = False
    seed: int = 0

    @property
    def mode(self) -> str:
        """Name of the mode: "fast" or "full"."""
        return "fast" if self.fast else "full"

    def size(self, fast: int, full: int) -> int:
        """Return the number of samples of the mode."""
        return fast if self.fast else full

    def generator(self, stream: int = 0) -> torch.Generator:
        """Return an independent generator for each stream of a test."""
        return torch.Generator().manual_seed(1_000_003 * self.seed + stream)

    def normal(self, *shape: int, stream: int = 0) -> Tensor:
        """Draw standard normal numbers in float64."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator(stream))

    def uniform(self, *shape: int, stream: int = 9) -> Tensor:
        """Draw numbers uniformly on [-1, 1] in float64."""
        return 2 * torch.rand(*shape, dtype=torch.float64, generator=self.generator(stream)) - 1


FULL_OVER_FAST = 2.2
"""Duration of the full mode over that of the fast one, over all claims that train nothing."""


def _missing_test(run: ClaimRun) -> Evidence:
    """Test of a claim that was read from a file; raises."""
    raise NotImplementedError("this claim was read from a file, which holds no test")


@dataclass(frozen=True)
class Claim:
    """A statement of a paper.

    Attributes:
        id: `p<paper>-<kind><number>`, usable as a file name.
        paper: number of the paper.
        number: the statement's number in the paper.
        title: a few words.
        statement: the paper's sentence in our words.
        setting: the setting in which it is tested: exact or over-specified, sparse or dense, which
            loss, bound or equality, theorem or assumption, sizes.
        tested: how it is tested.
        overturned_by: what would change the verdict.
        expected: the verdict of the ledger; any other one is a change.
        condition: the condition under which it holds, if there is one.
        untestable: why it cannot be tested here and what would test it, if so.
        undecided: why the ledger does not decide it, if so.
        test: computes the evidence.
        seconds: approximate duration of the fast test; the longest tests start first.
        full_seconds: that of the full test; None for `FULL_OVER_FAST` times `seconds`.
        together: a name shared by claims that rest on one study; one process tests them.
    """

    id: str
    paper: int
    number: str
    title: str
    statement: str
    setting: str
    tested: str
    overturned_by: str
    expected: Verdict
    condition: str = ""
    untestable: str = ""
    undecided: str = ""
    test: Callable[[ClaimRun], Evidence] = field(
        default=_missing_test, repr=False, compare=False, metadata={"json": False}
    )
    seconds: Real = field(default=0.2, repr=False, compare=False, metadata={"json": False})
    full_seconds: Real | None = field(
        default=None, repr=False, compare=False, metadata={"json": False}
    )
    together: str = field(default="", repr=False, compare=False, metadata={"json": False})

    def duration(self, fast: bool) -> float:
        """Approximate seconds that the test takes in a mode, on one core."""
        full = FULL_OVER_FAST * self.seconds if self.full_seconds is None else self.full_seconds
        return float(self.seconds if fast else full)

    def judge(self, evidence: Evidence) -> tuple[Verdict, str]:
        """Return the verdict of the checks, and the reason if they do not decide."""
        if self.untestable:
            return Verdict.UNTESTABLE, ""
        if evidence.unfinished:
            return Verdict.UNDECIDED, evidence.unfinished
        verdicts: dict[Part, Verdict]
        verdicts = {"paper": Verdict.HOLDS, "condition": Verdict.CONDITION}
        for part, verdict in verdicts.items():
            if evidence.passed(part):
                return verdict, ""
            if evidence.open(part):
                return Verdict.UNDECIDED, evidence.open(part)
        return Verdict.FAILS, ""


@dataclass(frozen=True)
class ClaimOutcome:
    """The result of one claim.

    Attributes:
        claim: the claim.
        verdict: the verdict of its checks; None if the test raised an exception.
        changed: whether the verdict is not the expected one, or a check of ours failed.
        evidence: the evidence.
        reason: why the checks do not decide, if they do not.
        seconds: duration of the test.
        fast: the mode.
        seed: the seed.
        error: the exception, if there was one.
    """

    claim: Claim
    verdict: Verdict | None
    changed: bool
    evidence: Evidence = field(default_factory=lambda: Evidence(()))
    reason: str = ""
    seconds: float = 0.0
    fast: bool = False
    seed: int = 0
    error: str = ""

    @classmethod
    def of(cls, claim: Claim, evidence: Evidence, run: ClaimRun, seconds: float) -> "ClaimOutcome":
        """Judge the evidence."""
        require(bool(evidence.checks), f"{claim.id}: a test without a check cannot fail")
        verdict, reason = claim.judge(evidence)
        silent: tuple[Part, ...] = ("corrected", *_undeciding_parts(verdict))
        failed = any(evidence.passed(part) is False for part in silent)
        changed = verdict != claim.expected or failed
        return cls(claim, verdict, changed, evidence, reason, seconds, run.fast, run.seed)


def _undeciding_parts(verdict: Verdict) -> tuple[Part, ...]:
    """Parts that did not decide the verdict and must not fail."""
    if verdict is Verdict.UNTESTABLE:
        return ("paper", "condition")
    return ("condition",) if verdict is Verdict.HOLDS else ()


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
"""Claims by id, registered when the modules of the papers are imported (`all_claims`)."""

_MODULE_OF_CLAIM: dict[str, str] = {}
"""Module that registered each claim, by id."""

NUMBERED = {"asm": "Assumption", "cor": "Cor.", "def": "Def.", "eq": "eq.", "ex": "Ex.",
            "fig": "Figure", "lem": "Lemma", "prop": "Prop.", "rem": "Rem.", "sec": "sec.",
            "table": "Table", "thm": "Thm"}  # fmt: skip
"""Kinds of numbered statements of a paper, by their abbreviations in ids."""


TEXTS = {
    "Setting": "setting",
    "Tested": "tested",
    "Overturned by": "overturned_by",
    "Condition": "condition",
    "Undecided": "undecided",
    "Untestable": "untestable",
}
"""Fields of a claim read from its test's docstring, by their headings."""

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

    def register_test(test: Callable[..., Evidence]) -> Callable[..., Evidence]:
        module = _MODULE_OF_CLAIM.setdefault(id, test.__module__)
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

    return register_test


def docstring_texts(docstring: str) -> dict[str, str]:
    """Parse the texts of a claim by field: the statement, then those with a heading of `TEXTS`.

    A heading begins a line; further lines of a text are indented.
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
        name: CLAIMS[name]
        for name in sorted(CLAIMS, key=lambda name: modules.index(_MODULE_OF_CLAIM[name]))
    }


def select(names: Sequence[str]) -> list[Claim]:
    """Select claims by name: "all", papers by number or name, or ids."""
    claims, selection = all_claims(), {}
    for name in names or ["all"]:
        matches = [claim for claim in claims.values() if name in _claim_names(claim)]
        if not matches:
            papers = ", ".join(f"{number} ({paper.name})" for number, paper in PAPERS.items())
            raise ParameterError(
                f"no paper or claim is called {name!r}: papers are {papers}; --list shows claims"
            )
        selection |= {claim.id: claim for claim in matches}
    return list(selection.values())


def _claim_names(claim: Claim) -> set[str]:
    """Names by which `select` finds a claim."""
    paper = PAPERS[claim.paper]
    return {"all", claim.id, str(claim.paper), f"p{claim.paper}", paper.name, paper.package}
