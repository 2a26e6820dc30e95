"""The result of an audit, as frozen records.

    PrecisionAudit     verdict, rows, what was left out
    ├─ judgement       `PrecisionJudgement`: the data of the verdict
    ├─ effects         `PerturbationEffect`: one row per perturbation
    │  ├─ layers       `LayerEffect`: the effect on each layer
    │  └─ keep         `KeepList`: routers to keep in float32
    ├─ remedies        `RemedyTable`: remedies side by side
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
    """Effect of a perturbation on one layer.

    Attributes:
        name: name of the layer's router.
        local: share of tokens whose experts change when this router alone is perturbed, with the
            inputs of the clean run.
        local_flips: number of observed local changes, over all repetitions of the noise.
        repeats: how often the noise was drawn, on average over tokens.
        predicted: `local` as predicted from the clean scores alone; None if there is no prediction.
        predicted_low: lower limit if the prediction is an interval (ranks that were not kept,
            groups of experts), else equal to `predicted`.
        full: share of tokens whose experts change in this layer when the whole run is perturbed.
        damage: mean over tokens of the relative change ‖y' - y‖ / ‖y‖ of the layer's output by the
            local changes of experts; 0 for tokens that keep their experts.
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
    """Routers to keep in float32 to remove a share of the damage.

    Attributes:
        wanted: requested share of the damage.
        layers: names of the routers, the most damage per byte first.
        recovered: share of the jump-weighted damage that these routers cause.
        bytes: additional bytes to store their weights in float32 instead of the format.
        bytes_all: additional bytes for all routers.
        kl: KL to the clean run with these routers in float32; None if that was not run.
        recovered_kl: share of the KL that is removed; None if that was not run or the KL is zero.
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
    """Effect of one perturbation on the model: a row of the audit.

    Attributes:
        name: name of the perturbation, such as "router bf16".
        kind: "rounding", "score noise" or "state noise".
        level: format, σ or ρ.
        part: "router" or "model".
        local: layer-local flips, mean over layers.
        local_flips: number of observed layer-local flips in all layers.
        predicted: predicted local flips, mean over layers; None if a layer has no prediction.
        predicted_low: lower limit of `predicted`.
        full: flips in the full run, mean over layers.
        any_layer: share of tokens that flip in at least one layer of the full run.
        compounding: full / local.
        moved: share of a token's routed weight that belongs to experts it lost in the full run,
            mean over tokens and layers.
        moved_p99: 99 % quantile of that share.
        damage: jump-weighted damage, mean over layers.
        loss: change of the mean loss per token, nats.
        kl: KL(clean ‖ perturbed) of the predicted next tokens, nats per token.
        kl_floor: KL with clean routes forced on tokens that would flip.
        by_flips: share of the KL that disappears without flips; None if the KL is zero.
        layers: effect on each layer.
        keep: routers to keep in float32; None for noise and for the whole model.
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
    """Remaining effect of one perturbation on a repaired model.

    Attributes:
        perturbation: name of the perturbation, such as "model bf16".
        to_original: KL of the repaired, perturbed model to the clean original, nats per token.
        two_runs: KL between two perturbed runs of the repaired model.
        bytes: additional bytes of weights kept in float32; 0 for remedies of other kinds.
    """

    perturbation: str
    to_original: Estimate
    two_runs: Estimate
    bytes: int = 0


@dataclass(frozen=True)
class Remedy:
    """One remedy against ties, with its cost.

    Attributes:
        name: name of the remedy, such as "replay of experts".
        kind: "nothing", "float32", "replay", "smooth" or "ramp".
        moved: KL of the repaired model to the original, both clean: how far the model itself moved.
        experts: experts per token and layer.
        time: time of a forward pass over that of the original; None if not measured.
        bytes_per_token: bytes that must be sent with every token.
        epsilons: width of the band by router name; empty for remedies that do not smooth.
        effects: remaining effect of each perturbation that the remedy applies to.
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
        """Return the effect of the perturbation with this name; None if it does not apply."""
        return next((x for x in self.effects if x.perturbation == perturbation), None)


@dataclass(frozen=True)
class RemedyTable:
    """Remedies side by side.

    Attributes:
        remedies: the remedies; the first one does nothing.
        perturbations: names of the perturbations that were repaired.
        tokens: number of tokens that were run.
        noise: precision whose noise σ is the unit of the widths of smoothed forms.
        impossible: remedies that this model does not allow, with the reason.
        half_tokens: number of tokens that second runs took.
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
        share: share of tokens, mean over layers.
        model: σ for the mean over layers; None if no noise reaches the share.
        layers: σ for each layer by itself, by name.
    """

    share: float
    model: float | None
    layers: dict[str, float | None]


@dataclass(frozen=True)
class NeverHit:
    """Experts of a layer that no token chose, so the audit says nothing about their precision."""

    layer: str
    experts: tuple[int, ...]
    n_experts: int


@dataclass(frozen=True)
class PrecisionJudgement:
    """Which number formats the routers tolerate; `PrecisionAudit.verdict` is its sentence.

    Attributes:
        kind: "not run" if the routers were not rounded, else whether "all", "some" or "none" of
            the formats are tolerated.
        tolerated: perturbations with KL and rise of the loss below `limit`.
        refused: perturbations with KL or rise of the loss above `limit`.
        unclear: perturbations whose intervals contain the limit.
        smallest: the tolerated perturbation with the fewest bits.
        worst: the refused perturbation with the largest KL.
        whole_model: rounding of the whole model that the verdict reports: bf16, or the first one.
        limit: cost in nats per token below which a precision counts as harmless.
        recommendation: what to do about the precision served; None if it was not run.
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
    """Effects of low precision and noise on a model, measured on a text.

    Attributes:
        verdict: which formats the routers tolerate and what to do, in a few sentences.
        judgement: the data of the verdict.
        effects: one row per perturbation.
        layers: names of the routers.
        tokens: number of tokens that were run.
        sequences: number of sequences, the clusters of the standard errors.
        loss: mean loss per token of the clean run.
        one_percent: noise that flips 1 % of tokens.
        never_hit: layers with experts that no token chose.
        left_out: parts that were skipped for lack of time or because weights are streamed.
        provenance: model, text, versions, seed.
        timings: seconds per stage.
        impossible: perturbations that the routers do not allow, with the reason; may be empty.
        experts: experts in use per token, mean over layers, of a smoothed model; None for top-k.
        remedies: remedies for some of the perturbations; None if none was tried.
        ignore: by quantisation library, the argument that keeps all routers out of quantisation.
        serving: effect of the precision served on the model; None if it was not run.
        uncertified: by router, share of tokens whose choice another order of summation of its
            product in float32 may change, an upper bound for flips by that product alone.
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
    uncertified: dict[str, Estimate] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Return the judgement as sentences."""
        return self.sentence("verdict")

    @property
    def is_full(self) -> bool:
        """Whether the routers were run in several formats, not only the precision served."""
        routers = [row for row in self.effects if row.kind == "rounding" and row.part == "router"]
        return len(routers) > 1

    @property
    def metrics(self) -> dict[str, float]:
        """Return "changed@P", "flip@P", "kl@P", "loss@P" and "damage@P" for each perturbation P.

        P is a name such as "router bf16". "changed" is the share of tokens that change an expert in
        at least one layer, "flip" the mean over layers.
        """
        numbers = {}
        for row in self.effects:
            estimates = {"flip": row.full, "kl": row.kl, "loss": row.loss, "damage": row.damage}
            estimates["changed"] = row.any_layer
            numbers |= {f"{name}@{row.name}": x.value for name, x in estimates.items()}
        return {name: value for name, value in numbers.items() if value is not None}

    def effect(self, name: str) -> PerturbationEffect:
        """Return the row with this name."""
        return entry_named(self.effects, name)

    def tolerance(self, row: PerturbationEffect) -> Tolerance:
        """Return whether a perturbation is harmless, judged by its intervals."""
        return tolerated(row.kl, row.loss, self.sequences)

    def advice(self, row: PerturbationEffect) -> Recommendation | None:
        """Return what to do if the model is served as in a row; None if no precision was served."""
        if self.serving is None:
            return None
        effect = {"changed": row.any_layer, "kl": row.kl, "replayed": row.kl_floor}
        return recommend(replace(self.serving, **effect, loss=row.loss))
