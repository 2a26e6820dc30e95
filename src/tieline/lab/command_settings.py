"""Settings of the jobs of the laboratory: one class per job, one field per option.

See `tieline.run.shared_settings`, which has the groups of options that jobs share. Nothing large is
imported here: the command line makes its options from these classes.
"""

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

from tieline.core.setting_fields import (
    above,
    at_least,
    one_of,
    read_layers,
    read_numbers,
    read_whole_numbers,
    require_setting,
    setting,
)
from tieline.run.shared_settings import (
    DTYPES,
    HubSettings,
    SeedSettings,
    SequenceSettings,
    Text,
    TextSettings,
)

DEFAULT_MODEL_WIDTH = 2048
"""Width of a model if none is given."""

ROUTER_KINDS = {
    "cosine": "cosine",
    "perturbed": "cosine",
    "linear": "linear",
    "quadratic": "quadratic",
}
"""The kind of router (`tieline.routing.ROUTERS`) behind each name of `reroute`."""


class TextOptions(TypedDict, total=False):
    """Keyword arguments of jobs that run a model on a text, such as `attention_view`."""

    text: Text
    tokens: int
    batch_size: int
    device: str
    revision: str | None
    trust_remote_code: bool


class TrainSettings(SeedSettings):
    """Options of `train` and `tieline train`."""

    resume: bool = setting(False, help="Continue from the newest checkpoint of the folder.")
    schedule: str | None = setting(
        None,
        help="Temperature τ of a recipe …-cooled over the steps: constant, linear, cosine, or "
        "boundary, which halves the mass at the walls.",
    )
    tau_start: float | None = setting(None, help="τ of its first step, above 0.")
    tau_end: float | None = setting(None, help="τ of the last steps of linear and cosine.")
    halvings: int | None = setting(None, help="How often boundary halves the mass.")

    @property
    def cooling(self) -> dict[str, Any]:
        """The fields of `CoolingConfig` that are given."""
        fields = {
            "schedule": self.schedule,
            "start": self.tau_start,
            "end": self.tau_end,
            "halvings": self.halvings,
        }
        return {name: value for name, value in fields.items() if value is not None}


class TrainOptions(TypedDict, total=False):
    """Keyword arguments of `train`."""

    seed: int
    resume: bool
    schedule: str | None
    tau_start: float | None
    tau_end: float | None
    halvings: int | None


class DesignSettings(HubSettings, SeedSettings, TextSettings):
    """Options of `design` and `tieline design`."""

    n_experts: int | None = setting(None, help="Number of routed experts N.")
    k: int | None = setting(None, option="-k --k", help="Experts chosen per token, k.")
    expert_width: int | None = setting(None, help="Hidden neurons H of one expert.")
    d_eff: int = setting(
        16, check=at_least(1), help="Effective dimension of the inputs, usually 10 to 20."
    )
    split: Sequence[int] = setting(
        (1, 2, 4, 8),
        read=read_whole_numbers,
        help="Granularities m: mN experts, mk chosen, width H/m.",
    )
    preset: str | None = setting(None, help="A published shape, such as olmoe; 'list' shows all.")
    model: Any = setting(
        None, kind=str, help="Read the shape from the configuration of a folder or hub id."
    )
    hidden: int | None = setting(
        None, help=f"Width of the model; {DEFAULT_MODEL_WIDTH} if not known otherwise."
    )
    shared: int | None = setting(
        None, check=at_least(0), help="Shared experts that every token uses."
    )
    matrices: int = setting(3, help="Weight matrices of an expert: 3 with a gate, 2 without.")
    measure: bool = setting(False, help="Also run the model on a text and measure its layers.")
    tokens: int = setting(4096, check=at_least(3), help="Tokens of the text to run.")

    def check(self) -> None:
        """Raise unless the layer is described in exactly one way."""
        require_setting(
            not self.measure or self.model is not None,
            "{measure} runs a model: name it with {model}",
        )
        are_positive = [isinstance(m, int) and m >= 1 for m in self.split]
        require_setting(
            bool(are_positive) and all(are_positive),
            "{split} takes numbers from 1 on, got {m}",
            m=self.split,
        )
        sizes = {"n_experts": self.n_experts, "k": self.k, "expert_width": self.expert_width}
        given_names = [name for name, size in sizes.items() if size is not None]
        require_setting(
            bool(given_names) + bool(self.preset) + (self.model is not None) == 1,
            "say which layer: {n_experts}, {k} and {expert_width}, or {preset}, or {model}",
        )
        missing = ", ".join(
            f"{{{name}}}" for name in sizes if given_names and name not in given_names
        )
        require_setting(not missing, f"also give {missing}")


class DesignOptions(TextOptions, total=False):
    """Keyword arguments of `design`."""

    seed: int
    n_experts: int | None
    k: int | None
    expert_width: int | None
    d_eff: int
    split: Sequence[int] | str
    preset: str | None
    model: Any
    hidden: int | None
    shared: int | None
    matrices: int
    measure: bool


class JobSettings(SeedSettings):
    """Options of jobs that run many independent fits or tests."""

    executor: str = setting(
        "loky",
        check=one_of("loky", "dask", "serial"),
        help="loky (processes here), dask (a cluster) or serial.",
    )
    address: str | None = setting(None, help="Of the Dask scheduler, tcp://host:8786.")
    jobs: int = setting(-1, help="Processes at once; -1 for one per core.")

    def check(self) -> None:
        """Raise for an address without dask, or a number of processes below 1."""
        require_setting(
            self.address is None or self.executor == "dask",
            "{address} is for {executor} dask, not {name}",
            name=self.executor,
        )
        require_setting(
            self.jobs == -1 or self.jobs >= 1,
            "{jobs} must be at least 1, or -1 for one per core, got {count}",
            count=self.jobs,
        )


class RatesSettings(JobSettings):
    """Options of `tieline rates`."""

    gate: str | None = setting(None, help="linear, cosine, perturbed, quadratic or partial.")
    link: str | None = setting(None, help="softmax or sigmoid.")
    expert: str | None = setting(None, help="linear, polynomial, relu, gelu, tanh or two_layer.")
    d: int | None = setting(
        None, check=at_least(1), option="--dim", help="Dimension d of the inputs."
    )
    n_experts: int | None = setting(None, check=at_least(1), help="Experts of the truth.")
    fitted: int | None = setting(None, help="Experts to fit, if more than the truth has.")
    noise: float | None = setting(None, option="--sigma", help="Standard deviation of the noise.")
    sizes: Sequence[int] | None = setting(
        None, read=read_whole_numbers, help="Sample sizes, such as 1000,3000,10000."
    )
    repetitions: int | None = setting(
        None, check=at_least(2, most=1_000_000), help="Data sets for each size."
    )
    radii: Sequence[float] | None = setting(
        None, read=read_numbers, option="--radius", help="Start radii, such as 0.05,0.2,0.5."
    )
    shrink: bool = setting(False, help="Shrink the start radii like n^-1/2.")
    starts: int = setting(1, check=at_least(1), help="Starts for each data set.")
    method: str = setting(
        "lm", check=one_of("lm", "sgd", "adam"), help="lm, sgd (the papers' recipe) or adam."
    )
    error: float | None = setting(None, help="Estimate the sample size for this quotient loss.")
    results: Path | None = setting(None, help="File of JSON lines that keeps results between runs.")

    @property
    def family(self) -> dict[str, Any]:
        """Given options that describe an unnamed setting."""
        return self._given("gate", "link", "expert", "d", "n_experts", "fitted")

    @property
    def grid(self) -> dict[str, Any]:
        """Given options that are fields of `RatePlan`."""
        fixed = {"shrink": self.shrink, "starts": self.starts, "method": self.method}
        return self._given("sizes", "radii", "repetitions", "noise") | fixed | {"seed": self.seed}

    def _given(self, *names: str) -> dict[str, Any]:
        """Return the named options that are not None."""
        values = {name: getattr(self, name) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    def check_setting(self, setting: str | None) -> None:
        """Raise unless there is either a named setting or options that describe one."""
        extra = ", ".join(f"{{{name}}}" for name in self.family)
        require_setting(
            setting is None or not extra,
            f"{{setting}} is a complete setting: leave out {extra}",
            setting=setting,
        )
        require_setting(
            setting is not None or bool(set(self.family) - {"fitted"}),
            "say which setting: its name, or {gate}, {link} and {expert}; see --list",
        )


class ReproduceSettings(JobSettings):
    """Options of `reproduce` and `tieline reproduce`."""

    fast: bool = setting(False, help="Use smaller samples: minutes for everything.")
    results: Path | None = setting(
        None, help="Folder that keeps results between runs, one per claim."
    )


class ReproduceOptions(TypedDict, total=False):
    """Keyword arguments of `reproduce`."""

    seed: int
    executor: str
    address: str | None
    jobs: int
    fast: bool
    results: Path | None


class SubjectSettings(HubSettings, SeedSettings, SequenceSettings):
    """Options of jobs that run one model on one text in sequences."""

    tokens: int = setting(4096, check=at_least(1), help="How many tokens of the text.")
    dtype: str = setting(
        "auto", check=one_of(*DTYPES), help="Precision the model runs in: auto, fp32, bf16 or fp16."
    )
    layers: Collection[str | int] | None = setting(
        None, read=read_layers, help="Routed layers, such as 0,2,5-7, or names of routers."
    )


class SubjectOptions(TextOptions, total=False):
    """Keyword arguments of jobs that run one model on one text in sequences, such as `walks`."""

    sequence_length: int | None
    seed: int
    dtype: str
    layers: Collection[str | int] | str | None


class SoftenSettings(SubjectSettings):
    """Options of `soften` and `tieline soften`."""

    max_cost: float = setting(
        10.0,
        check=above(0.0),
        help="Most cost, in forward passes over 16,384 tokens; more is refused.",
    )
    tokens: int = setting(4096, check=at_least(256), help="Tokens of the sample.")


class SoftenOptions(SubjectOptions, total=False):
    """Keyword arguments of `soften`."""

    max_cost: float


def _read_single_layer(text: str) -> str | int:
    """Return the single layer that a text names; raises for several."""
    layers = read_layers(text)
    if len(layers) != 1:
        raise ValueError("takes one layer")
    return layers[0]


class SliceSettings(SubjectSettings):
    """Options of `slice_model` and `tieline slice`."""

    layer: str | int | None = setting(
        None,
        read=_read_single_layer,
        help="Layer, by position or name; by default the first with flat walls.",
    )
    places: Sequence[int] | None = setting(
        None,
        read=read_whole_numbers,
        help="Three tokens of the text by position, such as 7,80,300; by default drawn.",
    )
    tokens: int = setting(4096, check=at_least(3), help="How many tokens of the text.")


class SliceOptions(SubjectOptions, total=False):
    """Keyword arguments of `slice_model`."""

    layer: str | int | None
    places: Sequence[int] | str | None


class WalksSettings(SubjectSettings):
    """Options of `walks` and `tieline walks`."""

    tokens: int = setting(
        4096, check=at_least(1), help="How many tokens of the text; at most 2,048 are run."
    )
    dtype: str = setting(
        "fp32", check=one_of(*DTYPES), help="Precision the model runs in: auto, fp32, bf16 or fp16."
    )


class FrontierSettings(HubSettings, SeedSettings, TextSettings):
    """Options of `frontier` and `tieline frontier`."""

    noise: str = setting(
        "router bf16", help="The precision to repair: bf16, int8, 'router bf16', ...."
    )
    gate: str | None = setting(
        None,
        check=one_of("projected", "ramp"),
        help="projected (the default): tied experts share a seat; ramp: experts are added.",
    )
    calibration: int = setting(
        4096, check=at_least(64), help="Tokens before those, to learn the noise on."
    )
    scales: Sequence[float] | None = setting(
        None, option=None, help="Widths over the size of the noise; `SCALES` by default."
    )
    tokens: int = setting(16384, check=at_least(64), help="Tokens to measure on.")

    @property
    def gate_name(self) -> Literal["projected", "ramp"]:
        """The gate of the smoothed models."""
        return "ramp" if self.gate == "ramp" else "projected"


class FrontierOptions(TextOptions, total=False):
    """Keyword arguments of `frontier`."""

    seed: int
    noise: str
    gate: str | None
    calibration: int
    scales: Sequence[float] | None


class AttentionSettings(HubSettings, TextSettings):
    """Options of `attention_view` and `tieline attention`."""

    tokens: int = setting(4096, check=at_least(1), help="How many tokens of the text.")


class RerouteSettings(HubSettings, SeedSettings, TextSettings):
    """Options of `reroute` and `tieline reroute`."""

    router: str = setting(
        "perturbed",
        check=one_of(*ROUTER_KINDS),
        help="cosine (paper 2, eq. 2), perturbed (eq. 7), linear or quadratic (paper 4).",
    )
    fit: Text = setting(
        None, kind=Path, help="Text to fit to, UTF-8; by default the first tokens of the text."
    )
    fit_tokens: int = setting(8192, check=at_least(64), help="Tokens to fit to.")
    tokens: int = setting(8192, check=at_least(64), help="Tokens to measure on.")
    steps: int | None = setting(
        None, check=at_least(0), help="Steps of the fit; by default as many as keep the choices."
    )
    temperature: float | None = setting(None, help="Of cosine routers; fitted by default.")
    tau: Sequence[float] | None = setting(
        None, read=read_numbers, help="τ1,τ2 of perturbed cosine routers; 0.1,0.1 by default."
    )
    rank: int | None = setting(
        None, check=at_least(1), help="Of the matrices of quadratic routers; 8 by default."
    )

    def check(self) -> None:
        """Raise for options that belong to another kind of router."""
        require_setting(
            self.tau is None or len(self.tau) == 2,
            "{tau} takes two numbers such as 0.1,0.1, got {value}",
            value=self.tau,
        )
        kind = ROUTER_KINDS[self.router]
        foreign = {
            "temperature": self.temperature is not None and kind != "cosine",
            "tau": self.tau is not None and self.router != "perturbed",
            "rank": self.rank is not None and kind != "quadratic",
        }
        for name, is_foreign in foreign.items():
            message = f"{{{name}}} is an option of another router than {{chosen}}"
            require_setting(not is_foreign, message, chosen=repr(self.router))

    @property
    def router_options(self) -> dict[str, object]:
        """Arguments of the new routers that all layers share."""
        if self.router == "perturbed":
            return {"tau": tuple(self.tau or (0.1, 0.1))}
        return {"rank": self.rank or 8} if self.router == "quadratic" else {}


class RerouteOptions(TextOptions, total=False):
    """Keyword arguments of `reroute`."""

    seed: int
    router: str
    fit: Text
    fit_tokens: int
    steps: int | None
    temperature: float | None
    tau: Sequence[float] | str | None
    rank: int | None


def _nonnegative_rule(value: float) -> str:
    """Return "" if the value is finite and at least 0, else the violated rule."""
    return "" if 0 <= value < math.inf else "must be at least 0 and finite"


class UpcycleSettings(SeedSettings):
    """Options of `upcycle` and `tieline upcycle`."""

    n_experts: int = setting(8, check=at_least(2), help="Experts per layer.")
    k: int = setting(2, check=at_least(1), option="-k --k", help="Experts per token.")
    layers: Collection[str | int] | None = setting(
        None, read=read_layers, help="Feed-forward networks, such as 0,2,5-7; all by default."
    )
    router_init: str = setting(
        "normal", check=one_of("normal", "orthogonal"), help="normal or orthogonal."
    )
    router_scale: float = setting(0.02, check=above(0.0), help="Size of the router's entries.")
    copy_noise: float = setting(
        0.0,
        check=_nonnegative_rule,
        help="Noise on the copies, relative to their size; 0 for none.",
    )
    text: Text = setting(None, kind=Path, help="Text to compare the loss on, UTF-8.")
    tokens: int = setting(4096, check=at_least(2), help="How many tokens of the text.")
    dtype: str = setting("auto", check=one_of(*DTYPES), help="auto, fp32, bf16 or fp16.")
    revision: str | None = setting(None, help="Branch, tag or commit on the hub.")

    def check(self) -> None:
        """Raise if k exceeds the number of experts."""
        require_setting(
            self.k <= self.n_experts,
            "{k} {count} of {experts} experts: it must be at most {n_experts}",
            count=self.k,
            experts=self.n_experts,
        )

    @property
    def layout(self) -> dict[str, Any]:
        """Arguments of `upcycle_`."""
        names = ("n_experts", "k", "layers", "router_init", "router_scale", "seed")
        return {name: getattr(self, name) for name in names} | {"noise": self.copy_noise}


class UpcycleOptions(TypedDict, total=False):
    """Keyword arguments of `upcycle`."""

    seed: int
    n_experts: int
    k: int
    layers: Collection[str | int] | str | None
    router_init: str
    router_scale: float
    copy_noise: float
    text: Text
    tokens: int
    dtype: str
    revision: str | None
