"""Options of what is routed and how it is run: groups that jobs share, and those of a capture.

The settings class of a job inherits from the groups that it needs; see
`tieline.core.setting_fields`. Nothing large is imported here: the command line makes its options
from these classes.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from tieline.core.setting_fields import (
    Settings,
    above,
    at_least,
    one_of,
    read_memory,
    require_setting,
    setting,
)

Text = str | Path | None
"""A text, the path of a file, or None for the text in the box."""

DTYPES = ("auto", "fp32", "bf16", "fp16")
PARALLEL = ("data", "tp", "ep", "pp", "fsdp")
TRANSFORMERS = "transformers"
"""The engine that runs in this process."""

MOST_SECONDS = 1e6
"""Longest time-out of a server, some eleven days; sockets take none that are much longer."""


class TextSettings(Settings):
    """What is routed."""

    text: Text = setting(
        None, kind=Path, help="Text to run, UTF-8, or - for stdin; by default the one in the box."
    )
    tokens: int = setting(16384, check=at_least(1), help="How many tokens of the text.")
    batch_size: int = setting(8, check=at_least(1), help="Sequences per forward pass.")

    @property
    def corpus(self) -> dict[str, Any]:
        """Arguments of `Corpus`."""
        names = ("text", "tokens", "batch_size", "sequence_length", "seed")
        return {name: getattr(self, name) for name in names if name in self.fields_by_name()}


class SequenceSettings(TextSettings):
    """What is routed, cut into sequences of a chosen length."""

    sequence_length: int | None = setting(
        None,
        check=at_least(2),
        help="Tokens per sequence; by default 512, or what the model takes if less.",
    )


class SeedSettings(Settings):
    """The seed of jobs that draw random numbers."""

    seed: int = setting(0, check=at_least(0), help="Seed of all random numbers.")


class HubSettings(Settings):
    """Where a model is from, and where it runs."""

    device: str = setting("cpu", help="cpu, cuda, cuda:1, ... or auto.")
    revision: str | None = setting(None, help="Branch, tag or commit on the hub.")
    trust_remote_code: bool = setting(False, help="Allow code that comes with MODEL to run.")


class StreamSettings(Settings):
    """How a model larger than memory, or shared by processes, is run."""

    stream: bool | None = setting(
        None,
        option="--stream/--no-stream",
        show_default=False,
        help="Read the weights layer by layer; by default where they exceed the free memory.",
    )
    memory: int | None = setting(
        None,
        read=read_memory,
        check=above(0.0),
        metavar="8G",
        help="Memory that a streamed model may take; by default all free.",
    )
    keep_downloads: bool = setting(
        True, option="--keep/--no-keep", help="Keep files fetched from the hub to be streamed."
    )
    parallel: str | None = setting(
        None,
        check=one_of(*PARALLEL),
        metavar="|".join(PARALLEL),
        help="Under torchrun: how processes share the work; by default the text (data).",
    )


class ModelSettings(StreamSettings, HubSettings):
    """How a model is opened."""

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments of `Model.open`."""
        names = ("device", "revision", "trust_remote_code", "stream", "memory", "parallel")
        return {name: getattr(self, name) for name in names} | {"keep": self.keep_downloads}


class ModelOptions(TypedDict, total=False):
    """Keyword arguments of jobs that open a model and run a text."""

    text: Text
    tokens: int
    batch_size: int
    seed: int
    device: str
    revision: str | None
    trust_remote_code: bool
    stream: bool | None
    memory: int | str | None
    keep_downloads: bool
    parallel: str | None


class ServerSettings(Settings):
    """How a running server is asked for routes."""

    prompts: str | Path | None = setting(
        None, kind=Path, help="Prompts for a server: a line each, or JSON lines; chats too."
    )
    tokenizer: str | Path | None = setting(
        None, kind=str, help="Model whose tokenizer cuts the text, for a GGUF or a server."
    )
    new_tokens: int = setting(1, check=at_least(1), help="Tokens a server generates per prompt.")
    concurrency: int = setting(8, check=at_least(1), help="Prompts open at a time, on a server.")
    timeout: float = setting(
        300.0, check=above(0.0, most=MOST_SECONDS), help="Seconds to wait for an answer."
    )
    retries: int = setting(4, check=at_least(0), help="Repetitions after 429, 500 and the like.")


class ServerOptions(TypedDict, total=False):
    """Keyword arguments for a running server."""

    prompts: str | Path | None
    tokenizer: str | Path | None
    new_tokens: int
    concurrency: int
    timeout: float
    retries: int


class CaptureSettings(ServerSettings, StreamSettings, SequenceSettings):
    """Options of `capture_engine` and `tieline capture`."""

    engine: str = setting(
        TRANSFORMERS, help="transformers, vllm, mlx or llama.cpp; of a server vllm or sglang."
    )
    ids: str | Path | Sequence[Any] | None = setting(
        None, kind=Path, help="Token ids to run: .npy, .npz, .safetensors or JSON."
    )
    tokens_from: Any = setting(
        None, kind=Path, help="Run the tokens of this trace or file of routes."
    )
    tokens: int = setting(4096, check=at_least(1), help="How many tokens of the text.")
    sequence_length: int = setting(256, check=at_least(2), help="Tokens per document.")
    dtype: str = setting(
        "auto", help="fp32 (which auto means here), bf16 or fp16, where it can choose."
    )
    engine_python: str | Path | None = setting(
        None, kind=Path, help="Python that the engine is installed in."
    )
    engine_defaults: bool = setting(False, help="All settings as the engine has them by default.")
    scores: bool = setting(
        True, option="--no-scores", help="Keep the choice alone, without scores."
    )

    def check(self) -> None:
        """Refuse two sources of tokens, and options of another engine."""
        sources = (self.text, self.ids, self.tokens_from, self.prompts)
        several = sum(source is not None for source in sources) > 1
        message = "{text}, {ids}, {tokens_from} and {prompts} exclude each other: name one"
        require_setting(not several, message)
        if self.engine == TRANSFORMERS:
            other = "{%s} is for other engines than transformers"
            require_setting(self.engine_python is None, other % "engine_python")
            require_setting(not self.engine_defaults, other % "engine_defaults")
        else:
            require_setting(
                not self.stream, "{stream} is for transformers: other engines load the whole model"
            )
            require_setting(
                self.parallel is None,
                "{engine} {name} runs by itself: capture with it in one process, without torchrun",
                name=self.engine,
            )


class CaptureOptions(ServerOptions, total=False):
    """Keyword arguments of `capture_engine`."""

    text: Text
    tokens: int
    batch_size: int
    sequence_length: int
    stream: bool | None
    memory: int | str | None
    keep_downloads: bool
    parallel: str | None
    engine: str
    ids: str | Path | Sequence[Any] | None
    tokens_from: Any
    dtype: str
    engine_python: str | Path | None
    engine_defaults: bool
    scores: bool
