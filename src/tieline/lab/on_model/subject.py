"""The model and text that a laboratory command works on."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from tieline.analysis.inspect import router_names
from tieline.lab.command_settings import SubjectSettings
from tieline.models.model import Model, ModelSource
from tieline.run.corpus import TokenisedText, default_sequence_length, text_and_origin, tokenise

Progress = Callable[[str, int, int], None]
"""Called with a stage, the steps done and their total number."""


class Subject(NamedTuple):
    """A model in memory, its selected routers and its tokenised text.

    Attributes:
        model: the model, in evaluation mode.
        tokenizer: its tokenizer.
        name: the name it was loaded by, or its class.
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
    max_length: int = 512,
    tokens: int | None = None,
) -> Subject:
    """Load a model and tokenise the text.

    Args:
        source: a hub id, a folder, "demo" for the model in the box, or `(model, tokenizer)`.
        settings: how to load the model, and the text to run it on.
        job: first words of the error for a wrong kind of source, such as "slice takes".
        max_length: largest default length of a sequence; `sequence_length` overrides it.
        tokens: number of tokens of the text, by default `settings.tokens`.
    """
    content, origin = text_and_origin(settings.text)
    names = ("device", "revision", "dtype", "trust_remote_code")
    loaded = Model.open(source, job, **{name: getattr(settings, name) for name in names})
    model = loaded.module
    length = settings.sequence_length or default_sequence_length(model, max_length)
    text = tokenise(loaded.tokenizer, content, tokens or settings.tokens, length)
    provenance = {"text": origin, "tokens": text.tokens}
    provenance |= {"batch_size": settings.batch_size, "seed": settings.seed}
    name = loaded.name or type(model).__name__
    routers = router_names(model, settings.layers)
    return Subject(model, loaded.tokenizer, name, routers, text, provenance)
