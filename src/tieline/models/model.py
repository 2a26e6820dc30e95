"""A model that is opened once and handed to every analysis.

    model = Model.open("org/model", dtype="fp32")
    model.module, model.tokenizer, model.routers, model.provenance

A model that does not fit into memory is opened with `stream`: its module has no weights, and
`model.stream` reads them when they are needed.
"""

from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from tieline.core.errors import ParameterError
from tieline.models.capture import model_facts
from tieline.models.families import find_routers
from tieline.models.loading import LoadedModel, check_weights, load_model
from tieline.models.streaming import ModelStream


@dataclass(frozen=True)
class Provenance:
    """Where a model comes from and how it computes.

    Attributes:
        model: name or path of the configuration, else the class.
        architecture: its class.
        model_type: type in its configuration.
        revision: commit on the hub.
        dtype: precision that it computes in.
        stored_dtype: precision of its files.
        experts_implementation: transformers' implementation of the experts.
        training: whether it is in training mode.
        tieline: version of this package.
        torch: version of torch.
        transformers: version of transformers.
    """

    model: str
    architecture: str
    model_type: str | None
    revision: str | None
    dtype: str | None
    stored_dtype: str | None
    experts_implementation: str | None
    training: bool
    tieline: str
    torch: str
    transformers: str

    def to_dict(self) -> dict[str, object]:
        """Return the fields as JSON values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Model:
    """A Mixture-of-Experts model, its tokenizer and where its weights are.

    Attributes:
        module: the model of transformers, in evaluation mode.
        tokenizer: its tokenizer; None for a model that is given tokens.
        name: the name that it was opened by; "" for one that was given.
        stream: reads the weights when they are needed; None if they are in memory.
    """

    module: nn.Module
    tokenizer: Any = None
    name: str = ""
    stream: ModelStream | None = None

    @classmethod
    def open(cls, source: object, job: str = "this takes", **options: Any) -> "Model":
        """Open what a front-door function was given.

        Args:
            source: a hub id, a folder, "demo", `(model, tokenizer)`, or a model that is open.
            job: beginning of the error if it is of another kind, such as "audit takes".
            options: those of `load_model`: dtype, device, revision, trust_remote_code, stream,
                memory, keep, copies, parallel.
        """
        if isinstance(source, Model):
            return source
        if isinstance(source, LoadedModel):
            return cls(*source)
        if isinstance(source, str | Path):
            return cls(*load_model(source, **options))
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], nn.Module):
            check_weights(source[0])
            return cls(source[0], source[1])
        bare = "; a model needs its tokenizer beside it" if isinstance(source, nn.Module) else ""
        raise ParameterError(
            f'{job} a hub id, a folder, "demo" or (model, tokenizer), got '
            f"{type(source).__name__}{bare}"
        )

    @cached_property
    def routers(self) -> dict[str, nn.Module]:
        """Its routers by name."""
        return find_routers(self.module)

    @property
    def provenance(self) -> Provenance:
        """Where it comes from and how it computes now."""
        return Provenance(**model_facts(self.module))


ModelSource = str | Path | tuple[nn.Module, Any] | LoadedModel | Model
"""A hub id, a folder, "demo", a model with its tokenizer, or a model that is open."""
