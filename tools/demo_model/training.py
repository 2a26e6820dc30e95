"""The training loop of the demo model: a pure function of recipe, seed and text.

Batch t is drawn with a generator seeded by (seed, t) and a checkpoint holds the weights and both
moments of AdamW, so a run that was interrupted continues as if nothing had happened.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func

from tieline.core.errors import ParameterError, require
from tieline.core.ranking import stable_topk

from .recipe import Recipe

__all__ = ["train", "validate"]

MOMENTS = ("exp_avg", "exp_avg_sq")


def train(
    model: PreTrainedModel, stream: Tensor, held_out: Tensor, recipe: Recipe, checkpoint: Path
) -> dict[str, Any]:
    """Train from the checkpoint, if there is one, to the last step; returns curve and time."""
    optimizer = _optimizer(model, recipe)
    state = {"step": 0, "seconds": 0.0, "cpu_seconds": 0.0, "curve": [], "recipe": asdict(recipe)}
    if checkpoint.exists():
        state = _load_checkpoint(checkpoint, model, optimizer, recipe)
    every = recipe.steps // recipe.evaluations
    while state["step"] < recipe.steps:
        began, first = (time.perf_counter(), time.process_time()), state["step"]
        steps = range(first, first + every)
        losses = [_update(model, optimizer, stream, recipe, step) for step in steps]
        validation, _ = validate(model, held_out, recipe)
        state["step"] = steps.stop
        state["seconds"] += time.perf_counter() - began[0]
        state["cpu_seconds"] += time.process_time() - began[1]
        point = {"step": steps.stop, "seconds": round(state["seconds"], 1)}
        point |= {"training_loss": sum(losses) / every, "validation_loss": validation.mean().item()}
        state["curve"].append(point)
        sys.stderr.write(json.dumps(point) + "\n")
        _save_checkpoint(checkpoint, model, optimizer, state)
    return state


@torch.no_grad()
def validate(model: PreTrainedModel, held_out: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Loss of each whole window of the held-out text, and the choices per (layer, expert)."""
    length = recipe.context + 1
    windows = held_out[: held_out.numel() // length * length].view(-1, length)
    load = torch.zeros(recipe.layers, recipe.experts, dtype=torch.long)
    losses = []
    for rows in windows.split(8):
        predicted, scores = _run(model, rows[:, :-1])
        losses += [_language_loss(z, y).item() for z, y in zip(predicted, rows[:, 1:], strict=True)]
        for layer, logits in enumerate(scores):
            chosen = stable_topk(logits, recipe.top_k).indices.flatten()
            load[layer] += torch.bincount(chosen, minlength=recipe.experts)
    return torch.tensor(losses, dtype=torch.float64), load


def _update(
    model: PreTrainedModel, optimizer: torch.optim.AdamW, stream: Tensor, r: Recipe, step: int
) -> float:
    """One step on language loss + balance * Switch loss; returns the language loss.

    The balance loss is taken layer by layer and averaged: pooled over the layers, as the model
    itself would do, an expert idle in one layer is excused by a busy one in another.
    """
    for group in optimizer.param_groups:
        group["lr"] = r.rate(step)
    batch = _batch(stream, r, step)
    predicted, scores = _run(model, batch[:, :-1])
    loss = _language_loss(predicted, batch[:, 1:])
    uneven = [
        torch.as_tensor(load_balancing_loss_func((logits,), r.experts, r.top_k))
        for logits in scores
    ]
    (loss + r.balance * torch.stack(uneven).mean()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), r.clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def _run(model: PreTrainedModel, ids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits of the next tokens and router logits by layer.

    Not every family hands the latter on, but the decoder of each one records them.
    """
    output = model.base_model(input_ids=ids, output_router_logits=True, use_cache=False)
    head = model.get_output_embeddings()
    assert head is not None
    return head(output.last_hidden_state), output.router_logits


def _batch(stream: Tensor, recipe: Recipe, step: int) -> Tensor:
    """Windows of context + 1 tokens of the training stream, drawn by (seed, step) alone."""
    generator = torch.Generator().manual_seed(recipe.seed * 1_000_003 + step)
    last = stream.numel() - recipe.context
    starts = torch.randint(last, (recipe.batch, 1), generator=generator)
    return stream[starts + torch.arange(recipe.context + 1)]


def _language_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean of -log p(token | tokens before it), in nats per token."""
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


def _optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.AdamW:
    """AdamW; norms are not decayed."""
    groups = [
        {"params": [p], "weight_decay": recipe.weight_decay if p.ndim > 1 else 0.0}
        for p in model.parameters()
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.98))


def _save_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.AdamW, state: dict[str, Any]
) -> None:
    """Weights, moments and state as safetensors, replacing the file in one move."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors["weight." + name] = p.detach()
        tensors |= {f"{moment}.{name}": optimizer.state[p][moment] for moment in MOMENTS}
    save_file(tensors, path.with_suffix(".new"), {"state": json.dumps(state)})
    os.replace(path.with_suffix(".new"), path)


def _load_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.AdamW, recipe: Recipe
) -> dict[str, Any]:
    """Restore what `_save_checkpoint` wrote; returns its state."""
    with safe_open(path, "pt") as file, torch.no_grad():
        state = json.loads(file.metadata()["state"])
        require(
            state["recipe"] == asdict(recipe),
            f"{path} continues the recipe {state['recipe']}, not {asdict(recipe)}",
            ParameterError,
        )
        for name, p in model.named_parameters():
            p.copy_(file.get_tensor("weight." + name))
            moments = {moment: file.get_tensor(f"{moment}.{name}") for moment in MOMENTS}
            optimizer.state[p] = {"step": torch.tensor(float(state["step"])), **moments}
    return state
