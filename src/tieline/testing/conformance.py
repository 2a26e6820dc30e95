"""Conformance of routing kernels: the test cases, the verdict on each, and habits at ties.

A router is a function of logits (T, E) and k that returns ids (T, k), or ids and weights in either
order; integers are the ids. If its rule has them, it gets the keywords `bias` (E,), `groups` and
`k_groups`.

A case requires one of two things. "defined": the choice and the weights follow from the rule, up to
ties and rounding. "valid": no choice is right (NaN, all experts masked), but the ids must be k
different experts, since an index out of range reads foreign memory. The verdict on a case is the
first of these that applies:

    raised                 it raised an error
    invalid form           it returned no integers (T, k), or weights of another shape
    invalid ids            some id is out of range, or an expert is named twice for a token
    wrong choice           an expert left out beats a chosen one by more than rounding can
    wrong weights          a weight of a chosen expert is off by more than rounding explains
    changed input          the logits were overwritten
    depends on the batch   a token alone gets other experts than in the batch
    conforms

Habits are a router's behaviour where no answer is right: at ties, with NaN, with all experts
masked. They are not errors. Two programs with different habits choose different experts for the
same logits, which `tieline diff` then reports.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from operator import attrgetter
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.analysis.oracles import tie_free_scores, tie_heavy_scores
from tieline.core.errors import ParameterError, first_line, require
from tieline.core.ranking import sets_differ, stable_topk
from tieline.testing.reference_rules import FLOAT32, RouterRule

SIZES = (
    *((2, 1), (2, 2), (3, 2), (8, 2), (8, 8), (16, 1), (16, 4)),
    *((60, 4), (64, 8), (128, 8), (256, 8), (384, 6), (512, 10)),
)
"""Sizes (E, k) of the test cases, including k = E."""

ROWS = 48
"""Tokens of a case."""

MANY_ROWS = 100_000
MANY_SIZE = (64, 8)
"""Size (E, k) of the case with many rows."""


@dataclass(frozen=True)
class LogitCase:
    """A test case: logits to route.

    Attributes:
        name: name of the case.
        logits: (T, E) in float32.
        k: number of experts to choose.
        bias: (E,), if the rule has one.
        asks: "defined" if the rule determines choice and weights, "valid" if only the ids can be
            checked.
    """

    name: str
    logits: Float[Tensor, "tokens experts"]
    k: int
    bias: Float[Tensor, " experts"] | None = None
    asks: Literal["defined", "valid"] = "defined"

    @property
    def label(self) -> str:
        """Name and size in one word, as pytest prints it."""
        return f"{self.name}-E{self.logits.shape[1]}-k{self.k}"


DrawLogits = Callable[[int, int, int, torch.Generator], Tensor]
"""Function (T, E, k, generator) that draws logits (T, E)."""


def _normal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Draw independent N(0, 1) logits."""
    return torch.randn(tokens, experts, generator=draw, device=draw.device)


def _near_overflow_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Draw logits between 2·10³⁸ and 3·10³⁸, of both signs."""
    signs = torch.randint(0, 2, (tokens, experts), generator=draw, device=draw.device) * 2 - 1
    return signs * (torch.rand(tokens, experts, generator=draw, device=draw.device) + 2) * 1e38


def _equal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Return logits that are equal for all experts of a token: zero, positive or negative."""
    levels = torch.tensor([0.0, 3.7, -11.25], device=draw.device).repeat(tokens // 3 + 1)[:tokens]
    return levels[:, None].expand(tokens, experts).clone()


def _nearly_equal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Draw logits of 1 plus a few units in the last place."""
    steps = torch.randint(0, 4 * experts, (tokens, experts), generator=draw, device=draw.device)
    return 1 + steps * torch.finfo(torch.float32).eps


def _coarse_grid_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Draw multiples of 1/4, so that most tokens tie."""
    return (4 * _normal_logits(tokens, experts, k, draw)).round() / 4


def _signed_zeros_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Draw zeros of both signs, a third of them replaced by normal logits."""
    signs = torch.randint(0, 2, (tokens, experts), generator=draw, device=draw.device) * 2.0 - 1
    numbers = torch.rand(tokens, experts, generator=draw, device=draw.device) < 1 / 3
    return torch.where(numbers, _normal_logits(tokens, experts, k, draw), signs * 0.0)


def _tied_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Draw logits with a tie at the threshold, of two experts in one half, of four in the other."""
    seed = int(torch.randint(0, 2**31, (), generator=draw, device=draw.device))
    if k == experts:
        return _coarse_grid_logits(tokens, experts, k, draw)
    halves = [
        tie_heavy_scores(tokens - tokens // 2, experts, k, seed=seed).scores,
        tie_heavy_scores(tokens // 2, experts, k, order=min(3, experts - 1), seed=seed).scores,
    ]
    return torch.cat(halves)


def _spaced_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Draw logits at least 1/512 apart, within a range without underflow of softmax."""
    seed = int(torch.randint(0, 2**31, (), generator=draw, device=draw.device))
    return tie_free_scores(tokens, experts, k, gap=2.0**-9, seed=seed).scores


def _masked_logits(scarce: bool) -> DrawLogits:
    """Mask random experts by minus infinity: k or more remain, or 1 to k - 1 if `scarce`."""

    def masked_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
        order = torch.rand(tokens, experts, generator=draw, device=draw.device).argsort(dim=1)
        least, end = (1, max(k, 2)) if scarce else (k, experts + 1)
        remaining = torch.randint(least, end, (tokens, 1), generator=draw, device=draw.device)
        return _normal_logits(tokens, experts, k, draw).masked_fill(order >= remaining, -torch.inf)

    return masked_logits


def _logits_with_value(value: float) -> DrawLogits:
    """Draw normal logits with one entry of each token replaced by a value."""

    def logits_with_value(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
        column = torch.randint(0, experts, (tokens, 1), generator=draw, device=draw.device)
        return _normal_logits(tokens, experts, k, draw).scatter(1, column, value)

    return logits_with_value


def _constant_logits(value: float) -> DrawLogits:
    """Return logits with one value for all experts."""
    return lambda tokens, experts, k, draw: torch.full((tokens, experts), value, device=draw.device)


@dataclass(frozen=True)
class _CasePattern:
    """How the logits of a case are drawn, what is checked, and the number of tokens."""

    draw: DrawLogits
    asks: Literal["defined", "valid"] = "defined"
    tokens: int = ROWS


PATTERNS: dict[str, _CasePattern] = {
    "normal": _CasePattern(_normal_logits),
    "negative": _CasePattern(lambda *sizes: _normal_logits(*sizes) - 50),
    "huge": _CasePattern(lambda *sizes: 1e4 * _normal_logits(*sizes)),  # softmax underflows
    "near-overflow": _CasePattern(_near_overflow_logits),
    "subnormal": _CasePattern(lambda *sizes: 1e-40 * _normal_logits(*sizes)),
    "equal": _CasePattern(_equal_logits),
    "nearly-equal": _CasePattern(_nearly_equal_logits),
    "tied": _CasePattern(_tied_logits),
    "spaced": _CasePattern(_spaced_logits),
    "bf16-grid": _CasePattern(lambda *sizes: _normal_logits(*sizes).bfloat16().float()),
    "coarse-grid": _CasePattern(_coarse_grid_logits),
    "signed-zeros": _CasePattern(_signed_zeros_logits),
    "masked": _CasePattern(_masked_logits(scarce=False)),
    "too-few-left": _CasePattern(_masked_logits(scarce=True)),
    "all-masked": _CasePattern(_constant_logits(-torch.inf), asks="valid"),
    "plus-infinity": _CasePattern(_logits_with_value(torch.inf), asks="valid"),
    "one-nan": _CasePattern(_logits_with_value(torch.nan), asks="valid"),
    "all-nan": _CasePattern(_constant_logits(torch.nan), asks="valid"),
    "no-rows": _CasePattern(_normal_logits, tokens=0),
    "one-row": _CasePattern(_normal_logits, tokens=1),
    "many-rows": _CasePattern(_normal_logits, tokens=MANY_ROWS),
}
"""Patterns of all test cases by name."""


def logit_cases(
    rule: RouterRule,
    sizes: Iterable[tuple[int, int]] = SIZES,
    *,
    names: Iterable[str] = tuple(PATTERNS),
    seed: int = 0,
) -> Iterator[LogitCase]:
    """Yield the test cases for a rule; sizes that do not fit its groups are left out.

    Args:
        rule: the rule that the router should follow.
        sizes: numbers of experts and of chosen ones.
        names: names of the cases; "many-rows" has one size only.
        seed: seed of the random numbers; each case is drawn independently of the others.
    """
    sizes, names = tuple(sizes), tuple(names)
    unknown = sorted(set(names) - set(PATTERNS))
    require(not unknown, f"no cases are called {unknown}; there are {', '.join(PATTERNS)}")
    many = MANY_SIZE if MANY_SIZE in sizes and rule.serves(*MANY_SIZE) else None
    for experts, k in sizes:
        require(1 <= k <= experts, f"need 1 <= k <= experts, got {k=} of {experts}")
        for name in names if rule.serves(experts, k) else ():
            if name != "many-rows" or (experts, k) == (many or sizes[0]):
                yield _draw_case(rule, name, experts, k, seed)


def _draw_case(rule: RouterRule, name: str, experts: int, k: int, seed: int) -> LogitCase:
    """Draw the test case of one name and size."""
    pattern, order = PATTERNS[name], list(PATTERNS).index(name)
    draw = torch.Generator().manual_seed(seed + 1000 * order + 100_003 * experts + 7 * k)
    logits = pattern.draw(pattern.tokens, experts, k, draw)
    bias = torch.randn(experts, generator=draw, device=draw.device) / 4 if rule.bias else None
    return LogitCase(name, logits, k, bias, pattern.asks)


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
    """Ids (T, k) and weights (T, k), or None, that a router returned for T tokens."""

    ids: Tensor
    weights: Tensor | None


@dataclass(frozen=True)
class CaseVerdict:
    """The verdict on one case.

    Attributes:
        case: name of the case.
        experts: number E of experts.
        k: number of experts to choose.
        verdict: verdict on the router's answer.
        reason: explanation with the first token concerned; empty if the case conforms.
        tokens: number of tokens.
        ties: number of tokens whose set of experts differs from the reference at a tie.
        weight_error: largest ratio of a weight's error to its tolerance; None without weights.
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
    """The verdicts on a router for all test cases.

    Attributes:
        rule: the rule that the router should follow.
        cases: the verdict on each case.
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
        """A summary and a line for each deviation."""
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
    """Run a router on the test cases of a rule.

    Args:
        router: function of logits and k, see above.
        rule: the rule that it should follow.
        sizes: numbers of experts and of chosen ones.
        selected: `names` and `seed` of `logit_cases`.
    """
    cases = list(logit_cases(rule, sizes, **selected))
    require(bool(cases), "the rule's groups serve none of the sizes: give other `sizes`")
    return Conformance(rule, tuple(check_case(router, rule, case) for case in cases))


def assert_router(
    router: Router, rule: RouterRule, sizes: Iterable[tuple[int, int]] = SIZES, **selected: Any
) -> Conformance:
    """Raise an `AssertionError` with every deviation, if any; arguments as for `check_router`."""
    conformance = check_router(router, rule, sizes, **selected)
    if not conformance.conforms:
        raise AssertionError(conformance.explanation)
    return conformance


def check_case(router: Router, rule: RouterRule, case: LogitCase) -> CaseVerdict:
    """Run a router on one case and return the verdict."""
    logits = case.logits.clone()
    try:
        answer = router(logits, case.k, **router_keywords(rule, case))
    except Exception as problem:
        name = f"{type(problem).__name__}: {first_line(problem)}"
        return _case_verdict(case, "raised", name)
    routed = read_answer(answer, case)
    if isinstance(routed, str):
        return _case_verdict(case, "invalid form", routed)
    judged = judge_case(rule, case, routed)
    if judged.verdict != "conforms":
        return judged
    if not torch.equal(logits.nan_to_num(nan=0.5), case.logits.nan_to_num(nan=0.5)):
        return replace(judged, verdict="changed input", reason="the logits were overwritten")
    return _judge_alone(router, rule, case, routed, judged)


def read_answer(answer: Any, case: LogitCase) -> RouterAnswer | str:
    """Return ids and weights of a router's output, or the reason why its form is invalid."""
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
    """Return the verdict on the ids and weights of an answer to a case."""
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
        reason = _wrong_choice_reason(rule, case, routed, _first_token(beyond))
        return _case_verdict(case, "wrong choice", reason)
    reference = _chosen_mask(rule.choice(case.logits, case.k, case.bias), case)
    judged = replace(
        _case_verdict(case, "conforms", ""), ties=int(sets_differ(members, reference).sum())
    )
    return judged if routed.weights is None else _judge_weights(rule, case, routed, judged)


def _judge_weights(
    rule: RouterRule, case: LogitCase, routed: RouterAnswer, judged: CaseVerdict
) -> CaseVerdict:
    """Update a verdict by the errors of the weights of the chosen experts."""
    assert routed.weights is not None
    weights, expected = routed.weights.double(), rule.weights(case.logits, routed.ids)
    tolerance = rule.weight_tolerance(case.logits, routed.ids) * expected.abs()
    tolerance = tolerance + FLOAT32.tiny * max(1.0, abs(rule.scale))
    error = (weights - expected).abs() / tolerance
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
    """Update a verdict by routing one token of the case alone."""
    if len(case.logits) < 2 or case.asks == "valid":
        return judged
    token = len(case.logits) // 2
    single = replace(case, logits=case.logits[token : token + 1].clone())
    answer = read_answer(router(single.logits, case.k, **router_keywords(rule, case)), single)
    if isinstance(answer, str):
        return replace(judged, verdict="invalid form", reason=f"one token alone: {answer}")
    batch_ids = routed.ids[token].tolist()
    if sorted(answer.ids[0].tolist()) == sorted(batch_ids):
        return judged
    reason = f"token {token} alone: {answer.ids[0].tolist()}, in the batch {batch_ids}"
    return replace(judged, verdict="depends on the batch", reason=reason)


def router_keywords(rule: RouterRule, case: LogitCase) -> dict[str, Any]:
    """Return the keywords `bias`, `groups` and `k_groups` that a rule passes to the router."""
    keywords: dict[str, Any] = {} if case.bias is None else {"bias": case.bias.clone()}
    if rule.groups:
        keywords |= {"groups": rule.groups, "k_groups": rule.k_groups}
    return keywords


def _chosen_mask(ids: Tensor, case: LogitCase) -> Tensor:
    """Return the mask (T, E) of the chosen experts; ids out of range are clamped."""
    inside = ids.long().clamp(0, case.logits.shape[1] - 1)
    return torch.zeros(case.logits.shape, dtype=torch.bool, device=case.logits.device).scatter(
        1, inside, True
    )


def _wrong_choice_reason(
    rule: RouterRule, case: LogitCase, routed: RouterAnswer, token: int
) -> str:
    """Describe a token with a wrong choice, with the scores of a wrong and a missed expert."""
    scores = rule.scores(case.logits, case.bias)[token]
    best = rule.choice(case.logits[token : token + 1], case.k, case.bias)[0].tolist()
    ids = routed.ids[token].tolist()
    wrong_experts = sorted(set(ids) - set(best), key=lambda e: scores[e].item())
    missed_experts = sorted(set(best) - set(ids), key=lambda e: -scores[e].item())
    if not wrong_experts:
        return f"token {token} chose {ids}"
    wrong, missed = wrong_experts[0], missed_experts[0]
    groups = ", by groups" if rule.groups else ""
    return (
        f"token {token} chose expert {wrong} (score {scores[wrong].item():.9g}) and left out "
        f"{missed} ({scores[missed].item():.9g}{groups})"
    )


def _first_token(mask: Tensor) -> int:
    """Return the first token of a mask."""
    return int(mask.nonzero()[0])


def _case_verdict(case: LogitCase, verdict: Verdict, reason: str) -> CaseVerdict:
    """Return a verdict on a case, without ties and weight error."""
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


def test_router(tieline_case: tuple[Router, RouterRule, LogitCase]) -> None:
    """Assert that a router conforms on a case; `pytest --tieline-router` collects this test."""
    judged = check_case(*tieline_case)
    assert judged.verdict == "conforms", f"{judged.verdict}: {judged.reason}"


HABIT_CASES = (
    "normal",
    "equal",
    "coarse-grid",
    "signed-zeros",
    "all-masked",
    "plus-infinity",
    "one-nan",
)
"""Names of the cases from which habits are derived."""

TieHabit = Literal["lower index", "higher index", "neither", "raises"]
WeightHabit = Literal["finite", "zero", "NaN", "infinite", "none returned", "raises"]


@dataclass(frozen=True)
class RouterHabits:
    """The behaviour of a router for one size where no answer is right.

    Attributes:
        ties: which of equal scores it takes, over all tokens of "equal" and "coarse-grid".
        zeros: the same over "signed-zeros"; with "neither" it may distinguish -0 from +0.
        same_bits: whether a token alone gets bit by bit the weights that it has in the batch.
        ordered: whether the chosen experts are in descending order of their scores.
        masked: weights if every expert has the logit minus infinity.
        infinite: weights if one logit is plus infinity.
        nan_chosen: share of the tokens with one NaN that choose the expert with the NaN.
        nan: weights of tokens with one NaN.
    """

    ties: TieHabit
    zeros: TieHabit
    same_bits: bool
    ordered: bool
    masked: WeightHabit
    infinite: WeightHabit
    nan_chosen: float
    nan: WeightHabit


def router_habits(router: Router, rule: RouterRule, experts: int, k: int) -> RouterHabits:
    """Return the habits of a router that conforms on this size; k must be below `experts`."""
    cases = {
        case.name: case if case.bias is None else replace(case, bias=torch.zeros_like(case.bias))
        for case in logit_cases(rule, [(experts, k)], names=HABIT_CASES)
    }  # equal logits tie only under equal biases

    def answer_to(name: str) -> RouterAnswer | None:
        """Return the router's answer to the case of this name."""
        return _router_answer(router, rule, cases[name])

    ties = [(cases[name], answer_to(name)) for name in ("equal", "coarse-grid")]
    with_nan = answer_to("one-nan")
    return RouterHabits(
        _tie_habit(rule, ties),
        _tie_habit(rule, [(cases["signed-zeros"], answer_to("signed-zeros"))]),
        _has_same_bits(router, rule, cases["normal"]),
        _has_descending_scores(rule, cases["normal"], answer_to("normal")),
        _weight_habit(answer_to("all-masked")),
        _weight_habit(answer_to("plus-infinity")),
        0.0 if with_nan is None else _nan_choice_share(cases["one-nan"], with_nan),
        _weight_habit(with_nan),
    )


def _router_answer(router: Router, rule: RouterRule, case: LogitCase) -> RouterAnswer | None:
    """Return the router's answer to a case; None if it raised or its form is invalid."""
    try:
        answer = router(case.logits.clone(), case.k, **router_keywords(rule, case))
    except Exception:
        return None
    routed = read_answer(answer, case)
    return None if isinstance(routed, str) else routed


def _tie_habit(rule: RouterRule, answers: list[tuple[LogitCase, RouterAnswer | None]]) -> TieHabit:
    """Return which of equal scores a router takes in all of these cases."""
    is_lower = is_higher = True
    for case, routed in answers:
        if routed is None:
            return "raises"
        chosen = routed.ids.sort(dim=1).values
        is_lower &= torch.equal(
            chosen, rule.choice(case.logits, case.k, case.bias).sort(dim=1).values
        )
        is_higher &= torch.equal(chosen, _higher_index_choice(rule, case).sort(dim=1).values)
    return "lower index" if is_lower else "higher index" if is_higher else "neither"


def _higher_index_choice(rule: RouterRule, case: LogitCase) -> Tensor:
    """Return the reference choice with the higher index of equal scores."""
    last = case.logits.shape[1] - 1
    bias = None if case.bias is None else case.bias.flip(0)
    return last - rule.choice(case.logits.flip(1), case.k, bias)


def _has_same_bits(router: Router, rule: RouterRule, case: LogitCase) -> bool:
    """Return whether every token alone gets the ids and weights that it has in the batch."""
    batch_answer = _router_answer(router, rule, case)
    for token in range(len(case.logits)):
        row = replace(case, logits=case.logits[token : token + 1])
        single_answer = _router_answer(router, rule, row)
        if batch_answer is None or single_answer is None:
            return False
        is_same = torch.equal(single_answer.ids[0], batch_answer.ids[token])
        if single_answer.weights is not None and batch_answer.weights is not None:
            is_same &= torch.equal(single_answer.weights[0], batch_answer.weights[token])
        if not is_same:
            return False
    return True


def _has_descending_scores(rule: RouterRule, case: LogitCase, routed: RouterAnswer | None) -> bool:
    """Return whether experts are in descending order of their selection scores."""
    if routed is None:
        return False
    scores = rule.scores(case.logits, case.bias).gather(1, routed.ids)
    return torch.equal(scores, stable_topk(scores, case.k).values)


def _weight_habit(routed: RouterAnswer | None) -> WeightHabit:
    """Return the kind of a case's weights, the worst kind that occurs."""
    if routed is None:
        return "raises"
    if routed.weights is None:
        return "none returned"
    if bool(routed.weights.isnan().any()):
        return "NaN"
    if bool(routed.weights.isinf().any()):
        return "infinite"
    return "zero" if bool((routed.weights == 0).all()) else "finite"


def _nan_choice_share(case: LogitCase, routed: RouterAnswer) -> float:
    """Return the share of the tokens that choose the expert with the NaN."""
    column = case.logits.isnan().float().argmax(dim=1, keepdim=True)
    return float((routed.ids == column).any(dim=1).float().mean())
