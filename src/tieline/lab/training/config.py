"""The configuration of a run as one frozen record, and the eleven routing variants.

A recipe is a named function that returns a `TrainConfig`. The record is written beside the
checkpoints, and a run can be resumed only with the same record.

`gate_config` returns one of eleven variants that are trained side by side:

smoe        linear router, hard top-2: the baseline
top3        hard top-3: the control for "is it only the extra expert?" (paper 1, Table 8)
smooth50    smooth top-2, b = 50, k* = 2.5: the paper's SmoothSMoE
smooth1     the same with b = 1: a ramp as wide as the band
projected   the same by projected top-k: experts that tie share a seat
annealed    smooth50 with k* brought down to 2, scored with hard top-2 (paper 1, section 7.5)
remoe       ReLU gate driven to 2 experts by an adaptive L1 loss, dense at the start
cosine      cosine router with a projection, hard top-2 (paper 2, section 5.2)
perturbed   the same with τ1 = τ2 = 0.1 added to the norms
sigmoid     linear router, top-2 by sigmoid scores, renormalised
cooled      top-2 at a temperature that falls to 0.01 by a cosine, deployed hard (paper 0)
"""

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tieline.core.errors import ParameterError, require

SCHEDULES = ("constant", "linear", "cosine", "boundary")
"""Schedules of a temperature; "boundary" halves BM(τ) at equal distances."""


@dataclass(frozen=True, kw_only=True)
class CoolingConfig:
    """Schedule of the temperature τ of a soft gate over the steps; the model is deployed hard."""

    # "constant" keeps `start`; "linear" and "cosine" go down to `end`; "boundary" chooses
    # each next τ so that half of the tokens with a gap of at most τ are left
    schedule: str = "cosine"
    start: float = 1.0  # τ of the first step, in units of the scores
    end: float = 0.01  # τ from the share `until` of the steps on
    until: float = 0.9  # share of the steps after which τ no longer changes
    halvings: int = 6  # how often "boundary" halves the mass

    def __post_init__(self) -> None:
        require(self.schedule in SCHEDULES, f"schedule {self.schedule!r} is not one of {SCHEDULES}")
        lowest = min(self.start, self.end)
        require(0 < lowest < math.inf, f"a temperature must be positive and finite, got {lowest}")
        falls = self.schedule in ("linear", "cosine")
        require(
            not falls or self.end < self.start,
            f"a {self.schedule} schedule from τ = {self.start:g} to {self.end:g} never hardens: "
            "need end < start",
        )
        require(0 < self.until <= 1, f"until is a share of the steps in (0, 1], got {self.until}")
        require(
            1 <= self.halvings <= 20,
            f"need 1 <= halvings <= 20, got {self.halvings}: no batch has 2^20 tokens to halve",
        )

    def at(self, done: float) -> float:
        """Return τ after a share of the steps to `until`; "boundary" sets τ from measured gaps."""
        done = min(1.0, done)
        if self.schedule == "linear":
            return self.start + done * (self.end - self.start)
        if self.schedule == "cosine":
            return self.end + (self.start - self.end) * (1 + math.cos(math.pi * done)) / 2
        return self.start


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """Router and gate of a layer, and the schedule of the gate over the steps."""

    name: str  # short name of the variant, such as "smooth1"
    router: str = "linear"  # a key of `routing.layer.ROUTERS`
    # a key of `routing.layer.GATES`, or one of the layers "soft_moe" and "smear"
    gate: str = "topk"
    k: int = 2  # experts per token that are always chosen, or the target of a controller
    router_options: dict[str, Any] = field(default_factory=dict)  # further arguments of the router
    gate_options: dict[str, Any] = field(default_factory=dict)  # further arguments of the gate
    # shares (hold, until) of the steps: k* is constant until `hold`, then falls linearly, and
    # is k from `until` on (paper 1, section 7.5: 1/2 and 3/4)
    anneal: tuple[float, float] | None = None
    evaluate_hard: bool = False  # score with hard top-k instead of the trained gate
    # share of the steps before the sparsity of a ReLU gate is enforced; None without such a
    # controller
    dense_share: float | None = None
    # schedule of the temperature of a "temperature" gate, which is deployed hard
    cooling: CoolingConfig | None = None

    def __post_init__(self) -> None:
        require(self.k >= 1, f"a gate chooses k >= 1 experts, got {self.k}")
        low, high = self.anneal or (0.0, 1.0)
        require(0 <= low <= high <= 1, f"anneal needs 0 <= hold <= until <= 1: {self.anneal}")
        share = self.dense_share or 0.0
        require(0 <= share < 1, f"dense_share must be in [0, 1), got {share}")
        require(
            (self.cooling is not None) == (self.gate == "temperature"),
            f"a temperature gate and no other needs a cooling schedule, got gate={self.gate!r}",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Base of the model shapes of the tasks."""


Shape = TypeVar("Shape", bound=ModelConfig)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """Shape of the decoder: every feed-forward part is a mixture of experts.

    `attention` is "softmax", or "sigmoid" with the bias -log N (paper 4, eq. 2).
    """

    layers: int
    d_model: int
    d_hidden: int
    heads: int
    vocabulary: int
    context: int
    n_experts: int = 16
    initial_std: float = 0.04
    tied: bool = True
    attention: str = "softmax"

    def __post_init__(self) -> None:
        kinds = ("softmax", "sigmoid")
        require(self.attention in kinds, f"attention={self.attention!r} is not one of {kinds}")
        even = self.d_model % (2 * self.heads) == 0  # rotary positions turn pairs of coordinates
        require(even, f"{self.heads} heads of a width of {self.d_model} have no even width each")


@dataclass(frozen=True, kw_only=True)
class MixtureConfig(ModelConfig):
    """Shape of a `MixtureClassifier`; the defaults are the paper's."""

    layers: int = 4
    n_experts: int = 32
    d_hidden: int = 128
    side: int = 32
    classes: int = 10

    def __post_init__(self) -> None:
        require(self.layers >= 1, f"need a layer, got layers={self.layers}")


@dataclass(frozen=True, kw_only=True)
class PatchConfig(ModelConfig):
    """Shape of a `PatchClassifier`."""

    layers: int = 2  # transformer blocks
    routed: int = 2  # number of routed blocks, counted from the last (GMoE's "last two")
    d_model: int = 64  # width of a patch
    heads: int = 4  # attention heads
    d_hidden: int = 128  # width of a feed-forward part and of an expert
    n_experts: int = 6  # experts of a routed block
    side: int = 32  # pixels of an image's side; a patch has 8×8 of them
    classes: int = 7  # number of classes

    def __post_init__(self) -> None:
        require(1 <= self.routed <= self.layers, f"need 1 <= routed <= layers, got {self.routed}")
        fits = self.d_model % self.heads == 0 and self.d_model % 8 == 0
        require(fits, f"a width of {self.d_model} is no multiple of 8 and of {self.heads} heads")
        require(self.side % 8 == 0, f"a side is a multiple of 8 pixels, got {self.side}")

    @property
    def tokens(self) -> int:
        """Number of patches of an image."""
        return (self.side // 8) ** 2


@dataclass(frozen=True, kw_only=True)
class VisionTransformerConfig(ModelConfig):
    """Shape of a `RoutedVisionTransformer`; the defaults are the papers'."""

    layers: int = 12  # blocks
    routed: int = 2  # number of routed blocks, counted from the last
    d_model: int = 384  # width of a patch
    d_hidden: int = 1536  # width of a network and of an expert
    heads: int = 6  # attention heads
    n_experts: int = 6  # experts of a routed block
    side: int = 224  # pixels of an image's side
    patch: int = 16  # pixels of a patch's side
    classes: int = 7  # number of classes
    # name on the hub or folder of the weights to start from; None for random ones
    pretrained: str | None = "WinKawaks/vit-small-patch16-224"

    def __post_init__(self) -> None:
        require(1 <= self.routed <= self.layers, f"need 1 <= routed <= layers, got {self.routed}")

    @property
    def tokens(self) -> int:
        """Number of patches of an image plus 1 for the class token."""
        return (self.side // self.patch) ** 2 + 1


@dataclass(frozen=True, kw_only=True)
class SentenceConfig(ModelConfig):
    """Shape of a classifier of sentences and of pairs of sentences."""

    layers: int  # blocks
    d_model: int  # width
    d_hidden: int  # width of a network and of an expert
    heads: int  # attention heads
    # number of tokens; the last three are [CLS], [SEP] and padding where the vocabulary is
    # learnt from the task's sentences
    vocabulary: int
    context: int  # largest number of tokens of an example
    routed: int  # the block whose network is replaced, counted from 0
    n_experts: int = 16  # experts that replace the network
    # name on the hub or folder of the weights to start from; None for random ones
    pretrained: str | None = None

    def __post_init__(self) -> None:
        require(0 <= self.routed < self.layers, f"block {self.routed} of only {self.layers}")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The name of a data loader and its options."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Coefficients of the auxiliary losses, which are means over layers."""

    balance: float = 0.01
    router_z: float = 0.001
    boundary: float = 10.0


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW with warm-up and cosine decay; ε has its own rate, which does not decay."""

    steps: int  # optimiser steps
    batch: int  # sequences or images per step, over all processes
    accumulate: int = 1  # micro-batches per step
    rate: float = 3e-3  # peak learning rate
    final_share: float = 0.05  # share of the peak at the last step
    warmup: int = 50  # steps of linear warm-up
    weight_decay: float = 0.01  # of matrices; vectors and ε are not decayed
    betas: tuple[float, float] = (0.9, 0.98)  # of AdamW
    clip: float = 1.0  # largest norm of the gradient
    epsilon_rate: float = 0.02  # learning rate of θ, where ε = softplus(θ)

    def __post_init__(self) -> None:
        require(self.steps >= 1 and self.batch >= 1, "need at least one step of one sequence")
        require(
            self.accumulate >= 1 and self.batch % self.accumulate == 0,
            f"a batch of {self.batch} does not divide into {self.accumulate} micro-batches",
        )


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on."""

    recipe: str  # name of the run
    task: str  # a key of `training_run.TASKS`
    model: ModelConfig  # shape of the model, of the task's type
    gate: GateConfig  # router and gate of the routed layers
    data: DataConfig  # training data and held-out data
    optim: OptimConfig  # the optimiser and its schedule
    losses: LossConfig = LossConfig()  # auxiliary losses
    seed: int = 0  # of weights, data order and all other random numbers
    log_every: int = 50  # steps between two log entries
    checkpoint_every: int = 200  # steps between two checkpoints
    evaluate_items: int = 256  # scored windows or images of each held-out split
    # steps between two scores on held-out training data, by which the best model is kept; 0 to
    # keep the model of the last step
    select_every: int = 0
    recompute: bool = False  # whether activations are recomputed in the backward pass
    note: str = ""  # a remark for readers of the result

    def shape(self, kind: type[Shape], task: str) -> Shape:
        """Return the shape of the model; raises if it is not of type `kind`, as `task` requires."""
        if not isinstance(self.model, kind):
            raise ParameterError(f"{type(self.model).__name__} is no shape for {task}")
        return self.model

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    def replace(self, **changes: Any) -> "TrainConfig":
        """Return a copy with changed fields; `optim__steps=3` changes `optim.steps`."""
        by_owner: dict[str, dict[str, Any]] = {}
        for name, value in changes.items():
            owner, _, inner = name.partition("__")
            by_owner.setdefault(owner if inner else "", {})[inner or name] = value
        fields = by_owner.pop("", {})
        for owner, inner in by_owner.items():
            fields[owner] = dataclasses.replace(getattr(self, owner), **inner)
        return dataclasses.replace(self, **fields)


COSINE_OPTIONS = {"d_proj": 8, "temperature": 0.1}
"""Dimension half the number of experts (paper 2, E.2); a low temperature spreads the scores."""

VARIANTS: dict[str, dict[str, Any]] = {
    "smoe": {},
    "top3": {"extra": 1},
    "smooth50": {"gate": "smooth", "gate_options": {"b": 50.0}},
    "smooth1": {"gate": "smooth", "gate_options": {"b": 1.0}},
    "projected": {"gate": "projected"},
    "annealed": {
        "gate": "smooth",
        "gate_options": {"b": 50.0},
        "anneal": (0.5, 0.75),
        "evaluate_hard": True,
    },
    "remoe": {"gate": "relu", "dense_share": 0.025},
    "cosine": {"router": "cosine", "router_options": COSINE_OPTIONS},
    "perturbed": {"router": "cosine", "router_options": {**COSINE_OPTIONS, "tau": (0.1, 0.1)}},
    "sigmoid": {"gate_options": {"scoring": "sigmoid"}},
    "cooled": {"gate": "temperature", "cooling": CoolingConfig(), "evaluate_hard": True},
}
GATE_NAMES = tuple(VARIANTS)


def gate_config(name: str, k: int = 2) -> GateConfig:
    """Return the variant `name` for `k` experts per token; smooth gates have k* = k + 0.5."""
    require(name in VARIANTS, f"the gate {name!r} is not one of {list(GATE_NAMES)}")
    fields = dict(VARIANTS[name])
    return GateConfig(name=name, k=k + fields.pop("extra", 0), **fields)
