"""The battery: logits on which routing kernels were seen to fail, each with what may be asked.

A case asks one of two things. "defined": the choice and the weights follow from the rule, up to
ties and rounding. "valid": no choice is right (NaN, all experts masked), but the ids must be k
different experts, since an index out of range reads foreign memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from tieline.analysis.oracles import tie_free_scores, tie_heavy_scores
from tieline.core.errors import require
from tieline.testing.reference_rules import RouterRule

SIZES = (
    (2, 1),
    (2, 2),
    (3, 2),
    (8, 2),
    (8, 8),
    (16, 1),
    (16, 4),
    (60, 4),
    (64, 8),
    (128, 8),
    (256, 8),
    (384, 6),
    (512, 10),
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
    return torch.randn(tokens, experts, generator=draw)


def _negative_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Normal logits around -50."""
    return _normal_logits(tokens, experts, k, draw) - 50


def _huge_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Logits whose softmax underflows except for one or two."""
    return 1e4 * _normal_logits(tokens, experts, k, draw)


def _near_overflow_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Between 2·10³⁸ and 3·10³⁸, of both signs."""
    signs = torch.randint(0, 2, (tokens, experts), generator=draw) * 2 - 1
    return signs * (torch.rand(tokens, experts, generator=draw) + 2) * 1e38


def _subnormal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Normal logits times 10⁻⁴⁰."""
    return 1e-40 * _normal_logits(tokens, experts, k, draw)


def _equal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """All scores of a token equal: zero, positive or negative."""
    levels = torch.tensor([0.0, 3.7, -11.25]).repeat(tokens // 3 + 1)[:tokens]
    return levels[:, None].expand(tokens, experts).clone()


def _nearly_equal_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """1 plus a few units in the last place."""
    steps = torch.randint(0, 4 * experts, (tokens, experts), generator=draw)
    return 1 + steps * torch.finfo(torch.float32).eps


def _bf16_grid_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Normal logits rounded to bfloat16."""
    return _normal_logits(tokens, experts, k, draw).bfloat16().float()


def _coarse_grid_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Quarters, so that most tokens tie."""
    return (4 * _normal_logits(tokens, experts, k, draw)).round() / 4


def _signed_zeros_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Zeros of both signs, a third of them replaced by numbers."""
    signs = torch.randint(0, 2, (tokens, experts), generator=draw) * 2.0 - 1
    numbers = torch.rand(tokens, experts, generator=draw) < 1 / 3
    return torch.where(numbers, _normal_logits(tokens, experts, k, draw), signs * 0.0)


def _tied_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Half of the tokens with a tie of two experts, or of four, across the threshold."""
    seed = int(torch.randint(0, 2**31, (), generator=draw))
    if k == experts:
        return _coarse_grid_logits(tokens, experts, k, draw)
    halves = [
        tie_heavy_scores(tokens - tokens // 2, experts, k, seed=seed).scores,
        tie_heavy_scores(tokens // 2, experts, k, order=min(3, experts - 1), seed=seed).scores,
    ]
    return torch.cat(halves)


def _spaced_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """No two scores nearer than a 512th, all within a range that softmax can hold."""
    seed = int(torch.randint(0, 2**31, (), generator=draw))
    return tie_free_scores(tokens, experts, k, gap=2.0**-9, seed=seed).scores


def _masked_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Minus infinity for a random set of experts, k or more left."""
    order = torch.rand(tokens, experts, generator=draw).argsort(dim=1)
    left = torch.randint(k, experts + 1, (tokens, 1), generator=draw)
    return _normal_logits(tokens, experts, k, draw).masked_fill(order >= left, -torch.inf)


def _too_few_left_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Minus infinity for all but 1 to k - 1 experts; for k = 1, all but one."""
    order = torch.rand(tokens, experts, generator=draw).argsort(dim=1)
    left = torch.randint(1, max(k, 2), (tokens, 1), generator=draw)
    return _normal_logits(tokens, experts, k, draw).masked_fill(order >= left, -torch.inf)


def _all_masked_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """Minus infinity for every expert."""
    return torch.full((tokens, experts), -torch.inf)


def _logits_with_one(value: float) -> Draw:
    """Normal logits with one entry of each token replaced."""

    def logits_with_value(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
        """Normal logits with the value at a random expert of each token."""
        where = torch.randint(0, experts, (tokens, 1), generator=draw)
        return _normal_logits(tokens, experts, k, draw).scatter(1, where, value)

    return logits_with_value


def _all_nan_logits(tokens: int, experts: int, k: int, draw: torch.Generator) -> Tensor:
    """NaN for every expert."""
    return torch.full((tokens, experts), torch.nan)


@dataclass(frozen=True)
class _LogitPattern:
    """How the logits of a case are drawn, and what is asked of them."""

    draw: Draw
    asks: Literal["defined", "valid"] = "defined"
    tokens: int = ROWS


PATTERNS: dict[str, _LogitPattern] = {
    "normal": _LogitPattern(_normal_logits),
    "negative": _LogitPattern(_negative_logits),
    "huge": _LogitPattern(_huge_logits),
    "near-overflow": _LogitPattern(_near_overflow_logits),
    "subnormal": _LogitPattern(_subnormal_logits),
    "equal": _LogitPattern(_equal_logits),
    "nearly-equal": _LogitPattern(_nearly_equal_logits),
    "tied": _LogitPattern(_tied_logits),
    "spaced": _LogitPattern(_spaced_logits),
    "bf16-grid": _LogitPattern(_bf16_grid_logits),
    "coarse-grid": _LogitPattern(_coarse_grid_logits),
    "signed-zeros": _LogitPattern(_signed_zeros_logits),
    "masked": _LogitPattern(_masked_logits),
    "too-few-left": _LogitPattern(_too_few_left_logits),
    "all-masked": _LogitPattern(_all_masked_logits, asks="valid"),
    "plus-infinity": _LogitPattern(_logits_with_one(torch.inf), asks="valid"),
    "one-nan": _LogitPattern(_logits_with_one(torch.nan), asks="valid"),
    "all-nan": _LogitPattern(_all_nan_logits, asks="valid"),
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
    bias = torch.randn(experts, generator=draw) / 4 if rule.bias else None
    return LogitCase(name, logits, k, bias, pattern.asks)
