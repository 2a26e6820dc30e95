"""Conformance of routing kernels: the battery of logits, the verdict on each, habits at ties.

A router is a function of logits (T, E) and k that returns ids (T, k), or ids and weights in either
order; integers are the ids. Where its rule has them it is given the keywords `bias` (E,), `groups`
and `k_groups`.

A case asks one of two things. "defined": the choice and the weights follow from the rule, up to
ties and rounding. "valid": no choice is right (NaN, all experts masked), but the ids must be k
different experts, since an index out of range reads foreign memory. For each case the first of
these that holds is the verdict:

    raised                 it raised an error
    invalid form           it returned no integers (T, k), or weights of another shape
    invalid ids            some id is out of range, or an expert is named twice for a token
    wrong choice           an expert left out beats a chosen one by more than rounding can
    wrong weights          a weight of a chosen expert is off by more than rounding explains
    changed input          the logits were overwritten
    depends on the batch   a token alone gets other experts than among others
    conforms

Habits are what a router does where no answer is right: at ties, at NaN, where everything is masked.
They are no errors. Two programs with other habits choose other experts for the same logits, which
is what `tieline diff` then reports.
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
from tieline.testing.reference_rules import SINGLE, RouterRule

SIZES = (
    *((2, 1), (2, 2), (3, 2), (8, 2), (8, 8), (16, 1), (16, 4)),
    *((60, 4), (64, 8), (128, 8), (256, 8), (384, 6), (512, 10)),
)
"""Numbers of experts and of chosen ones, k = E among them."""

ROWS = 48
"""Tokens of a case."""

MANY_ROWS = 100_000
MANY_SIZE = (64, 8)
"""The size on which the case of many rows runs."""


@dataclass(frozen=True)
class LogitCase:
    """Logits to route.

    Attributes:
        name: what is odd about them.
        logits: (T, E) in float32.
        k: number of experts to choose.
        bias: (E,), where the rule has one.
        asks: "defined" if the rule determines choice and weights, "valid" if ids alone can be asked
            for.
    """

    name: str
    logits: Float[Tensor, "tokens experts"]
    k: int
    bias: Float[Tensor, " experts"] | None = None
    asks: Literal["defined", "valid"] = "defined"

    @property
    def label(self) -> str:
        """Name and size in one word, as pytest shows it."""
        return f"{self.name}-E{self.logits.shape[1]}-k{self.k}"


Draw = Callable[[int, int, int, torch.Generator], Tensor]
"""Logits of T tokens and E experts for a k, from a source of random numbers."""


def _normal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Independent N(0, 1) logits."""
    return torch.randn(tokens, experts, generator=draw, device=draw.device)


def _near_overflow_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Between 2·10³⁸ and 3·10³⁸, of both signs."""
    signs = torch.randint(0, 2, (tokens, experts), generator=draw, device=draw.device) * 2 - 1
    return signs * (torch.rand(tokens, experts, generator=draw, device=draw.device) + 2) * 1e38


def _equal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """All scores of a token equal: zero, positive or negative."""
    levels = torch.tensor([0.0, 3.7, -11.25], device=draw.device).repeat(tokens // 3 + 1)[:tokens]
    return levels[:, None].expand(tokens, experts).clone()


def _nearly_equal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """1 plus a few units in the last place."""
    steps = torch.randint(0, 4 * experts, (tokens, experts), generator=draw, device=draw.device)
    return 1 + steps * torch.finfo(torch.float32).eps


def _coarse_grid_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Quarters, so that most tokens tie."""
    return (4 * _normal_logits(tokens, experts, k, draw)).round() / 4


def _signed_zeros_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Zeros of both signs, a third of them replaced by numbers."""
    signs = torch.randint(0, 2, (tokens, experts), generator=draw, device=draw.device) * 2.0 - 1
    numbers = torch.rand(tokens, experts, generator=draw, device=draw.device) < 1 / 3
    return torch.where(numbers, _normal_logits(tokens, experts, k, draw), signs * 0.0)


def _tied_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Half of the tokens with a tie of two experts, or of four, across the threshold."""
    seed = int(torch.randint(0, 2**31, (), generator=draw, device=draw.device))
    if k == experts:
        return _coarse_grid_logits(tokens, experts, k, draw)
    halves = [
        tie_heavy_scores(tokens - tokens // 2, experts, k, seed=seed).scores,
        tie_heavy_scores(tokens // 2, experts, k, order=min(3, experts - 1), seed=seed).scores,
    ]
    return torch.cat(halves)


def _spaced_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """No two scores nearer than a 512th, all within a range that softmax can hold."""
    seed = int(torch.randint(0, 2**31, (), generator=draw, device=draw.device))
    return tie_free_scores(tokens, experts, k, gap=2.0**-9, seed=seed).scores


def _masked_logits(scarce: bool) -> Draw:
    """Minus infinity for a random set of experts: k or more remain, or 1 to k - 1 if `scarce`."""

    def masked_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
        order = torch.rand(tokens, experts, generator=draw, device=draw.device).argsort(dim=1)
        least, end = (1, max(k, 2)) if scarce else (k, experts + 1)
        remaining = torch.randint(least, end, (tokens, 1), generator=draw, device=draw.device)
        return _normal_logits(tokens, experts, k, draw).masked_fill(order >= remaining, -torch.inf)

    return masked_logits


def _logits_with_value(value: float) -> Draw:
    """Normal logits with one entry of each token replaced."""

    def logits_with_value(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
        column = torch.randint(0, experts, (tokens, 1), generator=draw, device=draw.device)
        return _normal_logits(tokens, experts, k, draw).scatter(1, column, value)

    return logits_with_value


def _constant_logits(value: float) -> Draw:
    """One value for every expert."""
    return lambda tokens, experts, k, draw: torch.full((tokens, experts), value, device=draw.device)


@dataclass(frozen=True)
class _LogitPattern:
    """How the logits of a case are drawn, and what is asked of them."""

    draw: Draw
    asks: Literal["defined", "valid"] = "defined"
    tokens: int = ROWS


PATTERNS: dict[str, _LogitPattern] = {
    "normal": _LogitPattern(_normal_logits),
    "negative": _LogitPattern(lambda *sizes: _normal_logits(*sizes) - 50),
    "huge": _LogitPattern(lambda *sizes: 1e4 * _normal_logits(*sizes)),  # softmax underflows
    "near-overflow": _LogitPattern(_near_overflow_logits),
    "subnormal": _LogitPattern(lambda *sizes: 1e-40 * _normal_logits(*sizes)),
    "equal": _LogitPattern(_equal_logits),
    "nearly-equal": _LogitPattern(_nearly_equal_logits),
    "tied": _LogitPattern(_tied_logits),
    "spaced": _LogitPattern(_spaced_logits),
    "bf16-grid": _LogitPattern(lambda *sizes: _normal_logits(*sizes).bfloat16().float()),
    "coarse-grid": _LogitPattern(_coarse_grid_logits),
    "signed-zeros": _LogitPattern(_signed_zeros_logits),
    "masked": _LogitPattern(_masked_logits(scarce=False)),
    "too-few-left": _LogitPattern(_masked_logits(scarce=True)),
    "all-masked": _LogitPattern(_constant_logits(-torch.inf), asks="valid"),
    "plus-infinity": _LogitPattern(_logits_with_value(torch.inf), asks="valid"),
    "one-nan": _LogitPattern(_logits_with_value(torch.nan), asks="valid"),
    "all-nan": _LogitPattern(_constant_logits(torch.nan), asks="valid"),
    "no-rows": _LogitPattern(_normal_logits, tokens=0),
    "one-row": _LogitPattern(_normal_logits, tokens=1),
    "many-rows": _LogitPattern(_normal_logits, tokens=MANY_ROWS),
}
"""All cases by name."""


def logit_cases(
    rule: RouterRule,
    sizes: Iterable[tuple[int, int]] = SIZES,
    *,
    names: Iterable[str] = tuple(PATTERNS),
    seed: int = 0,
) -> Iterator[LogitCase]:
    """Yield the battery for a rule; sizes that its groups do not serve are left out.

    Args:
        rule: what the router is meant to compute.
        sizes: numbers of experts and of chosen ones.
        names: cases to draw; "many-rows" comes at one size only.
        seed: of the random numbers; each case has its own, whichever others are drawn.
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
    """The case of one name and size."""
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
    tolerance = rule.weight_tolerance(case.logits, routed.ids) * expected.abs()
    tolerance = tolerance + SINGLE.tiny * max(1.0, abs(rule.scale))
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
    """The verdict after one token of the case was routed alone."""
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
    """Keywords of the router that this rule has."""
    keywords: dict[str, Any] = {} if case.bias is None else {"bias": case.bias.clone()}
    if rule.groups:
        keywords |= {"groups": rule.groups, "k_groups": rule.k_groups}
    return keywords


def _chosen_mask(ids: Tensor, case: LogitCase) -> Tensor:
    """Chosen experts as booleans (T, E); ids out of range are moved inside."""
    inside = ids.long().clamp(0, case.logits.shape[1] - 1)
    return torch.zeros(case.logits.shape, dtype=torch.bool, device=case.logits.device).scatter(
        1, inside, True
    )


def _choice_reason(rule: RouterRule, case: LogitCase, routed: RouterAnswer, token: int) -> str:
    """One token whose choice is wrong, with the scores beside the threshold."""
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


def test_router(tieline_case: tuple[Router, RouterRule, LogitCase]) -> None:
    """The router conforms on this case: the test that `pytest --tieline-router` collects."""
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
"""Cases that habits are read from."""

TieHabit = Literal["lower index", "higher index", "neither", "raises"]
WeightHabit = Literal["finite", "zero", "NaN", "infinite", "none returned", "raises"]


@dataclass(frozen=True)
class RouterHabits:
    """The habits of a router on one size.

    Attributes:
        ties: which of equal scores it takes, over all tokens of "equal" and "coarse-grid".
        zeros: the same over "signed-zeros": with "neither" it may tell -0 from +0.
        same_bits: whether a token alone gets the weights that it has in the batch, to the bit.
        ordered: whether the chosen experts come in descending order of their scores.
        masked: weights where every expert has the logit minus infinity.
        infinite: weights where one logit is plus infinity.
        nan_chosen: share of the tokens with one NaN for which that expert is chosen.
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
        """The router's answer on the case of this name."""
        return _router_answer(router, rule, cases[name])

    ties = [(cases[name], answer_to(name)) for name in ("equal", "coarse-grid")]
    with_nan = answer_to("one-nan")
    return RouterHabits(
        _tie_habit(rule, ties),
        _tie_habit(rule, [(cases["signed-zeros"], answer_to("signed-zeros"))]),
        _has_same_bits(router, rule, cases["normal"]),
        _is_ordered(rule, cases["normal"], answer_to("normal")),
        _weight_habit(answer_to("all-masked")),
        _weight_habit(answer_to("plus-infinity")),
        0.0 if with_nan is None else _nan_choice_share(cases["one-nan"], with_nan),
        _weight_habit(with_nan),
    )


def _router_answer(router: Router, rule: RouterRule, case: LogitCase) -> RouterAnswer | None:
    """The router's answer on a case; None if it raised or returned another form."""
    try:
        answer = router(case.logits.clone(), case.k, **router_keywords(rule, case))
    except Exception:
        return None
    routed = read_answer(answer, case)
    return None if isinstance(routed, str) else routed


def _tie_habit(rule: RouterRule, answers: list[tuple[LogitCase, RouterAnswer | None]]) -> TieHabit:
    """Which of equal scores a router takes in all of these cases."""
    is_lower = is_higher = True
    for case, routed in answers:
        if routed is None:
            return "raises"
        chosen = routed.ids.sort(dim=1).values
        is_lower &= torch.equal(
            chosen, rule.choice(case.logits, case.k, case.bias).sort(dim=1).values
        )
        is_higher &= torch.equal(chosen, _higher_choice(rule, case).sort(dim=1).values)
    return "lower index" if is_lower else "higher index" if is_higher else "neither"


def _higher_choice(rule: RouterRule, case: LogitCase) -> Tensor:
    """The reference choice with the other tie rule: of equal scores the higher index."""
    last = case.logits.shape[1] - 1
    bias = None if case.bias is None else case.bias.flip(0)
    return last - rule.choice(case.logits.flip(1), case.k, bias)


def _has_same_bits(router: Router, rule: RouterRule, case: LogitCase) -> bool:
    """Whether every token alone gets the ids and weights that it has in the batch."""
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


def _is_ordered(rule: RouterRule, case: LogitCase, routed: RouterAnswer | None) -> bool:
    """Whether experts come in descending order of their selection scores."""
    if routed is None:
        return False
    scores = rule.scores(case.logits, case.bias).gather(1, routed.ids)
    return torch.equal(scores, stable_topk(scores, case.k).values)


def _weight_habit(routed: RouterAnswer | None) -> WeightHabit:
    """What the weights of a case are, the worst kind first."""
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
    """Share of the tokens for which the expert with the NaN is chosen."""
    column = case.logits.isnan().float().argmax(dim=1, keepdim=True)
    return float((routed.ids == column).any(dim=1).float().mean())
