"""The model and the text that a paper's question is asked of."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tieline.analysis.inspect import router_names
from tieline.lab.command_settings import SubjectSettings
from tieline.models.model import Model, ModelSource
from tieline.run.corpus import TokenisedText, as_text, default_length, tokenise

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


def open_subject(
    source: ModelSource,
    settings: SubjectSettings,
    job: str,
    longest: int = 512,
    tokens: int | None = None,
) -> Subject:
    """Load a model and cut the text.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: how the model is loaded and what it is run on.
        job: beginning of the error if the source is of the wrong kind, such as "slice takes".
        longest: tokens per sequence unless `sequence_length` is given.
        tokens: tokens of the text, by default those of the settings.
    """
    content, origin = as_text(settings.text)
    names = ("device", "revision", "dtype", "trust_remote_code")
    loaded = Model.open(source, job, **{name: getattr(settings, name) for name in names})
    model = loaded.module
    length = settings.sequence_length or default_length(model, longest)
    text = tokenise(loaded.tokenizer, content, tokens or settings.tokens, length)
    provenance = {"text": origin, "tokens": text.tokens}
    provenance |= {"batch_size": settings.batch_size, "seed": settings.seed}
    name = loaded.name or type(model).__name__
    routers = router_names(model, settings.layers)
    return Subject(model, loaded.tokenizer, name, routers, text, provenance)
