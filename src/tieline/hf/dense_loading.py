"""Loading dense models to make mixtures of, and running them on a few random inputs.

A model is a folder or hub id of transformers, or a file of llama2.c, whose name ends in .bin.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from tieline.errors import UnsupportedModelError, require
from tieline.hf.llama2c import load_llama2c, load_llama2c_tokenizer
from tieline.hf.loading import DTYPES, LoadedModel, _explained, _source
from tieline.hf.marks import load_pretrained

__all__ = ["load_dense", "probe_output"]


def load_dense(
    name: str | Path,
    *,
    tokenizer: str | Path | None = None,
    revision: str | None = None,
    dtype: str = "auto",
) -> LoadedModel:
    """A model of any kind, in evaluation mode, with its tokenizer or None.

    Args:
        name: folder, hub id, or model.bin of llama2.c.
        tokenizer: tokenizer.bin of llama2.c, only with its model.
        revision: branch, tag or commit on the hub.
        dtype: a name in `DTYPES`.
    """
    require(dtype in DTYPES, f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    if Path(name).suffix == ".bin":
        return _load_bin(Path(name), tokenizer, DTYPES[dtype])
    require(tokenizer is None, f"{str(name)!r} brings its own tokenizer, got {str(tokenizer)!r}")
    source = _source(name)
    options: dict[str, Any] = {"revision": revision}
    if isinstance(source, Path):
        options = {"local_files_only": True}
    with _explained(name, "configuration"):
        AutoConfig.from_pretrained(source, **options)
    with _explained(name, "weights (safetensors only: pickled weights are never loaded)"):
        model = load_pretrained(source, dtype=DTYPES[dtype], **options)
    return LoadedModel(model.eval(), _tokenizer(source, options), str(name))


def _load_bin(path: Path, tokenizer: str | Path | None, dtype: str | torch.dtype) -> LoadedModel:
    require(path.is_file(), f"no such file: {path}")
    model: Any = load_llama2c(path)
    words = None
    if tokenizer is not None:
        require(Path(tokenizer).is_file(), f"no such file: {tokenizer}")
        words = load_llama2c_tokenizer(tokenizer, model.config.vocab_size)
    model = model.to(dtype) if isinstance(dtype, torch.dtype) else model
    return LoadedModel(model, words, str(path))


def _tokenizer(source: str | Path, options: dict[str, Any]) -> Any:
    """The tokenizer; None for a model that has none, such as one of images."""
    try:
        return AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError):
        return None


@torch.no_grad()
def probe_output(
    model: PreTrainedModel, rows: int = 2, length: int = 16, seed: int = 0
) -> Float[Tensor, "*shape"]:
    """The model's first output, logits where it has any, for random tokens or pixels.

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
        pixels = torch.randn(rows, config.num_channels, *sides, generator=generator)
        return model(pixel_values=pixels.to(model.dtype))[0]
    require(
        model.main_input_name == "input_ids",
        f"{type(model).__name__} takes {model.main_input_name!r}, not tokens or pixels",
        UnsupportedModelError,
    )
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    return model(input_ids=ids)[0]
