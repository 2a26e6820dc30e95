"""The model and the text that a paper's question is asked of."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from tieline.analysis.inspect import router_names
from tieline.analysis.sources import ModelSource, as_model
from tieline.core.errors import require
from tieline.run.corpus import Text, TokenisedText, as_text, default_length, tokenise

Progress = Callable[[str, int, int], None]
"""Called with a stage, what is done, and of how much."""


class Subject(NamedTuple):
    """A model in memory, the routers looked at, and its tokenised text.

    Attributes:
        model: the model, in evaluation mode.
        tokenizer: its tokenizer.
        name: what it was loaded by, or its class.
        routers: names of the routers, in the order of the model.
        text: the text in sequences.
        provenance: text, tokens, batch size and seed, as JSON values.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    routers: tuple[str, ...]
    text: TokenisedText
    provenance: dict[str, object]


@dataclass(frozen=True)
class SubjectOptions:
    """How a model is loaded, and what it is run on.

    Attributes:
        text: a str, the Path of a file, or None for the text in the box.
        tokens: how many tokens of it; a short text gives fewer.
        batch_size: sequences per forward pass.
        sequence_length: tokens per sequence; by default 512, or what the model takes if less.
        layers: routers to look at, by name or by place in the model; all by default.
        seed: seed of all random numbers.
        dtype: precision to load a named model in: "auto", "fp32", "bf16" or "fp16".
        device: where to load it: "cpu", "cuda", "cuda:1", ... or "auto".
        revision: its branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with it may run.
    """

    text: Text = None
    tokens: int = 4096
    batch_size: int = 8
    sequence_length: int | None = None
    layers: Collection[str | int] | None = None
    seed: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    revision: str | None = None
    trust_remote_code: bool = False

    def open(self, source: ModelSource, job: str, longest: int = 512) -> Subject:
        """Load the model and cut the text.

        Args:
            source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
            job: beginning of the error if it is of the wrong kind, such as "slice takes".
            longest: tokens per sequence unless `sequence_length` is given.
        """
        require(self.batch_size >= 1, f"batch_size must be at least 1, got {self.batch_size}")
        words, origin = as_text(self.text)
        where = {"device": self.device, "revision": self.revision, "dtype": self.dtype}
        loaded = as_model(source, job, **where, trust_remote_code=self.trust_remote_code)
        model = loaded.model
        length = self.sequence_length or default_length(model, longest)
        text = tokenise(loaded.tokenizer, words, self.tokens, length)
        provenance = {"text": origin, "tokens": text.tokens}
        provenance |= {"batch_size": self.batch_size, "seed": self.seed}
        name = loaded.name or type(model).__name__
        routers = router_names(model, self.layers)
        return Subject(model, loaded.tokenizer, name, routers, text, provenance)
