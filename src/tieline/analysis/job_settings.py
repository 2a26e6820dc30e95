"""Settings of the jobs of the instrument: one class per job, one field per option.

`tl.inspect("demo", tokens=2048)`, `tl.inspect("demo", settings=InspectSettings(tokens=2048))` and
`tieline inspect demo --tokens 2048` are the same run. Beside each class stands a `TypedDict` with
its fields, which types the keyword arguments of the function.

Nothing large is imported here: the command line makes its options from these classes.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, TypedDict

from tieline.core.setting_fields import (
    Settings,
    above,
    at_least,
    one_of,
    read_layers,
    read_names,
    require_setting,
    setting,
)
from tieline.run.shared_settings import (
    DTYPES,
    PARALLEL,
    ModelOptions,
    ModelSettings,
    SeedSettings,
    SequenceSettings,
    ServerOptions,
    ServerSettings,
    Text,
    TextSettings,
)

SERVED = {
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "fp8": "fp8_e4m3",
    "int4": "int4_group",
}
"""Served precisions and the number format that emulates each, from fine to coarse."""


class InspectSettings(ModelSettings, SeedSettings, SequenceSettings):
    """Options of `inspect` and `tieline inspect`."""

    dtype: str = setting(
        "auto",
        check=one_of(*DTYPES),
        help="Precision the model runs in: auto, fp32, bf16 or fp16.",
    )
    layers: Collection[str | int] | None = setting(
        None, read=read_layers, help="Routed layers, such as 0,2,5-7, or names of routers."
    )
    jumps: bool = setting(
        True, option="--no-jumps", help="Do not measure what flips do to a layer's output."
    )
    loss_jumps: bool = setting(False, help="Also measure what flips do to the loss.")
    serve: str | None = setting(
        None,
        check=one_of(*SERVED, "none"),
        metavar="|".join(SERVED),
        help="Precision that the model is served in; by default bf16, and none for weights that "
        "are streamed, which are read once more for it.",
    )
    expert_tokens: int = setting(
        128, check=at_least(1), help="Tokens that calibration shall give each expert."
    )
    resume: bool = setting(
        False, help="Go on where a killed streamed run with the same options was."
    )
    measure_settings: Any = setting(
        None, option=None, help="`MeasureSettings`: grids and formats of the measures."
    )
    jump_settings: Any = setting(
        None,
        option=None,
        help="`JumpSettings`: sizes of the samples and levels; its seed is replaced by `seed`.",
    )

    def check(self) -> None:
        """Refuse options that pipeline stages cannot serve, as each has only some of the layers."""
        staged = self.parallel == "pp"
        require_setting(
            not staged or self.layers is None,
            "{layers} cannot be chosen with {parallel} pp: leave them out",
        )
        require_setting(
            not staged or not self.loss_jumps,
            "{loss_jumps} needs all layers: take {parallel} tp or ep with it",
        )


class InspectOptions(ModelOptions, total=False):
    """Keyword arguments of `inspect`."""

    sequence_length: int | None
    dtype: str
    layers: Collection[str | int] | str | None
    jumps: bool
    loss_jumps: bool
    serve: str | None
    expert_tokens: int
    resume: bool
    measure_settings: Any
    jump_settings: Any


DTYPE_HELP = "auto, fp32, bf16 or fp16; or bf16-emulated, int8-emulated, ...: computed in fp32."


class DiffSettings(SequenceSettings):
    """Options of `diff` and `tieline diff`."""

    sequence_length: int = setting(512, check=at_least(2), help="Tokens per sequence.")
    dtype_a: str = setting("auto", help=DTYPE_HELP)
    dtype_b: str = setting("auto", help="The same for B.")
    experts_impl_a: str | None = setting(
        None, help="Expert implementation of A: eager, grouped_mm, ...."
    )
    experts_impl_b: str | None = setting(None, help="The same for B.")
    revision_a: str | None = setting(None, help="Branch, tag or commit of A.")
    revision_b: str | None = setting(None, help="The same for B.")
    device: str = setting("cpu", help="cpu, cuda, cuda:1, ... or auto.")
    trust_remote_code: bool = setting(False, help="Allow code that comes with models to run.")
    stream: bool = setting(False, help="Read both models layer by layer, each byte once.")
    n_experts: int | None = setting(
        None, check=at_least(1), help="Number of experts, for files that do not state it."
    )
    k: int | None = setting(
        None, check=at_least(1), option="-k --k", help="Experts chosen per line of a table."
    )
    partial: bool = setting(False, help="Compare what both have: fewer tokens, smaller k.")
    expect: str | None = setting(
        None,
        help="Format whose noise is expected: fp32, bf16, fp16, fp8, int8, int4, ... By default "
        "what both sides recorded.",
    )
    tokenizer: str | None = setting(
        None, help="Model whose tokenizer cuts the text, for two GGUFs."
    )
    engine_python: str | Path | None = setting(
        None, kind=Path, help="Python that the engine of a side is installed in."
    )
    engine_defaults: bool = setting(False, help="All settings as engines have them by default.")
    dequantise: bool = setting(
        True,
        option="--no-dequantise",
        help="Do not run dequantised weights in transformers.",
    )
    batch_size_b: int | None = setting(
        None, check=at_least(1), help="Sequences per pass of B: batch invariance."
    )
    replay: bool = setting(
        False, help="Split the KL: A's experts, then its weights, replayed in B."
    )
    parallel: str | None = setting(
        None,
        check=one_of(*PARALLEL),
        metavar="|".join(PARALLEL),
        help="Under torchrun: how processes share the work; by default the text (data).",
    )

    def check(self) -> None:
        """Refuse options that several processes cannot share."""
        require_setting(
            not self.replay or self.parallel in (None, "data", "tp", "ep"),
            "{replay} needs all layers in every process: take {parallel} data, tp or ep, not {way}",
            way=self.parallel,
        )
        require_setting(
            self.batch_size_b is None or self.parallel != "fsdp",
            "{batch_size_b}: processes that gather weights by fsdp run equally many passes: take "
            "{parallel} data",
        )


class DiffOptions(TypedDict, total=False):
    """Keyword arguments of `diff`."""

    text: Text
    tokens: int
    batch_size: int
    sequence_length: int
    dtype_a: str
    dtype_b: str
    experts_impl_a: str | None
    experts_impl_b: str | None
    revision_a: str | None
    revision_b: str | None
    device: str
    trust_remote_code: bool
    stream: bool
    n_experts: int | None
    k: int | None
    partial: bool
    expect: str | None
    tokenizer: str | None
    engine_python: str | Path | None
    engine_defaults: bool
    dequantise: bool
    batch_size_b: int | None
    replay: bool
    parallel: str | None


class AuditSettings(ModelSettings, SeedSettings, SequenceSettings):
    """Options of `audit` and `tieline audit`."""

    serve: str = setting(
        "bf16",
        check=one_of(*SERVED),
        metavar="|".join(SERVED),
        help="Precision that the model is served in: it, its neighbours and its remedies are run.",
    )
    all: bool = setting(False, help="Run every format, noise and remedy.")
    formats: Sequence[str] | None = setting(
        None, read=read_names, help="Number formats to run instead, such as bf16,int4_group."
    )
    perturbations: Any = setting(
        None, option=None, help="`Perturbation`s to run instead of those of the formats."
    )
    flips: int = setting(
        3000, check=at_least(1), help="Layer-local flips that score noise is drawn for."
    )
    recover: float = setting(
        0.9,
        check=lambda value: "" if 0 < value <= 1 else "is a share of the damage in (0, 1]",
        help="Share of the damage that keeping routers in fp32 shall recover.",
    )
    remedies: Sequence[str] | None = setting(
        None,
        read=read_names,
        help="Perturbations that remedies are tried on, such as 'router bf16,model int8'; all, "
        "none; by default the model in the precision served.",
    )
    budget_minutes: float | None = setting(
        None,
        check=above(0.0, "must be positive"),
        help="Begin nothing more after so many minutes, and say what was left out.",
    )
    dtype: str = setting(
        "fp32",
        check=one_of(*DTYPES),
        help="Precision of the clean run: fp32, bf16, fp16 or auto.",
    )

    @property
    def seconds(self) -> float:
        """Seconds after which no further work is started."""
        return math.inf if self.budget_minutes is None else 60 * self.budget_minutes

    def check(self) -> None:
        """Refuse two choices of perturbations, and a time budget on several processes."""
        require_setting(
            not self.all or (self.formats is None and self.perturbations is None),
            "{all} runs every format: leave out {formats} and perturbations",
        )
        require_setting(
            self.parallel is None or self.budget_minutes is None,
            "{budget_minutes} goes by the clock of one process: leave it out on several",
        )


class AuditOptions(ModelOptions, total=False):
    """Keyword arguments of `audit`."""

    sequence_length: int | None
    serve: str
    all: bool
    formats: Sequence[str] | str | None
    perturbations: Any
    flips: int
    recover: float
    remedies: Sequence[str] | str | None
    budget_minutes: float | None
    dtype: str


class SmoothSettings(ModelSettings, SeedSettings, TextSettings):
    """Options of `smooth` and `tieline smooth`."""

    serve: str = setting(
        "bf16",
        check=one_of(*SERVED),
        metavar="|".join(SERVED),
        help="Precision that the model is served in, to see what smoothing repairs there.",
    )
    budget: float | None = setting(
        None, help="Mean experts per token, above k; k + 0.5 by default."
    )
    noise: str | None = setting(
        None,
        help="Make the band wide against a precision: bf16, int8, 'router bf16', ...; with factor "
        "or max_moved the precision to repair ('router bf16').",
    )
    epsilon: float | None = setting(
        None,
        check=above(0.0, "is the width of a band: positive and finite"),
        help="Width of the band in units of the scores, all layers.",
    )
    factor: float | None = setting(
        None,
        check=above(1.0, "must be above 1 and finite"),
        help="Make flips under the noise this many times cheaper; reports what moved.",
    )
    max_moved: float | None = setting(
        None,
        check=above(0.0, "is a KL: positive and finite"),
        help="Stay within this KL of the original, nats per token.",
    )
    near_original: bool = setting(
        False,
        help="Choose the ε at which the noisy smoothed model is nearest to the original without "
        "noise: about 1.5 times the noise of the margin.",
    )
    gate: str | None = setting(
        None,
        check=one_of("projected", "ramp"),
        help="projected: tied experts share a seat; ramp: experts below the threshold are added. "
        "By default projected, but ramp with a, b or k_max.",
    )
    a: float = setting(1.0, option="-a", help="Exponent at the lower end of the ramp.")
    b: float = setting(
        1.0, option="-b", help="Exponent at its upper end: 1 is straight, 50 the paper's."
    )
    k_max: int | None = setting(
        None, help="Slots per token of the ramp; k + max(2, k/2) by default."
    )
    tokens: int = setting(16384, check=at_least(64), help="Tokens to measure on.")
    calibration: int = setting(
        4096, check=at_least(64), help="Tokens before those, to choose ε on."
    )
    rounds: int = setting(12, check=at_least(2), help="Rounds to measure time in.")
    experts_impl: str | None = setting(
        None,
        help="Experts to measure time with: tieline, grouped_mm, eager, ...; by default those of "
        "the model, and tieline for the smoothed one.",
    )

    @property
    def gate_options(self) -> dict[str, Any]:
        """The gate and its ramp, as arguments of `smooth_`."""
        return {"gate": self.gate, "a": self.a, "b": self.b, "k_max": self.k_max}

    @property
    def searches_scale(self) -> bool:
        """Whether ε = c σ is searched to reach a requested factor or KL."""
        return self.factor is not None or self.max_moved is not None

    def check(self) -> None:
        """Refuse two ways to choose ε, and parts of a model on several processes."""
        names = ("epsilon", "factor", "max_moved", "budget")
        choices = [f"{{{name}}}" for name in names if getattr(self, name) is not None]
        choices += ["{near_original}"] if self.near_original else []
        require_setting(
            len(choices) <= 1, " and ".join(choices) + " each choose ε: give one of them"
        )
        is_projected = self.gate in (None, "projected") and self.a == self.b == 1 and not self.k_max
        require_setting(
            is_projected or not self.near_original,
            "{near_original} is for projected top-k: leave out {gate} ramp, {a}, {b} and {k_max}",
        )
        require_setting(
            self.epsilon is None or self.noise is None,
            "{epsilon} goes with no other choice of ε: leave out {noise}",
        )
        require_setting(
            self.parallel in (None, "data"),
            "{parallel} {way}: smoothing compares a whole model with a whole copy of it, which one "
            "process saves: take data",
            way=self.parallel,
        )


class SmoothOptions(ModelOptions, total=False):
    """Keyword arguments of `smooth`."""

    serve: str
    budget: float | None
    noise: str | None
    epsilon: float | None
    factor: float | None
    max_moved: float | None
    near_original: bool
    gate: str | None
    a: float
    b: float
    k_max: int | None
    calibration: int
    rounds: int
    experts_impl: str | None


class RouteFileSettings(Settings):
    """Facts that a file of routes may not contain."""

    tokens: Any = setting(
        None,
        kind=Path,
        option="--ids",
        help="Token ids: .npy of (tokens,) or (documents, length), .npz, .safetensors or JSON.",
    )
    n_experts: int | None = setting(None, check=at_least(1), help="Number of experts of the model.")
    k: int | None = setting(
        None,
        check=at_least(1),
        option="-k --k",
        help="Experts per token, for files that do not say.",
    )
    layers: int | None = setting(
        None,
        check=at_least(1),
        option="--n-layers",
        help="Layers of the array, for SGLang, which does not say.",
    )
    start: int | None = setting(None, check=at_least(0), help="Position of the first row.")
    format: str | None = setting(
        None,
        help="vllm, sglang, tensorrt-llm, megatron, megatron-trace, verl, nemo, slime, miles, "
        "moe-trace, moe-atlas, log, table, torch or array; by default recognised by content.",
    )

    @property
    def import_arguments(self) -> dict[str, Any]:
        """Arguments of `tieline.trace.import_trace`."""
        return {name: getattr(self, name) for name in RouteFileSettings.fields_by_name()}


class CheckSettings(RouteFileSettings):
    """Options of `check` and `tieline check`."""

    model: Any = setting(None, kind=str, help="A model that routes a sample to compare with.")
    against: Any = setting(None, kind=str, help="Routes of the same tokens that are right.")
    device: str = setting("cpu", help="cpu, cuda, cuda:1, ... or auto.")


class RouteFileOptions(TypedDict, total=False):
    """Keyword arguments for facts that a file of routes may not contain."""

    tokens: Any
    n_experts: int | None
    k: int | None
    layers: int | None
    start: int | None
    format: str | None


class CheckOptions(RouteFileOptions, total=False):
    """Keyword arguments of `check`."""

    model: Any
    against: Any
    device: str


class ConvertSettings(RouteFileSettings):
    """Options of `convert` and `tieline convert`."""

    to: str = setting(help="vllm, sglang, verl, megatron, nemo, npz or trace.")
    model_layers: int | None = setting(
        None, check=at_least(1), help="Layers of the model, for forms that count dense layers."
    )
    drop: str | None = setting(
        None, help="warm-up: leave out rows of a dummy token and of exact ties of all experts."
    )
    overwrite: bool = setting(False, help="Replace an existing output.")


class ConvertOptions(RouteFileOptions, total=False):
    """Keyword arguments of `convert`."""

    to: str
    model_layers: int | None
    drop: str | None
    overwrite: bool


class MergeSettings(Settings):
    """Options of `merge` and `tieline merge`."""

    overwrite: bool = setting(False, help="Replace an existing folder of the same kind.")
    renumber: bool = setting(False, help="Give documents of traces new numbers.")


class MergeOptions(TypedDict, total=False):
    """Keyword arguments of `merge`."""

    overwrite: bool
    renumber: bool


class ServeCheckSettings(ServerSettings):
    """Options of `serve_check` and `tieline serve-check`."""

    engine: str = setting("vllm", check=one_of("vllm", "sglang"), help="vllm or sglang.")
    text: Text = setting(
        None, kind=Path, help="Text that prompts are cut from; by default the one in the box."
    )
    count: int = setting(16, check=at_least(2), help="How many prompts.")
    length: int = setting(64, check=at_least(8), help="Tokens per prompt that is cut from a text.")
    batch_size: int = setting(8, check=at_least(1), help="Prompts per batch.")
    model: Any = setting(
        None, kind=str, help="The model that is served, whose scores tell near-ties from bugs."
    )
    precision: str = setting(
        "bf16", check=one_of("fp32", "bf16", "fp16"), help="Precision that is served."
    )


class ServeCheckOptions(ServerOptions, total=False):
    """Keyword arguments of `serve_check`."""

    engine: str
    text: Text
    count: int
    length: int
    batch_size: int
    model: Any
    precision: str
