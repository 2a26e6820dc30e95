"""Run a router over the battery and judge every answer.

A router is a function of logits (T, E) and k that returns ids (T, k), or ids and weights in either
order; integers are the ids. Where its rule has them it is given the keywords `bias` (E,), `groups`
and `k_groups`. For each case the first of these that holds is the verdict:

    raised                 it raised an error
    invalid form           it returned no integers (T, k), or weights of another shape
    invalid ids            some id is out of range, or an expert is named twice for a token
    wrong choice           an expert left out beats a chosen one by more than rounding can
    wrong weights          a weight of a chosen expert is off by more than rounding explains
    changed input          the logits were overwritten
    depends on the batch   a token alone gets other experts than among others
    conforms
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from tieline.core.errors import ParameterError, first_line, require
from tieline.core.ranking import sets_differ
from tieline.testing.logit_battery import SIZES, LogitCase, logit_cases
from tieline.testing.reference_rules import SINGLE, RouterRule

Router = Callable[..., Any]

Verdict = Literal[
    "conforms",
    "raised",
    "invalid form",
    "invalid ids",
    "wrong choice",
    "wrong weights",
    "changed input",
    "depends on the batch",
]


@dataclass(frozen=True)
class RouterAnswer:
    """What a router returned for T tokens: ids (T, k) and, if it gave them, weights (T, k)."""

    ids: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on one case.

    Attributes:
        case: name of the case.
        experts: E.
        k: number of experts to choose.
        verdict: what holds of the answer.
        reason: the first token that shows it, in words; empty if the case conforms.
        tokens: number of tokens.
        ties: tokens whose set of experts differs from the reference at a tie.
        weight_error: largest error of a weight over what rounding explains; None without weights.
    """

    case: str
    experts: int
    k: int
    verdict: Verdict
    reason: str
    tokens: int
    ties: int = 0
    weight_error: float | None = None

    @property
    def label(self) -> str:
        """Name and size in one word."""
        return f"{self.case}-E{self.experts}-k{self.k}"


@dataclass(frozen=True)
class Conformance:
    """What a router did on the battery.

    Attributes:
        rule: what it was meant to compute.
        cases: one verdict each.
    """

    rule: RouterRule
    cases: tuple[CaseVerdict, ...]

    @property
    def deviations(self) -> tuple[CaseVerdict, ...]:
        """Cases that do not conform."""
        return tuple(case for case in self.cases if case.verdict != "conforms")

    @property
    def conforms(self) -> bool:
        """Whether every case conforms."""
        return not self.deviations

    @property
    def explanation(self) -> str:
        """Every deviation on a line of its own."""
        total, ties = len(self.cases), sum(case.ties for case in self.cases)
        first = f"{total - len(self.deviations)} of {total} cases conform; {ties} tokens differ"
        lines = [f"{case.label}: {case.verdict}: {case.reason}" for case in self.deviations]
        return "\n".join([f"{first} from the reference at ties, which is allowed", *lines])


def check_router(
    router: Router,
    rule: RouterRule,
    sizes: Iterable[tuple[int, int]] = SIZES,
    **selected: Any,
) -> Conformance:
    """Run `router` over the battery of a rule.

    Args:
        router: function of logits and k, see above.
        rule: what it is meant to compute.
        sizes: numbers of experts and of chosen ones.
        selected: `names` and `seed` of `logit_cases`.
    """
    cases = list(logit_cases(rule, sizes, **selected))
    require(bool(cases), "the rule's groups serve none of the sizes: give other `sizes`")
    return Conformance(rule, tuple(check_case(router, rule, case) for case in cases))


def assert_router(
    router: Router, rule: RouterRule, sizes: Iterable[tuple[int, int]] = SIZES, **selected: Any
) -> Conformance:
    """Raise an `AssertionError` that lists every deviation; arguments as of `check_router`."""
    conformance = check_router(router, rule, sizes, **selected)
    if not conformance.conforms:
        raise AssertionError(conformance.explanation)
    return conformance


def check_case(router: Router, rule: RouterRule, case: LogitCase) -> CaseVerdict:
    """Return the verdict on one case."""
    given = case.logits.clone()
    try:
        answer = router(given, case.k, **router_keywords(rule, case))
    except Exception as problem:
        name = f"{type(problem).__name__}: {first_line(problem)}"
        return _case_verdict(case, "raised", name)
    routed = read_answer(answer, case)
    if isinstance(routed, str):
        return _case_verdict(case, "invalid form", routed)
    judged = judge_case(rule, case, routed)
    if judged.verdict != "conforms":
        return judged
    if not torch.equal(given.nan_to_num(nan=0.5), case.logits.nan_to_num(nan=0.5)):
        return replace(judged, verdict="changed input", reason="the logits were overwritten")
    return _judge_alone(router, rule, case, routed, judged)


def read_answer(answer: Any, case: LogitCase) -> RouterAnswer | str:
    """Return ids and weights of an answer, or why its form is wrong."""
    answers = tuple(answer) if isinstance(answer, tuple | list) else (answer,)
    if not all(isinstance(entry, Tensor) for entry in answers):
        return f"expected tensors, got {[type(entry).__name__ for entry in answers]}"
    integers = [entry for entry in answers if not entry.is_floating_point()]
    floats = [entry for entry in answers if entry.is_floating_point()]
    shape = (len(case.logits), case.k)
    if len(integers) != 1 or len(floats) > 1:
        return f"expected ids and at most one tensor of weights, got {len(answers)} tensors"
    for entry in (*integers, *floats):
        if tuple(entry.shape) != shape:
            return f"expected the shape {shape}, got {tuple(entry.shape)}"
    return RouterAnswer(integers[0].long().cpu(), floats[0].cpu() if floats else None)


def judge_case(rule: RouterRule, case: LogitCase, routed: RouterAnswer) -> CaseVerdict:
    """Return the verdict on ids and weights that were returned for a case."""
    members = _chosen_mask(routed.ids, case)
    outside = ((routed.ids < 0) | (routed.ids >= case.logits.shape[1])).any(dim=1)
    invalid = outside | (members.sum(dim=1) < case.k)
    if bool(invalid.any()):
        token = _first_token(invalid)
        chosen = f"token {token} chose {routed.ids[token].tolist()}"
        return _case_verdict(case, "invalid ids", chosen)
    if case.asks == "valid":
        return _case_verdict(case, "conforms", "")
    scores, band = rule.scores(case.logits, case.bias), rule.band(case.logits, case.k, case.bias)
    beyond = rule.regret(members, scores, band) > 2 * band
    if bool(beyond.any()):
        reason = _choice_reason(rule, case, routed, _first_token(beyond))
        return _case_verdict(case, "wrong choice", reason)
    reference = _chosen_mask(rule.choice(case.logits, case.k, case.bias), case)
    judged = replace(
        _case_verdict(case, "conforms", ""), ties=int(sets_differ(members, reference).sum())
    )
    return judged if routed.weights is None else _judge_weights(rule, case, routed, judged)


def _judge_weights(
    rule: RouterRule, case: LogitCase, routed: RouterAnswer, judged: CaseVerdict
) -> CaseVerdict:
    """The verdict with that on the weights, compared for the experts that were chosen."""
    assert routed.weights is not None
    weights, expected = routed.weights.double(), rule.weights(case.logits, routed.ids)
    allowed = rule.weight_tolerance(case.logits, routed.ids) * expected.abs()
    allowed = allowed + SINGLE.tiny * max(1.0, abs(rule.scale))
    error = (weights - expected).abs() / allowed
    error = error.nan_to_num(nan=torch.inf)
    error[rule.undetermined(case.logits, routed.ids)] = 0.0
    worst = float(error.max()) if error.numel() else 0.0
    judged = replace(judged, weight_error=worst)
    if worst <= 1:
        return judged
    token, slot = divmod(int(error.argmax()), case.k)
    reason = (
        f"token {token}, expert {int(routed.ids[token, slot])}: weight "
        f"{weights[token, slot].item():.9g} instead of {expected[token, slot].item():.9g}"
    )
    return replace(judged, verdict="wrong weights", reason=reason)


def _judge_alone(
    router: Router, rule: RouterRule, case: LogitCase, routed: RouterAnswer, judged: CaseVerdict
) -> CaseVerdict:
    """The verdict after one token of the case was routed alone."""
    if len(case.logits) < 2 or case.asks == "valid":
        return judged
    token = len(case.logits) // 2
    alone = replace(case, logits=case.logits[token : token + 1].clone())
    answer = read_answer(router(alone.logits, case.k, **router_keywords(rule, case)), alone)
    if isinstance(answer, str):
        return replace(judged, verdict="invalid form", reason=f"one token alone: {answer}")
    among = routed.ids[token].tolist()
    if sorted(answer.ids[0].tolist()) == sorted(among):
        return judged
    reason = f"token {token} alone: {answer.ids[0].tolist()}, in the batch {among}"
    return replace(judged, verdict="depends on the batch", reason=reason)


def router_keywords(rule: RouterRule, case: LogitCase) -> dict[str, Any]:
    """Keywords of the router that this rule has."""
    keywords: dict[str, Any] = {} if case.bias is None else {"bias": case.bias.clone()}
    if rule.groups:
        keywords |= {"groups": rule.groups, "k_groups": rule.k_groups}
    return keywords


def _chosen_mask(ids: Tensor, case: LogitCase) -> Tensor:
    """Chosen experts as booleans (T, E); ids out of range are moved inside."""
    inside = ids.long().clamp(0, case.logits.shape[1] - 1)
    return torch.zeros(case.logits.shape, dtype=torch.bool).scatter(1, inside, True)


def _choice_reason(rule: RouterRule, case: LogitCase, routed: RouterAnswer, token: int) -> str:
    """One token whose choice is wrong, with the scores beside the threshold."""
    scores = rule.scores(case.logits, case.bias)[token]
    best = rule.choice(case.logits[token : token + 1], case.k, case.bias)[0].tolist()
    chosen = routed.ids[token].tolist()
    extra = sorted(set(chosen) - set(best), key=lambda e: scores[e].item())
    missed = sorted(set(best) - set(chosen), key=lambda e: -scores[e].item())
    if not extra:
        return f"token {token} chose {chosen}"
    groups = ", by groups" if rule.groups else ""
    return (
        f"token {token} chose expert {extra[0]} (score {scores[extra[0]].item():.9g}) and left out "
        f"{missed[0]} ({scores[missed[0]].item():.9g}{groups})"
    )


def _first_token(mask: Tensor) -> int:
    """The first token of a mask."""
    return int(mask.nonzero()[0])


def _case_verdict(case: LogitCase, verdict: Verdict, reason: str) -> CaseVerdict:
    """A verdict on a case, without ties and weights."""
    tokens, experts = case.logits.shape
    return CaseVerdict(case.name, experts, case.k, verdict, reason, tokens)


def import_router(path: str) -> Router:
    """Import "package.module:function"; a function of a class or object may be dotted."""
    module, colon, name = path.partition(":")
    require(bool(colon and module and name), f"a router is package.module:function, got {path!r}")
    try:
        router = attrgetter(name)(import_module(module))
    except (ImportError, AttributeError) as problem:
        raise ParameterError(f"{path}: {first_line(problem)}") from problem
    require(callable(router), f"{path} is a {type(router).__name__}, not a function")
    return router
