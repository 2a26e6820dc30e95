"""Does a second forward pass route as the first one did, and if not, why?

Activation checkpointing forgets what a forward pass computed and repeats it in the backward pass.
Where a token is at a tie the repetition may choose another expert; tensors then have other shapes
(`CheckpointError`), or, unnoticed, gradients belong to another function than the loss.

    way           what is compared with the first pass
    recompute     the repetition by `torch.utils.checkpoint`, in the backward pass
    split         the same rows in several smaller batches
    threads       another number of threads
    compiled      `torch.compile`

A verdict names the cause in the first layer where choices differ; later layers follow from it:

    identical                      the same choices and the same output, bit for bit
    exact tie                      other choices, at gaps that are exactly zero
    near-tie flip                  other choices, at gaps no wider than rounding of the scores
    differs, but not by routing    the same choices and another output, or other choices that
                                   rounding does not explain: random numbers, other inputs, a bug
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from tieline.audit.recompute_compare import Repetition, Run, compared, worst
from tieline.audit.recompute_runs import Inputs, checkpointed, compiled, other_threads, plain, split
from tieline.errors import require
from tieline.geometry.records import dataclass_dict

__all__ = ["WAYS", "RecomputeReport", "recompute_check"]

WAYS = ("recompute", "split", "threads", "compiled")
DEFAULT = ("recompute", "split", "threads")


@dataclass(frozen=True)
class RecomputeReport:
    """What the repetitions of a forward pass came to.

    Attributes:
        verdict: the worst of all repetitions: a flip before a tie before another output.
        explanation: that of the repetition, in words.
        repetitions: one record per way.
        layers: names of the routers, in order of depth.
        tokens: number of tokens of the batch.
        left_out: ways that the batch does not allow, with the reason.
    """

    verdict: str
    explanation: str
    repetitions: tuple[Repetition, ...]
    layers: tuple[str, ...]
    tokens: int
    left_out: dict[str, str]

    def to_dict(self) -> dict[str, object]:
        """JSON values."""
        return dataclass_dict(self)


def recompute_check(
    block_or_model: nn.Module,
    batch: Tensor | Mapping[str, Any] | tuple[Any, ...],
    *,
    ways: Collection[str] = DEFAULT,
    splits: int = 2,
    backend: str = "inductor",
    most_flips: int = 100,
) -> RecomputeReport:
    """Run a forward pass again in several ways and say whether and why its routing differs.

    The module stays in its mode (training or evaluation); its gradients and the random number
    generators are left as they were, and every run draws the same random numbers.

    Args:
        block_or_model: a block or model with `MoE` layers or transformers routers in it.
        batch: what it is called with: a tensor (token ids of a transformers model or the input of
            a block), the named arguments as a mapping, or the arguments as a tuple.
        ways: which of `WAYS`; compiling takes its time and must be asked for.
        splits: number of parts of the batch for "split".
        backend: of `torch.compile`.
        most_flips: flips that are listed per repetition; all of them are counted.
    """
    unknown = sorted(set(ways) - set(WAYS))
    require(bool(ways) and not unknown, f"ways must be some of {WAYS}, got {sorted(ways)}")
    require(splits >= 2, f"a split has 2 parts or more, got {splits=}")
    module, inputs = block_or_model, Inputs.of(block_or_model, batch)
    rows = inputs.rows
    first = plain(module, inputs)
    require(bool(first.calls), "no router ran: nothing can be compared")
    runs: dict[str, Callable[[], tuple[Run, Run]]] = {
        "recompute": lambda: checkpointed(module, inputs),
        "split": lambda: (first, split(module, inputs, splits)),
        "threads": lambda: (first, other_threads(module, inputs)),
        "compiled": lambda: (first, compiled(module, inputs, backend)),
    }
    left_out = {}
    if "split" in ways and rows < splits:
        left_out["split"] = f"a batch of {rows} rows has no {splits} parts"
    asked = [way for way in WAYS if way in ways and way not in left_out]
    done = [compared(way, *runs[way](), most_flips) for way in asked]
    top = worst(done)
    layers = tuple(dict.fromkeys(call.trace.name for call in first.calls))
    tokens = sum(call.tokens for call in first.calls if call.trace.name == layers[0])
    return RecomputeReport(top.verdict, top.explanation, tuple(done), layers, tokens, left_out)
