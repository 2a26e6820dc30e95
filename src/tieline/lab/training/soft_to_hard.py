r"""Train with a soft choice of temperature τ → 0 and deploy hard top-k (paper 0).

    P_τ(S) ∝ exp(Σ_{i∈S} c_i / τ)              over the sets S of k experts
    r_i = P_τ(i ∈ S),   w_i ∝ score(z_i) r_i   `TemperatureTopK`

For k = 1 the weights are softmax(z/τ'), 1/τ' = 1 + 1/τ: the soft routing of paper 0, eq. 2.2. With
Δ the gap at the threshold, M = C(E, k) - 1 other sets, c = 1 for k = 1 and 2 beyond, the weights of
the soft and of the hard gate differ by a total variation of

    TV <= min(1, c q),    q = 1 - P_τ(best set) <= M e^{-Δ/τ}

(proof in docs/limits.md). So a layer with experts ‖f_e‖ <= B that is hardened on the same inputs
changes by at most

    E‖h_τ - h_0‖² <= 4B² E[min(1, c M e^{-Δ/τ})²] <= C_sh τ        if P(Δ <= t) <= C t,

C_sh being that of Theorem 4.5 for B_f = B_Y = B with M in place of E - 1.

    Cooling            sets τ by a schedule, keeps the norm of every router, hardens at the end
    CoolingCallback    the same for any `transformers.Trainer`
    hardening_path     losses of the soft and of the hard model at given τ, beside the bounds
    when_to_stop       the largest τ from which hardening is free, within the error of the losses

The norm of every router is fixed because L_τ(φ) = L_1(φ/τ): with a free norm, τ has no effect.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Unpack

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from transformers import TrainerCallback

from tieline.core.errors import ParameterError, TielineError, require
from tieline.core.predictions import next_token_losses
from tieline.core.ranking import gap
from tieline.core.statistics import Estimate, mean_estimate
from tieline.lab.limits.risk import soft_to_hard_constant
from tieline.lab.limits.temperature_limit import margin_constant
from tieline.lab.training.config import CoolingConfig
from tieline.routing.gates import ChoiceOptions, Law, Scores, SelectiveGate, Share, TopK
from tieline.routing.layer import GATES, MoE
from tieline.routing.smooth_gates import BandGate

__all__ = [
    "Cooling",
    "CoolingCallback",
    "HardeningPoint",
    "LayerHardening",
    "TemperatureTopK",
    "hard_gates",
    "harden_",
    "hardening_path",
    "inclusion_probabilities",
    "moved_weight_bound",
    "when_to_stop",
]

LOG_EMPTY_SUM = -1e30
"""Logarithm of an empty sum; finite, so that its gradient is zero and not NaN."""
MIN_SHARE = 2.0**-24
"""Shares below this, the rounding of 1 in float32, become zero, so that a cold gate is sparse."""


def inclusion_probabilities(logits: Scores, k: int) -> Share:
    """Return P(i ∈ S) for sets S of k experts with P(S) ∝ exp(Σ_{i∈S} x_i).

    Computed by elementary symmetric polynomials in logarithms: sums over the experts before and
    after i give the sum over all sets that contain i, in O(E k²) and without differences. Uses
    float64, since logits of a cold gate are so large that float32 would round their sums by more
    than 1.

    Args:
        logits: x (..., E).
        k: 1 <= k <= E.
    """
    x = (logits - logits.amax(dim=-1, keepdim=True)).double()
    before, after = _log_subset_sums(x, k), _log_subset_sums(x.flip(-1), k)
    total = before[-1][..., k]
    experts = range(x.shape[-1])
    others = [
        (before[i][..., :k] + after[len(experts) - 1 - i][..., :k].flip(-1)).logsumexp(dim=-1)
        for i in experts
    ]
    log_share = x + torch.stack(others, dim=-1) - total.unsqueeze(-1)
    return log_share.exp().clamp(max=1.0).to(logits)


def _log_subset_sums(x: Tensor, k: int) -> list[Tensor]:
    """Return log Σ_S exp(Σ_S x), S the sets of 0 to k of the first i experts, for i = 0 to E."""
    first = x.new_full((*x.shape[:-1], k + 1), LOG_EMPTY_SUM)
    sums = [torch.cat([torch.zeros_like(first[..., :1]), first[..., 1:]], dim=-1)]
    for logit in x.unbind(dim=-1):
        last = sums[-1]
        with_expert = last[..., :-1] + logit.unsqueeze(-1)
        sums.append(torch.cat([last[..., :1], torch.logaddexp(last[..., 1:], with_expert)], -1))
    return sums


class TemperatureTopK(SelectiveGate):
    """Top-k at temperature τ: every expert has the share P_τ(i ∈ S); hard top-k for τ → 0.

    Args:
        k: experts of the hard gate.
        temperature: τ > 0, in units of the selection scores; a schedule may change it.
        options: see `SelectiveGate`; groups are not supported.
    """

    laws = frozenset(Law)

    def __init__(
        self, k: int, *, temperature: float = 1.0, **options: Unpack[ChoiceOptions]
    ) -> None:
        super().__init__(k, **options)
        require(self.groups is None, "TemperatureTopK has no groups")
        self.temperature = temperature

    @property
    def temperature(self) -> float:
        """τ."""
        return self._temperature

    @temperature.setter
    def temperature(self, tau: float) -> None:
        require(0 < tau < math.inf, f"a temperature must be positive and finite, got {tau}")
        self._temperature = float(tau)

    def share(self, selection: Scores) -> Share:
        """Return P_τ(i ∈ S), zero below `MIN_SHARE`."""
        share = inclusion_probabilities(selection / self.temperature, self.k)
        return share.masked_fill(share < MIN_SHARE, 0.0)

    def hard(self) -> TopK:
        """Return hard top-k with the same options, the limit τ → 0."""
        options = {name: getattr(self, name) for name in ("scoring", "order", "renormalize")}
        return TopK(self.k, selection_bias=self.selection_bias, scale=self.scale, **options)

    def extra_repr(self) -> str:
        """Options of the choice, and the temperature."""
        return f"{super().extra_repr()}, temperature={self.temperature:g}"


GATES["temperature"] = TemperatureTopK


def soft_layers(model: nn.Module) -> list[MoE]:
    """Return the layers of a model whose gates have a temperature."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    return [layer for layer in layers if isinstance(layer.gate, TemperatureTopK)]


def soft_gate(layer: MoE) -> TemperatureTopK:
    """Return the gate of one of `soft_layers`."""
    assert isinstance(layer.gate, TemperatureTopK)
    return layer.gate


def harden_(model: nn.Module) -> nn.Module:
    """Replace every gate with a temperature permanently by its hard limit; return the model."""
    for layer in soft_layers(model):
        layer.gate = soft_gate(layer).hard()
    routing = getattr(getattr(model, "config", None), "routing", None)
    if isinstance(routing, dict) and routing.get("gate") == "temperature":
        options = {k: v for k, v in routing["gate_options"].items() if k != "temperature"}
        routing |= {"gate": "topk", "gate_options": options}
    return model


@contextmanager
def hard_gates(model: nn.Module) -> Iterator[None]:
    """Context manager in which every smooth gate is replaced by hard top-k."""
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    gates = [layer.gate for layer in layers]
    for layer in layers:
        if isinstance(layer.gate, BandGate):
            layer.gate = TopK(layer.gate.k)
        elif isinstance(layer.gate, TemperatureTopK):
            layer.gate = layer.gate.hard()
    try:
        yield
    finally:
        for layer, gate in zip(layers, gates, strict=True):
            layer.gate = gate


class Cooling:
    """Sets the temperature of all gates of a model by a schedule, with fixed router norms.

    Args:
        model: a model with `TemperatureTopK` gates.
        config: the schedule.
        steps: number of steps of the run.
    """

    def __init__(self, model: nn.Module, config: CoolingConfig, steps: int) -> None:
        self.layers, self.config = soft_layers(model), config
        require(bool(self.layers), "the model has no gate with a temperature to cool")
        self.until = max(1, round(config.until * steps))
        self._temperature = config.start
        self._norms = [_router_norm(layer) for layer in self.layers]
        self._gaps: dict[int, Tensor] = {}
        if config.schedule == "boundary":
            for number, layer in enumerate(self.layers):
                soft_gate(layer).register_forward_pre_hook(self._gap_recorder(number))

    @property
    def temperature(self) -> float:
        """τ of the gates."""
        return self._temperature

    @temperature.setter
    def temperature(self, tau: float) -> None:
        self._temperature = tau
        for layer in self.layers:
            soft_gate(layer).temperature = tau

    def begin(self, step: int) -> None:
        """Set τ for a step, counted from 0."""
        measured = self.config.schedule == "boundary"
        self.temperature = self._temperature if measured else self.config.at(step / self.until)

    def end(self, done: int) -> None:
        """Restore the norms of the routers after an update; "boundary" may halve BM(τ)."""
        count = self.config.halvings  # equally spaced, the last at `until`
        halvings = {round(self.until * number / count) for number in range(1, count + 1)}
        if self.config.schedule == "boundary" and done in halvings:
            gaps = torch.cat(list(self._gaps.values()))
            self.temperature = halved_temperature(gaps, self.temperature)
        with torch.no_grad():
            for layer, norm in zip(self.layers, self._norms, strict=True):
                weight = layer.router.get_parameter("weight")
                weight.mul_(norm / weight.norm())

    def _gap_recorder(self, number: int) -> Any:
        """Return a hook that stores the gaps of a layer's last training batch."""

        def record_gaps(gate: TemperatureTopK, scores: tuple[Tensor, ...]) -> None:
            if gate.training:
                selection = gate.selection(scores[0].detach().float()).flatten(0, -2)
                self._gaps[number] = gap(selection, gate.k)

        return record_gaps


def _router_norm(layer: MoE) -> float:
    """Return the norm of a router's matrix; raises if it is zero."""
    weight = getattr(layer.router, "weight", None)
    require(isinstance(weight, Tensor), f"cooling needs a router with a matrix, got {layer.router}")
    assert isinstance(weight, Tensor)
    norm = weight.norm().item()
    require(norm > 0, "the router is zero: its norm cannot be kept")
    return norm


def halved_temperature(gaps: Float[Tensor, " tokens"], temperature: float) -> float:
    """Return τ' with BM(τ') = BM(τ)/2, BM(τ) = P(Δ <= τ) on these gaps, averaged over processes.

    Raises if fewer than two tokens have a gap of at most τ: their mass cannot be halved.
    """
    inside = int((gaps <= temperature).sum())
    require(
        inside >= 2,
        f"BM(τ = {temperature:.3g}) is {inside} of {len(gaps)} tokens and cannot be halved: "
        "use fewer halvings or a larger batch",
        TielineError,
    )
    tau = gaps.double().sort().values[inside // 2 - 1].clamp(min=torch.finfo(torch.float32).tiny)
    if dist.is_initialized():
        dist.all_reduce(tau)
        tau /= dist.get_world_size()
    return tau.item()


class CoolingCallback(TrainerCallback):
    """Cools the gates of a model under any `transformers.Trainer` and hardens it at the end.

        trainer = Trainer(model, ..., callbacks=[CoolingCallback(CoolingConfig(schedule="cosine"))])

    Args:
        config: the schedule.
        harden: replace the gates by hard top-k when training ends.
    """

    def __init__(self, config: CoolingConfig, harden: bool = True) -> None:
        self.config, self.harden = config, harden
        self.cooling: Cooling | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the gates of the model."""
        self.cooling = Cooling(kwargs["model"], self.config, state.max_steps)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Set the temperature of this step."""
        assert self.cooling is not None
        self.cooling.begin(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the norms of the routers."""
        assert self.cooling is not None
        self.cooling.end(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Replace the gates by hard top-k if `harden`."""
        if self.harden:
            harden_(kwargs["model"])


@dataclass(frozen=True)
class LayerHardening:
    """Change of one layer by hardening at one temperature, on the inputs of the hard model."""

    moved: float  # E‖h_τ - h_0‖²
    chain: float  # the bound 4B² E[min(1, c M e^{-Δ/τ})²], from measured gaps
    bound: float  # C_sh τ, that of Theorem 4.5 for top-k
    C_sh: float  # its constant
    boundary_mass: float  # BM(τ) = P(Δ <= τ)


@dataclass(frozen=True)
class HardeningPoint:
    """A model at one temperature: soft and hard loss, their paired difference, and its layers."""

    tau: float
    soft: float
    hard: float
    gap: Estimate
    layers: tuple[LayerHardening, ...]


def moved_weight_bound(
    gaps: Float[Tensor, " tokens"], tau: float, k: int, n_experts: int
) -> Float[Tensor, " tokens"]:
    """Return min(1, c M e^{-Δ/τ}), the bound on each token's TV between soft and hard weights."""
    others = math.comb(n_experts, k) - 1
    return (others * (1 if k == 1 else 2) * (-gaps.double() / tau).exp()).clamp(max=1.0)


@torch.no_grad()
def hardening_path(
    model: nn.Module, rows: Float[Tensor, "windows context"] | Tensor, taus: Sequence[float]
) -> tuple[HardeningPoint, ...]:
    """Return soft and hard loss at each τ, and the change of every layer by hardening.

    Gates and training mode are restored.

    Args:
        model: maps ids to logits; its gates are `TemperatureTopK`.
        rows: ids (windows, context), scored as in `window_losses`.
        taus: temperatures > 0.
    """
    layers, training = soft_layers(model), model.training
    require(bool(layers), "the model has no gate with a temperature")
    require(all(tau > 0 for tau in taus), f"temperatures must be positive, got {list(taus)}")
    gates = [soft_gate(layer) for layer in layers]
    temperatures = [gate.temperature for gate in gates]
    inputs: dict[nn.Module, Tensor] = {}

    def keep_input(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs[layer] = arguments[0].flatten(0, -2)

    model.eval()
    try:
        for layer in layers:
            layer.gate = soft_gate(layer).hard()
        handles = [layer.register_forward_pre_hook(keep_input) for layer in layers]
        hard = next_token_losses(model(input_ids=rows).logits, rows).mean(dim=1).double()
        for handle in handles:
            handle.remove()
        for layer, gate in zip(layers, gates, strict=True):
            layer.gate = gate
        return tuple(_hardening_point(model, layers, inputs, rows, hard, tau) for tau in taus)
    finally:
        for layer, gate, tau in zip(layers, gates, temperatures, strict=True):
            layer.gate, gate.temperature = gate, tau
        model.train(training)


def _hardening_point(
    model: nn.Module,
    layers: Sequence[MoE],
    inputs: dict[nn.Module, Tensor],
    rows: Tensor,
    hard: Tensor,
    tau: float,
) -> HardeningPoint:
    """Measure the model at one temperature, compared with the losses of the hard model."""
    for layer in layers:
        soft_gate(layer).temperature = tau
    soft = next_token_losses(model(input_ids=rows).logits, rows).mean(dim=1).double()
    measured = tuple(_layer_hardening(layer, inputs[layer], tau) for layer in layers)
    difference = mean_estimate(soft - hard)
    return HardeningPoint(tau, soft.mean().item(), hard.mean().item(), difference, measured)


def _layer_hardening(layer: MoE, x: Tensor, tau: float) -> LayerHardening:
    """Measure the change of a layer's output by hardening its gate, with its bounds."""
    scores, gate = layer.router(x), soft_gate(layer)
    soft, hard = (layer.experts(x, choice(scores)) for choice in (gate, gate.hard()))
    n_experts = scores.shape[-1]
    one_hot_rows = torch.eye(n_experts, dtype=x.dtype, device=x.device)
    outputs = (layer.experts(x, row.expand(len(x), -1).contiguous()) for row in one_hot_rows)
    largest = max(output.norm(dim=1).max().item() for output in outputs)
    gaps = gap(gate.selection(scores.double()), gate.k)
    weight = moved_weight_bound(gaps, tau, gate.k, n_experts)
    tail = margin_constant(gaps, 1.0, least=min(100, len(gaps))).value or math.nan
    others = math.comb(n_experts, gate.k) - 1
    constant = soft_to_hard_constant(
        B_f=largest, B_Y=largest, n_experts=others + 1, C=tail, alpha=1.0
    )
    return LayerHardening(
        (soft - hard).double().square().sum(dim=1).mean().item(),
        4 * largest**2 * weight.square().mean().item(),
        constant * tau,
        constant,
        (gaps <= tau).double().mean().item(),
    )


def when_to_stop(path: Sequence[HardeningPoint], standard_errors: float = 2.0) -> float:
    """Return the largest τ at and below which hardening changes the loss by at most its error.

    Raises if there is none, since the model must then be cooled further.
    """
    harmless_taus: list[float] = []
    for point in sorted(path, key=lambda point: point.tau):
        change, error = abs(point.gap.value or 0.0), point.gap.standard_error or 0.0
        if change > standard_errors * error:
            break
        harmless_taus.append(point.tau)
    if harmless_taus:
        return harmless_taus[-1]
    lowest = min(path, key=lambda point: point.tau)
    raise ParameterError(
        f"hardening at τ = {lowest.tau:g}, the lowest of the path, changes the loss by "
        f"{lowest.gap.value:+.3g}, more than {standard_errors:g} standard errors: cool further"
    )
