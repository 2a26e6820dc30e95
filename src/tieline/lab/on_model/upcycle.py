"""Upcycle a dense model: its feed-forward networks become experts, its function is kept.

done = upcycle("org/dense", n_experts=8, k=2)
done.output_change, done.loss_before, done.loss_after
done.save("mixture")
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Unpack

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.predictions import next_token_losses
from tieline.core.records import Result
from tieline.core.setting_fields import takes_settings
from tieline.core.statistics import SequenceSums
from tieline.lab.command_settings import UpcycleOptions, UpcycleSettings
from tieline.lab.on_model.subject import Progress
from tieline.lab.on_model.upcycled_model import upcycle_
from tieline.models.model import Model, ModelSource, load_dense
from tieline.models.saved_models import save_model
from tieline.run.corpus import stacked_batches, text_and_origin, tokenise
from tieline.run.forward import forward, only_running


class TextLoss(NamedTuple):
    """Mean loss in nats per token, its standard error clustered by sequence, tokens predicted.

    None for a single sequence.
    """

    value: float
    error: float | None
    tokens: int


@dataclass(frozen=True, repr=False)
class Upcycled(Result):
    """A dense model upcycled to a Mixture of Experts.

    Attributes:
        layers: names of the networks that became mixtures.
        n_experts: experts of each.
        k: experts per token.
        renormalise: whether the weights of a token sum to 1.
        parameters_before: parameters of the dense model.
        parameters_after: parameters of the mixture.
        parameters_per_token: parameters of the mixture that one token uses.
        noise: noise on the copies, relative to their size.
        output_change: largest change of an output over the largest output.
        loss_before: loss of the dense model on the text; None without a text.
        loss_after: loss of the mixture on the text; None without a text.
        model: name of the dense model.
        output: folder that the mixture was saved in; empty if not saved.
        mixture: the model itself; not part of the JSON.
        tokenizer: its tokenizer, or None; not part of the JSON.
    """

    format: ClassVar[str] = "tieline-upcycling"

    layers: tuple[str, ...]
    n_experts: int
    k: int
    renormalise: bool
    parameters_before: int
    parameters_after: int
    parameters_per_token: int
    noise: float
    output_change: float
    loss_before: TextLoss | None
    loss_after: TextLoss | None
    model: str
    output: str = ""
    mixture: Any = field(default=None, metadata={"json": False}, compare=False)
    tokenizer: Any = field(default=None, metadata={"json": False}, compare=False)

    @property
    def metrics(self) -> dict[str, float]:
        """Named numbers: "output_change", "loss_change", "parameters", "parameters_per_token"."""
        numbers = {
            "output_change": self.output_change,
            "parameters": float(self.parameters_after),
            "parameters_per_token": float(self.parameters_per_token),
        }
        if self.loss_before is not None and self.loss_after is not None:
            numbers["loss_change"] = self.loss_after.value - self.loss_before.value
        return numbers

    def save(self, folder: str | Path, overwrite: bool = False) -> None:
        """Save model and tokenizer in a new folder, completely or not at all.

        Args:
            folder: the folder to create.
            overwrite: whether an existing model may be replaced.
        """
        save_model(folder, self.mixture, self.tokenizer, overwrite=overwrite)


@takes_settings(UpcycleSettings)
def upcycle(
    source: ModelSource,
    *,
    settings: UpcycleSettings | None = None,
    progress: Progress | None = None,
    **options: Unpack[UpcycleOptions],
) -> Upcycled:
    """Turn a dense model into a Mixture of Experts that computes the same function, to rounding.

    A model that is given as `(model, tokenizer)` is changed in place.

    Args:
        source: a hub id, a folder, or `(model, tokenizer)`.
        settings: the options; keyword arguments change single ones. `text` may also be the text
            itself; without one, no loss is compared.
        progress: called with stage, done and total while the work goes on.
    """
    settings = UpcycleSettings.of(settings, options)
    text = None if settings.text is None else text_and_origin(settings.text)[0]
    loaded = _open_dense_model(source, settings.revision, settings.dtype)
    require(
        text is None or loaded.tokenizer is not None,
        "the model has no tokenizer, so no loss on a text",
    )
    model: Any = loaded.module
    before = probe_output(model)
    loss_before = _text_loss_if_given(loaded, text, settings.tokens, "loss before", progress)
    upcycling = upcycle_(model, **settings.layout)
    after = probe_output(model)
    return Upcycled(
        **vars(upcycling),
        noise=settings.copy_noise,
        output_change=((after - before).abs().max() / before.abs().max()).item(),
        loss_before=loss_before,
        loss_after=_text_loss_if_given(loaded, text, settings.tokens, "loss after", progress),
        model=loaded.name or type(model).__name__,
        mixture=model,
        tokenizer=loaded.tokenizer,
    )


def _open_dense_model(source: object, revision: str | None, dtype: str) -> Model:
    """Open a dense model from a name, a folder, a pair or a `Model`."""
    if isinstance(source, Model):
        return source
    if isinstance(source, str | Path):
        return load_dense(source, revision=revision, dtype=dtype)
    if isinstance(source, tuple) and len(source) in (2, 3):
        return Model(source[0], source[1], source[2] if len(source) == 3 else "")
    raise ParameterError(
        f"upcycle takes a hub id, a folder or (model, tokenizer), got {type(source).__name__}"
    )


def _text_loss_if_given(
    loaded: Model, text: str | None, tokens: int, stage: str, progress: Progress | None
) -> TextLoss | None:
    """Return the loss on the text; None without a text."""
    if text is None:
        return None
    on_progress = partial(progress, stage) if progress else None
    return text_loss(loaded.module, loaded.tokenizer, text, tokens=tokens, progress=on_progress)


@torch.no_grad()
def probe_output(
    model: PreTrainedModel, rows: int = 2, length: int = 16, seed: int = 0
) -> Float[Tensor, "*shape"]:
    """Return the model's first output (logits if it has any) for random tokens or pixels.

    Args:
        model: in evaluation mode.
        rows: sequences or images.
        length: tokens per sequence.
        seed: of the input.
    """
    generator, config = torch.Generator().manual_seed(seed), model.config
    if model.main_input_name == "pixel_values":
        size = config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        shape = (rows, config.num_channels, *sides)
        pixels = torch.randn(shape, generator=generator, device=generator.device)
        return model(pixel_values=pixels.to(model.device, model.dtype))[0]
    if model.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {model.main_input_name!r}, not tokens or pixels"
        )
    vocabulary = config.get_text_config().vocab_size
    shape = (rows, length)
    ids = torch.randint(vocabulary, shape, generator=generator, device=generator.device)
    return model(input_ids=ids.to(model.device))[0]


def text_loss(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    tokens: int = 16384,
    length: int = 256,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> TextLoss:
    """Compute the mean of -log P(x_t | x_<t) on a text in independent sequences, in nats.

    The standard error is clustered by sequence, because its tokens are not independent.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        text: any text.
        tokens: number of tokens to use.
        length: tokens per sequence.
        batch_size: sequences per forward pass.
        progress: called with the number of sequences done and of all.
    """
    sequences = [row for row in tokenise(tokenizer, text, tokens, length).sequences if len(row) > 1]
    require(bool(sequences), "the text is too short: it has no token to predict")
    sums, sequences_done = SequenceSums(), 0
    with only_running(model):
        for ids in stacked_batches(sequences, batch_size):
            sums.add(next_token_losses(forward(model, ids).logits, ids))
            sequences_done += len(ids)
            if progress is not None:
                progress(sequences_done, len(sequences))
    mean = sums.mean()
    assert mean.value is not None
    return TextLoss(mean.value, mean.standard_error, sum(len(row) - 1 for row in sequences))
