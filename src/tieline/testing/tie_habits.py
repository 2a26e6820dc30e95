"""What a router does where no answer is right: at ties, at NaN, where everything is masked.

None of this is an error. Two programs with other habits choose other experts for the same logits,
which is what `tieline diff` then reports.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from tieline.core.ranking import stable_topk
from tieline.testing.conformance import Router, RouterAnswer, read_answer, router_keywords
from tieline.testing.logit_battery import LogitCase, logit_cases
from tieline.testing.reference_rules import RouterRule

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
        _share_with_nan(cases["one-nan"], with_nan),
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
    lower = higher = True
    for case, routed in answers:
        if routed is None:
            return "raises"
        chosen = routed.ids.sort(dim=1).values
        lower &= torch.equal(chosen, rule.choice(case.logits, case.k, case.bias).sort(dim=1).values)
        higher &= torch.equal(chosen, _higher_choice(rule, case).sort(dim=1).values)
    return "lower index" if lower else "higher index" if higher else "neither"


def _higher_choice(rule: RouterRule, case: LogitCase) -> Tensor:
    """The reference choice with the other tie rule: of equal scores the higher index."""
    last = case.logits.shape[1] - 1
    bias = None if case.bias is None else case.bias.flip(0)
    return last - rule.choice(case.logits.flip(1), case.k, bias)


def _has_same_bits(router: Router, rule: RouterRule, case: LogitCase) -> bool:
    """Whether every token alone gets the ids and weights that it has in the batch."""
    together = _router_answer(router, rule, case)
    for token in range(len(case.logits)):
        row = replace(case, logits=case.logits[token : token + 1])
        alone = _router_answer(router, rule, row)
        if together is None or alone is None:
            return False
        same = torch.equal(alone.ids[0], together.ids[token])
        if alone.weights is not None and together.weights is not None:
            same &= torch.equal(alone.weights[0], together.weights[token])
        if not same:
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


def _share_with_nan(case: LogitCase, routed: RouterAnswer | None) -> float:
    """Share of the tokens for which the expert with the NaN is chosen."""
    if routed is None:
        return 0.0
    where = case.logits.isnan().float().argmax(dim=1, keepdim=True)
    return float((routed.ids == where).any(dim=1).float().mean())
