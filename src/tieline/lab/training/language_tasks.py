"""Language modelling: Mixtral's decoder with a `routing.MoE` as every feed-forward part.

    h ← h + attention(norm(h));   h ← h + Σ_e w_e f_e(norm(h)),   w = gate(router(norm(h)))

Attention, norms, embeddings, generation and saving come from transformers' Mixtral; the routing
comes from `tieline.routing`, so any router and gate can be trained. A model with a linear router
and a top-k or smooth gate has exactly the parameters of Mixtral, and `stock_form` converts it, so
that capture, inspect, audit and smoothing can read it.

Held-out text is scored in whole windows:

    loss         mean -log p(token | tokens before it in its window), nats per token
    bpc          loss / ln 2, bits per byte or character
    perplexity   exp(loss); per word exp(total loss / words) if the data count words

Standard errors are of the mean over windows, that is, clustered by sequence.
"""

import math
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from tieline.core.errors import UnsupportedModelError, require
from tieline.core.predictions import next_token_losses
from tieline.lab.attention.model_attention import SIGMOID, attend_
from tieline.lab.training.config import DecoderConfig, GateConfig, TrainConfig
from tieline.lab.training.soft_to_hard import (
    TemperatureTopK,
    hard_gates,
    harden_,
    hardening_path,
)
from tieline.lab.training.text_data import Stream, TextStreams, Windows, load_streams
from tieline.models.saved_models import save_model
from tieline.models.smoothed_model import smooth_
from tieline.routing.gates import SelectiveGate
from tieline.routing.layer import MoE, moe
from tieline.routing.losses import collect_routing
from tieline.routing.routers import LinearRouter
from tieline.routing.smooth_gates import ProjectedTopK, SmoothTopK


class SwitchConfig(MixtralConfig):
    """Mixtral's configuration with fields for routing and attention.

    Args:
        routing: `router`, `gate` and their options, arguments of `routing.moe`.
        attention: "softmax" or "sigmoid".
        options: further fields of `MixtralConfig`.
    """

    model_type = "tieline_switch"

    def __init__(
        self,
        routing: dict[str, Any] | None = None,
        attention: str = "softmax",
        **options: Any,
    ) -> None:
        self.routing = routing or {"router": "linear", "gate": "topk"}
        self.attention = attention
        super().__init__(**options)


class RoutedBlock(nn.Module):
    """Feed-forward part of a layer: an `MoE` that is initialised like Mixtral's."""

    def __init__(self, config: SwitchConfig) -> None:
        super().__init__()
        self.moe = moe(
            d_model=config.hidden_size,
            n_experts=config.num_local_experts,
            k=config.num_experts_per_tok,
            d_hidden=config.intermediate_size,
            **{name: _with_tuples(value) for name, value in config.routing.items()},
        )
        std, depth = config.initializer_range, math.sqrt(2 * config.num_hidden_layers)
        with torch.no_grad():
            for name, weight in self.moe.named_parameters():
                if weight.ndim > 1:
                    weight.normal_(0, std / depth if name.endswith("w_out") else std)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return Σ_e w_e f_e(x)."""
        return self.moe(hidden_states)


def _with_tuples(value: Any) -> Any:
    """Restore the tuples of options that JSON turned into lists."""
    if isinstance(value, dict):
        return {k: tuple(v) if isinstance(v, list) else v for k, v in value.items()}
    return value


class SwitchForCausalLM(MixtralForCausalLM):
    """Mixtral with `RoutedBlock` in place of its sparse blocks."""

    config_class = SwitchConfig

    def __init__(self, config: SwitchConfig) -> None:
        if config.attention == "sigmoid":
            config._attn_implementation = SIGMOID
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = RoutedBlock(config)  # type: ignore[assignment]


AutoConfig.register(SwitchConfig.model_type, SwitchConfig)
AutoModelForCausalLM.register(SwitchConfig, SwitchForCausalLM)


def new_decoder(shape: DecoderConfig, gate: GateConfig) -> SwitchForCausalLM:
    """Build a new decoder, with weights drawn from torch's global generator."""
    routing = {
        "router": gate.router,
        "gate": gate.gate,
        "router_options": dict(gate.router_options),
        "gate_options": dict(gate.gate_options),
    }
    fields = _mixtral_fields(shape, gate.k)
    return SwitchForCausalLM(SwitchConfig(routing, shape.attention, **fields))


def _mixtral_fields(shape: DecoderConfig, k: int) -> dict[str, Any]:
    """Return the fields of a Mixtral configuration of this shape."""
    return {
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.d_model,
        "intermediate_size": shape.d_hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "max_position_embeddings": shape.context,
        "num_local_experts": shape.n_experts,
        "num_experts_per_tok": k,
        "initializer_range": shape.initial_std,
        "tie_word_embeddings": shape.tied,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": False,
        "router_aux_loss_coef": 0.0,  # the trainer adds the balance loss itself
    }


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """Return the routed layers of a model by name, in order of depth."""
    return {name: module for name, module in model.named_modules() if isinstance(module, MoE)}


NON_MIXTRAL_FIELDS = ("routing", "attention", "model_type")
"""Fields of `SwitchConfig` that are not passed on to Mixtral's configuration."""


def hard_stock_form(model: SwitchForCausalLM) -> MixtralForCausalLM:
    """Return a `MixtralForCausalLM` with hard top-k that shares the model's weights.

    A model trained with a smooth gate becomes its hard form; `trained_smoothing` returns the ramp
    that `smooth_` restores.
    """
    reason = stock_form_obstacle(model)
    require(reason is None, f"the model has no stock form: {reason}", UnsupportedModelError)
    fields = {k: v for k, v in model.config.to_dict().items() if k not in NON_MIXTRAL_FIELDS}
    with torch.device("meta"):
        stock = MixtralForCausalLM(MixtralConfig(**fields))
    stock.load_state_dict(_mixtral_state(model), strict=False, assign=True)
    stock.model.rotary_emb = model.model.rotary_emb
    stock.tie_weights()
    stock.config.architectures = ["MixtralForCausalLM"]
    if model.config.attention == "sigmoid":
        attend_(stock, "sigmoid")
    return stock.train(model.training)


def stock_form(model: SwitchForCausalLM) -> MixtralForCausalLM:
    """Return a stock model that computes the same function, smoothed if it was trained smooth.

    A gate whose budget was annealed to k becomes hard top-k. Every expert has a slot, so that no
    token's band is narrowed and both models compute the same.
    """
    stock, ramp = hard_stock_form(model), trained_smoothing(model)
    if ramp is not None and ramp["budget"] > ramp["k"]:
        slots, shape = stock.config.num_local_experts, {}
        if ramp["gate"] == "ramp":
            shape = {"a": ramp["a"], "b": ramp["b"], "k_max": slots}
        smooth_(stock, epsilon=ramp["epsilon"], gate=ramp["gate"], **shape)
    return stock


def stock_form_obstacle(model: nn.Module) -> str | None:
    """Return the reason why a model cannot be written as a Mixtral; None if it can."""
    for name, layer in moe_layers(model).items():
        router, gate = layer.router, layer.gate
        if not isinstance(router, LinearRouter) or router.bias is not None:
            return f"{name} scores by {router}"
        softmax = isinstance(gate, SelectiveGate) and gate.scoring == "softmax"
        if not (softmax and gate.renormalize and gate.selection_bias is None):
            return f"{name} combines by {gate}"
    return None


MIXTRAL_NAMES = {
    "mlp.moe.router.weight": "mlp.gate.weight",
    "mlp.moe.experts.w_in": "mlp.experts.gate_up_proj",
    "mlp.moe.experts.w_out": "mlp.experts.down_proj",
}


def _mixtral_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the weights under Mixtral's names, without the gates' θ."""
    state = {}
    for name, tensor in model.state_dict().items():
        for ours, theirs in MIXTRAL_NAMES.items():
            name = name.replace(ours, theirs)
        if not name.endswith("moe.gate.theta"):
            state[name] = tensor
    return state


def trained_smoothing(model: nn.Module) -> dict[str, Any] | None:
    """Return k, gate, ramp, budget and the ε of each layer of a smooth model; None for others."""
    gates = [layer.gate for layer in moe_layers(model).values()]
    smooth = [gate for gate in gates if isinstance(gate, SmoothTopK | ProjectedTopK)]
    if not smooth:
        return None
    first, ramp = smooth[0], {"gate": "projected"}
    if isinstance(first, SmoothTopK):
        ramp = {"gate": "ramp", "a": first.a, "b": first.b}
    epsilon = [gate.epsilon.item() for gate in smooth]
    return {"k": first.k, **ramp, "epsilon": epsilon, "budget": first.budget}


SCORED_WINDOWS, HARDENED_WINDOWS = 16, 64
"""Windows scored at once, and most windows on which soft and hard model are compared."""


@dataclass(frozen=True, eq=False)
class LanguageData:
    """Training windows, the streams they come from, and a description."""

    train: Windows
    streams: TextStreams
    about: str


class LanguageModelling:
    """The task "language"."""

    def data(self, config: TrainConfig) -> LanguageData:
        """Load the streams and draw training windows by the seed of the run."""
        shape = config.shape(DecoderConfig, "language")
        streams = load_streams(config.data)
        length = config.optim.steps * config.optim.batch
        train = Windows(streams.train, context=shape.context, length=length, seed=config.seed)
        return LanguageData(train, streams, streams.about)

    def model(self, config: TrainConfig) -> SwitchForCausalLM:
        """Build a new decoder."""
        return new_decoder(config.shape(DecoderConfig, "language"), config.gate)

    def evaluate(self, model: nn.Module, data: LanguageData, config: TrainConfig) -> dict[str, Any]:
        """Score validation, test and attacked splits, and describe the gates."""
        streams, context = data.streams, config.shape(DecoderConfig, "language").context
        splits = {"validation": streams.validation, "test": streams.test, **streams.attacked}
        scores: dict[str, Any] = {}
        with hard_gates(model) if config.gate.evaluate_hard else nullcontext():
            for name, stream in splits.items():
                losses, active = window_losses(model, stream, context, config.evaluate_items)
                word_count = streams.word_counts.get(name)
                scores[name] = _window_scores(
                    losses, stream.numel() / word_count if word_count else None
                )
                scores[name]["experts_per_token"] = active
        scores["smoothing"] = trained_smoothing(model)
        if config.gate.cooling is not None:
            scores["hardening"] = _final_hardening(model, streams.validation, config)
        return scores

    def save(self, model: nn.Module, data: LanguageData, folder: Path) -> None:
        """Write the model with its tokenizer, and its stock form if it has one."""
        assert isinstance(model, SwitchForCausalLM)
        harden_(model)  # a gate with a temperature is deployed hard
        tokenizer = data.streams.tokenizer
        save_model(folder, model, tokenizer, overwrite=True)
        if stock_form_obstacle(model) is None:
            stock = folder.parent / "stock"
            save_model(stock, stock_form(model), tokenizer, overwrite=True)


def _final_hardening(model: nn.Module, stream: Stream, config: TrainConfig) -> dict[str, Any]:
    """Return soft and hard validation loss at the last temperature, and the paired change."""
    context = config.shape(DecoderConfig, "language").context
    tau = next(gate for gate in model.modules() if isinstance(gate, TemperatureTopK)).temperature
    rows = scored_windows(stream, context, min(HARDENED_WINDOWS, config.evaluate_items))
    (point,) = hardening_path(model, rows, [tau])
    return {"tau": tau, "soft": point.soft, "hard": point.hard, "change": asdict(point.gap)}


def scored_windows(stream: Stream, context: int, limit: int) -> Tensor:
    """Return at most `limit` whole windows of a stream, evenly spaced."""
    windows = stream[: stream.numel() // context * context].view(-1, context)
    require(len(windows) >= 2, f"{stream.numel()} held-out tokens make no two windows of {context}")
    return windows[:: max(1, len(windows) // limit)][:limit].long()


@torch.no_grad()
def window_losses(
    model: nn.Module, stream: Stream, context: int, limit: int
) -> tuple[Float[Tensor, " windows"], float]:
    """Return the loss of at most `limit` whole windows, and the mean experts per token.

    Args:
        model: maps ids (B, context) to an output with logits.
        stream: held-out token ids.
        context: tokens of a window; the first is not predicted.
        limit: largest number of windows, evenly spaced over the stream.
    """
    losses, active, calls = [], 0.0, 0
    model.eval()
    for rows in scored_windows(stream, context, limit).split(SCORED_WINDOWS):
        with collect_routing(model) as records:
            logits = model(input_ids=rows).logits
        losses.append(next_token_losses(logits, rows).mean(dim=1))
        for record in records:
            active += record.routing.active.double().sum().item() / context
            calls += len(rows)
    return torch.cat(losses), active / max(1, calls)


def _window_scores(
    losses: Float[Tensor, " windows"], tokens_per_word: float | None
) -> dict[str, float]:
    """Return mean loss, bits per character and perplexities over windows."""
    mean, error = losses.mean().item(), (losses.std() / math.sqrt(len(losses))).item()
    scores = {
        "loss": mean,
        "standard_error": error,
        "bpc": mean / math.log(2),
        "perplexity": math.exp(mean),
        "windows": len(losses),
    }
    if tokens_per_word is not None:
        scores["word_perplexity"] = math.exp(mean * tokens_per_word)
    return scores
