"""The result of an audit, as frozen records.

    PrecisionAudit     verdict, rows, what was left out
    ├─ judgement       `PrecisionJudgement`: the data of the verdict
    ├─ effects         `PerturbationEffect`: one row per perturbation
    │  ├─ layers       `LayerEffect`: the same layer by layer
    │  └─ keep         `KeepList`: layers to leave in float32
    ├─ remedies        `RemedyTable`: what can be done about it, side by side
    │  └─ remedies     `Remedy`, with a `RemedyEffect` per perturbation
    ├─ one_percent     `SigmaForFlips`: noise that flips 1 % of tokens
    └─ never_hit       experts without a token, by layer

Standard errors are clustered by sequence throughout.
"""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from tieline.analysis.served_precision import (
    Recommendation,
    Serving,
    Tolerance,
    recommend,
    tolerated,
)
from tieline.core.records import Result, entry_named
from tieline.core.statistics import Estimate


@dataclass(frozen=True)
class LayerEffect:
    """What a perturbation does to one layer.

    Attributes:
        name: name of the layer's router.
        local: share of tokens whose experts change when this router alone is perturbed and its
            inputs are those of the clean run.
        local_flips: number of such changes seen, over all repetitions of the noise.
        repeats: how often the noise was drawn, on average over tokens.
        predicted: the same share as predicted from the clean scores alone; None where it cannot be.
        predicted_low: lower limit where the prediction is an interval (ranks that were not kept,
            groups of experts); equal to `predicted` elsewhere.
        full: share of tokens whose experts change in this layer when the whole run is perturbed.
        damage: mean over tokens of the relative change ‖y' - y‖ / ‖y‖ of the layer's output by the
            local changes of experts; tokens that keep theirs count as 0.
    """

    name: str
    local: Estimate
    local_flips: int
    repeats: float
    predicted: float | None
    predicted_low: float | None
    full: Estimate
    damage: Estimate


@dataclass(frozen=True)
class KeepList:
    """Routers to leave in float32 so that a share of the damage is gone.

    Attributes:
        wanted: the share asked for.
        layers: names of the routers, the most damage per byte first.
        recovered: share of the jump-weighted damage that they stand for.
        bytes: what storing their weights in float32 costs more than in the format.
        bytes_all: the same for all routers.
        kl: KL to the clean run with these routers in float32; None where it was not run.
        recovered_kl: share of the KL that is gone; None where it was not run or there was none.
    """

    wanted: float
    layers: tuple[str, ...]
    recovered: float
    bytes: int
    bytes_all: int
    kl: Estimate | None = None
    recovered_kl: float | None = None


@dataclass(frozen=True)
class PerturbationEffect:
    """What one perturbation does to the model: a row of the audit.

    Attributes:
        name: such as "router bf16".
        kind: "rounding", "score noise" or "state noise".
        level: format, σ or ρ.
        part: "router" or "model".
        local: layer-local flips, mean over layers.
        local_flips: how many were seen in all layers.
        predicted: predicted local flips, mean over layers; None where some layer has none.
        predicted_low: lower limit of it.
        full: full-forward flips, mean over layers.
        any_layer: share of tokens that flip in one layer at least in the full run.
        compounding: full / local.
        moved: share of a token's routed weight that belongs to experts it lost, mean over tokens
            and layers, full run.
        moved_p99: its 99 % quantile.
        damage: jump-weighted damage, mean over layers.
        loss: change of the mean loss per token, nats.
        kl: KL(clean ‖ perturbed) of the predicted next tokens, nats per token.
        kl_floor: the same with clean routes forced on tokens that would flip.
        by_flips: share of the KL that goes away with the flips; None where there is no KL.
        layers: layer by layer.
        keep: layers to keep in float32; None for noise and for the whole model.
    """

    name: str
    kind: str
    level: str | float
    part: str
    local: Estimate
    local_flips: int
    predicted: float | None
    predicted_low: float | None
    full: Estimate
    any_layer: Estimate
    compounding: float | None
    moved: Estimate
    moved_p99: float | None
    damage: Estimate
    loss: Estimate
    kl: Estimate
    kl_floor: Estimate
    by_flips: float | None
    layers: tuple[LayerEffect, ...]
    keep: KeepList | None = None


@dataclass(frozen=True)
class RemedyEffect:
    """What a remedy leaves of one perturbation.

    Attributes:
        perturbation: its name, such as "model bf16".
        to_original: KL of the repaired and perturbed model to the original, clean, nats per token.
        two_runs: KL between two perturbed runs of the repaired model.
        bytes: what the weights take more than in the format; 0 for remedies of other kinds.
    """

    perturbation: str
    to_original: Estimate
    two_runs: Estimate
    bytes: int = 0


@dataclass(frozen=True)
class Remedy:
    """One thing to do about ties, and its price.

    Attributes:
        name: in words, such as "replay of experts".
        kind: what it is of: "nothing", "float32", "replay", "smooth" or "ramp".
        moved: KL of the repaired model to the original, both clean: how far the model itself moved.
        experts: experts per token and layer.
        time: of a forward pass, over the original's; None where it was not measured.
        bytes_per_token: what must be sent with every token.
        epsilons: width of the band by router name; empty for what does not smooth.
        effects: what it leaves of each perturbation; those that it does not apply to are missing.
    """

    name: str
    kind: Literal["nothing", "float32", "replay", "smooth", "ramp"]
    moved: Estimate
    experts: float
    time: float | None
    bytes_per_token: int
    epsilons: dict[str, float]
    effects: tuple[RemedyEffect, ...]

    def effect(self, perturbation: str) -> RemedyEffect | None:
        """What it leaves of the perturbation of that name; None if it does not apply."""
        return next((x for x in self.effects if x.perturbation == perturbation), None)


@dataclass(frozen=True)
class RemedyTable:
    """Remedies side by side.

    Attributes:
        remedies: the first does nothing.
        perturbations: names of those that they were tried on.
        tokens: tokens that were run.
        noise: the precision whose noise σ the widths of smoothed forms are multiples of.
        impossible: remedies that this model does not allow, and why; empty if there are none.
        half_tokens: tokens of those that second runs took.
    """

    remedies: tuple[Remedy, ...]
    perturbations: tuple[str, ...]
    tokens: int
    noise: str
    impossible: tuple[str, ...] = ()
    half_tokens: int = 0


@dataclass(frozen=True)
class SigmaForFlips:
    """Noise of the logits that changes the experts of a given share of tokens.

    Attributes:
        share: the share, mean over layers.
        model: the σ; None where no noise reaches it.
        layers: the σ of each layer by itself, by name.
    """

    share: float
    model: float | None
    layers: dict[str, float | None]


@dataclass(frozen=True)
class NeverHit:
    """Experts of a layer that no token chose, so that nothing is known about their precision."""

    layer: str
    experts: tuple[int, ...]
    n_experts: int


@dataclass(frozen=True)
class PrecisionJudgement:
    """Which number formats the routers tolerate; `PrecisionAudit.verdict` is its sentence.

    Attributes:
        kind: "not run" without a rounding of the routers; "all", "some" or "none" of the formats
            are tolerated.
        tolerated: perturbations whose KL and rise of the loss are below `limit`.
        refused: perturbations of which one of the two is not.
        unclear: perturbations whose intervals contain the limit.
        smallest: the tolerated perturbation with the fewest bits.
        worst: the refused perturbation with the largest KL.
        whole_model: the rounding of the whole model that stands for all: bf16, or the first one.
        limit: nats per token below which a cost counts as harmless.
        recommendation: what to do about the precision served; None where that was not run.
    """

    kind: Literal["not run", "all", "some", "none"]
    tolerated: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    unclear: tuple[str, ...] = ()
    smallest: str | None = None
    worst: str | None = None
    whole_model: str | None = None
    limit: float = 0.0
    recommendation: Recommendation | None = None


@dataclass(frozen=True, repr=False)
class PrecisionAudit(Result):
    """What low precision and noise do to a model on a text.

    Attributes:
        verdict: which formats the routers tolerate and what to do, in a few sentences.
        judgement: the data of the verdict.
        effects: one row per perturbation.
        layers: names of the routers.
        tokens: tokens that were run.
        sequences: sequences that they are in, the clusters of the standard errors.
        loss: mean loss per token of the clean run.
        one_percent: noise that flips 1 % of tokens.
        never_hit: layers with experts that no token chose.
        left_out: what was left out (no time, streamed weights), in words; empty if all was done.
        provenance: model, text, versions, seed.
        timings: seconds per stage.
        impossible: perturbations that the routers do not allow, and why; empty if there are none.
        experts: experts in use per token, mean over layers, of a smoothed model; None for top-k.
        remedies: what can be done about some of the perturbations; None if none was tried.
        ignore: by quantisation library, the argument that keeps all routers out of quantisation.
        serving: what the precision served does to the model; None where it was not run.
    """

    format: ClassVar[str] = "tieline-audit"
    sentences: ClassVar[tuple[str, ...]] = ("verdict",)

    judgement: PrecisionJudgement
    effects: tuple[PerturbationEffect, ...]
    layers: tuple[str, ...]
    tokens: int
    sequences: int
    loss: Estimate
    one_percent: SigmaForFlips
    never_hit: tuple[NeverHit, ...]
    left_out: tuple[str, ...]
    provenance: dict[str, object]
    timings: dict[str, float]
    impossible: str = ""
    experts: float | None = None
    remedies: RemedyTable | None = None
    ignore: dict[str, dict[str, Any]] = field(default_factory=dict)
    serving: Serving | None = None

    @property
    def verdict(self) -> str:
        """The judgement as sentences."""
        return self.sentence("verdict")

    @property
    def is_full(self) -> bool:
        """Whether several formats of the routers were run, not the one of the precision served."""
        routers = [row for row in self.effects if row.kind == "rounding" and row.part == "router"]
        return len(routers) > 1

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers of each perturbation, P = "router bf16": "changed@P", "flip@P", "kl@P", ...

        "changed" is the share of tokens that change an expert in at least one layer, "flip" the
        mean over layers.
        """
        numbers = {}
        for row in self.effects:
            estimates = {"flip": row.full, "kl": row.kl, "loss": row.loss, "damage": row.damage}
            estimates["changed"] = row.any_layer
            numbers |= {f"{name}@{row.name}": x.value for name, x in estimates.items()}
        return {name: value for name, value in numbers.items() if value is not None}

    def effect(self, name: str) -> PerturbationEffect:
        """The row of that name."""
        return entry_named(self.effects, name)

    def tolerance(self, row: PerturbationEffect) -> Tolerance:
        """Whether a perturbation is harmless, as far as its intervals tell."""
        return tolerated(row.kl, row.loss, self.sequences)

    def advice(self, row: PerturbationEffect) -> Recommendation | None:
        """What to do if the model is served as in a row; None where no precision served was run."""
        if self.serving is None:
            return None
        effect = {"changed": row.any_layer, "kl": row.kl, "replayed": row.kl_floor}
        return recommend(replace(self.serving, **effect, loss=row.loss))
