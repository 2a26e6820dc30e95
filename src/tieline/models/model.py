"""A model that is opened once and handed to every analysis.

    model = Model.open("org/model", dtype="fp32")
    model.module, model.tokenizer, model.routers, model.provenance

    Model.open       a Mixture of Experts with its tokenizer: folder, hub id, or one that is given
    load_dense       a model of any kind: folder or hub id
    load_smoothed    a model that was saved smoothed, without a tokenizer
    load_tokenizer   a tokenizer without its model
    read_shape       the shape of a model's routed layers, from its configuration alone

Only safetensors are read. Whether a model is a Mixture of Experts of a known family is checked on a
skeleton without weights before any weight is read or downloaded. A model that does not fit into
memory is opened with `stream`: its module has no weights, and `model.stream` reads them when they
are needed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from tieline.core.errors import (
    ParameterError,
    TielineError,
    UnsupportedModelError,
    first_line,
    is_panic,
    require,
)
from tieline.core.records import short_repr
from tieline.core.setting_fields import require_setting
from tieline.core.untrusted_input import model_source
from tieline.models.capture import model_facts
from tieline.models.configuration import RoutedShape, routed_shape
from tieline.models.demo import DEMO, DEMO_FOLDER, is_demo, load_demo_model, load_demo_tokenizer
from tieline.models.families import chosen_routers, family_of, find_routers
from tieline.models.hub import hub_options
from tieline.models.model_stream import ModelStream, exceeds_free_memory, open_stream
from tieline.models.number_formats import (
    DTYPES,
    computed_dtype,
    note_stored_precision,
    stored_dtype,
)
from tieline.models.parallel import SpreadError, check_parallel, distributed_config
from tieline.models.saved_models import Checkpoint, changes_of, load_pretrained, read_checkpoint
from tieline.models.smoothed_model import FEATURE as SMOOTH
from tieline.models.weight_checks import check_finite_weights

_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)

SAFETENSORS = "weights (safetensors only: pickled weights are never loaded)"


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


class OpenOptions(TypedDict, total=False):
    """Keyword arguments of `Model.open`, as `Opening` describes them."""

    revision: str | None
    dtype: str
    device: str
    trust_remote_code: bool
    stream: bool | None
    memory: int | None
    keep: bool
    copies: int
    parallel: str | None


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

    __repr__ = short_repr

    @classmethod
    def open(
        cls, source: object = DEMO, job: str = "this takes", **options: Unpack[OpenOptions]
    ) -> "Model":
        """Open what a front-door function was given, with all changes that it was saved with.

        Args:
            source: a hub id, a folder, "demo", `(model, tokenizer)`, or a model that is open.
            job: beginning of the error if it is of another kind, such as "audit takes".
            options: how a named model is opened, see `Opening`.
        """
        if isinstance(source, Model):
            return source
        if isinstance(source, str | Path):
            return Opening(**options).load(source)
        if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], nn.Module):
            devices = sorted({str(p.device) for p in source[0].parameters() if not p.is_meta})
            require(
                len(devices) < 2 or hasattr(source[0], "hf_device_map"),
                f"parts of the model are on {' and '.join(devices)}: move it to one device, or let "
                "transformers spread it with device_map='auto'",
            )
            check_finite_weights(source[0])
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


ModelSource = str | Path | tuple[nn.Module, Any] | Model
"""A hub id, a folder, "demo", a model with its tokenizer, or a model that is open."""


@dataclass(frozen=True)
class Opening:
    """How a named model is opened.

    Attributes:
        revision: branch, tag or commit on the hub.
        dtype: a name in `DTYPES`.
        device: "cpu", "cuda", "cuda:1", ...; "auto" spreads the model over all devices.
        trust_remote_code: whether code that comes with the model may run.
        stream: whether the weights are read when they are needed, layer by layer; None for a model
            that does not fit into memory.
        memory: bytes that a streamed model may take, by default what is free.
        keep: whether files that are fetched for a streamed model stay.
        copies: how often a streamed layer is in memory: twice where its weights are also rounded.
        parallel: how the processes of torchrun share it, a name in `models.spread.PARALLEL`; None
            for a whole model in this process.
    """

    revision: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    trust_remote_code: bool = False
    stream: bool | None = False
    memory: int | None = None
    keep: bool = True
    copies: int = 1
    parallel: str | None = None

    def load(self, name: str | Path) -> Model:
        """Open the model of a folder, a hub id or "demo"."""
        device = self._checked_device()
        if is_demo(name) and not self.stream:
            return self._open_demo(device)
        source = DEMO_FOLDER if is_demo(name) else model_source(name)
        options = self._hub_options(source)
        with _explaining_load_errors(name, "configuration"):
            checkpoint = read_checkpoint(source, **options)
        # a changed model is not what its configuration alone describes: it has no skeleton to check
        changed, trusted = bool(checkpoint.changes), self.trust_remote_code
        build = None if changed else _model_class(checkpoint.config, name, trusted)
        tokenizer = _loaded_tokenizer(source, name, config=checkpoint.config, **options)
        stored = stored_dtype(checkpoint.config)
        dtype = computed_dtype(self.dtype, stored, device)
        placed = self._placed_model(build, checkpoint, device)

        def read_model(origin: str | Path, **more: Any) -> Any:
            options_of_load = {"model_class": build, "checkpoint": checkpoint, "dtype": dtype}
            return load_pretrained(origin, **options_of_load, **placed, **more)

        with _explaining_load_errors(name, SAFETENSORS):
            streamed = self.stream
            if streamed is None:  # several processes have room for their shares
                streamed = self.parallel is None and exceeds_free_memory(source, dtype)
            if streamed:
                stream = self._open_stream(source, read_model)
                note_stored_precision(stream.model, stored)
                return Model(stream.model, tokenizer, str(name), stream)
            module: Any = read_model(source, **options)
        check_finite_weights(module)
        # transformers unpacks blocks of fp8 to the precision that is asked for, and leaves what
        # the same files have beside them in the precision that it is stored in
        dtypes = {parameter.dtype for parameter in module.parameters()}
        mixed = len(dtypes) > 1 and dtypes <= {torch.float32, torch.bfloat16, torch.float16}
        module = module.float() if dtype is torch.float32 and mixed else module
        module = module if placed else module.to(device)
        note_stored_precision(module, stored)
        return Model(module.eval(), tokenizer, str(name))

    def _checked_device(self) -> torch.device | None:
        """The device, once all options are checked; None to spread the model."""
        check_dtype(self.dtype)
        device = _usable_device(self.device)
        check_parallel(self.parallel)
        require_setting(
            not (self.stream and self.parallel),
            "a streamed model runs in one process, not on several: {stream} or {parallel}",
        )
        return device

    def _open_stream(self, source: str | Path, read: Callable[..., Any]) -> ModelStream:
        """Open the model to be streamed."""
        on_cpu = _usable_device(self.device) == torch.device("cpu")
        require(on_cpu, f"streamed models run on the CPU, not {self.device!r}")
        room = {"memory": self.memory, "copies": self.copies, "keep": self.keep}
        return open_stream(source, read, revision=self.revision, **room)

    def _hub_options(self, source: str | Path) -> dict[str, Any]:
        """Options of `from_pretrained` that say where files come from."""
        return {"trust_remote_code": self.trust_remote_code, **_file_options(source, self.revision)}

    def _placed_model(
        self, build: Any, checkpoint: Checkpoint, device: torch.device | None
    ) -> dict[str, Any]:
        """Options of `from_pretrained` that spread the model over processes or devices."""
        spread = _spread_config(self.parallel, build, checkpoint, self.trust_remote_code)
        if spread:
            return {"distributed_config": spread}
        if device is not None:
            return {}
        require(
            find_spec("accelerate") is not None,
            "device 'auto' spreads a model by the package accelerate, which is not installed: "
            "pip install accelerate, or name a device",
        )
        return {"device_map": "auto"}

    def _open_demo(self, device: torch.device | None) -> Model:
        if not (DEMO_FOLDER / "config.json").is_file():
            raise TielineError(f"the demo model is missing from the package: {DEMO_FOLDER}")
        dtype = DTYPES[self.dtype]
        dtype = dtype if isinstance(dtype, torch.dtype) else torch.float32
        if self.parallel in (None, "data"):
            module: Any = load_demo_model(dtype)
            best = torch.accelerator.current_accelerator(check_available=True) or "cpu"
            return Model(module.to(device or best), load_demo_tokenizer(), DEMO)
        checkpoint = read_checkpoint(DEMO_FOLDER, local_files_only=True)
        spread = _spread_config(self.parallel, AutoModelForCausalLM, checkpoint, False)
        model = load_demo_model(dtype, distributed_config=spread)
        return Model(model, load_demo_tokenizer(), DEMO)


def check_dtype(dtype: str) -> None:
    """Refuse a precision that is not in `DTYPES`."""
    require(dtype in DTYPES, f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")


def load_tokenizer(name: str | Path) -> Any:
    """Load the tokenizer of a model without its weights.

    Args:
        name: folder, id on the hub, or "demo".
    """
    if is_demo(name):
        return load_demo_tokenizer()
    source = model_source(name)
    return _loaded_tokenizer(source, name, **_file_options(source))


def _spread_config(
    parallel: str | None, build: Any, checkpoint: Checkpoint, trust_remote_code: bool
) -> Any:
    """How the model is spread over processes; refuses one that Tieline has changed."""
    if parallel in (None, "data"):
        return None
    if checkpoint.changes:
        raise SpreadError(
            "{parallel} {way!r} is for models as transformers has them, and this one was changed: "
            "{changes}",
            way=parallel,
            changes=", ".join(checkpoint.changes),
        )
    skeleton = _weightless_model(build, checkpoint.config, trust_remote_code)
    assert skeleton is not None
    return distributed_config(parallel, skeleton)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Where the words of most tokenizers are, for messages."""


def _loaded_tokenizer(source: str | Path, name: object, **options: Any) -> Any:
    """The tokenizer; refuses one without words, as transformers makes it of a folder without."""
    listed = f"{', '.join(TOKENIZER_FILES[:-1])} or {TOKENIZER_FILES[-1]}"
    hint = f"put {listed} into {str(name)!r}, from the model that it was made of"
    absent = isinstance(source, Path) and not any((source / x).is_file() for x in TOKENIZER_FILES)
    options = {"trust_remote_code": False} | options  # None would ask on the terminal
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except BaseException as problem:  # a library of many authors: any class may come
        if not isinstance(problem, Exception) and not is_panic(problem):
            raise
        why = f"there is no tokenizer: {hint}" if absent else first_line(problem)
        raise UnsupportedModelError(
            f"cannot load the tokenizer of {str(name)!r}: {why}"
        ) from problem
    try:
        has_words = bool(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))
    except (AttributeError, NotImplementedError):  # a vocabulary that cannot be listed
        has_words = True
    if not has_words:
        raise UnsupportedModelError(f"there is no tokenizer, or one without words: {hint}")
    return tokenizer


def _file_options(source: str | Path, revision: str | None = None) -> dict[str, Any]:
    """Options of `from_pretrained` that say where files of a folder or hub id come from."""
    if isinstance(source, Path):
        return {"local_files_only": True}
    with _explaining_load_errors(source, "configuration"):
        return hub_options(source, revision)


def _usable_device(name: str) -> torch.device | None:
    """The device; None to spread the model."""
    if name == "auto":
        return None
    try:
        device = torch.device(name)
        if device.type == "meta":
            raise RuntimeError("tensors on meta have no values")
        count = torch.get_device_module(device).device_count() if device.index else 1
        if 0 < count <= (device.index or 0):  # torch says why there is none at all
            raise RuntimeError(f"this machine has {count} of its kind, numbered from 0")
        torch.empty(0, device=device)
    except NotImplementedError as problem:
        why = f"this build of torch ({torch.__version__}) computes nothing there"
        raise ParameterError(f"device {name!r} cannot be used: {why}") from problem
    except (RuntimeError, AssertionError) as problem:
        why = first_line(problem).partition(" device type at start of device string")[0]
        raise ParameterError(f"device {name!r} cannot be used: {why}") from problem
    return device


def _model_class(config: Any, name: object, trust_remote_code: bool) -> Any:
    """The class that builds the model; refuses a model without a router of a known family."""
    for build in _CLASSES:
        skeleton = _weightless_model(build, config, trust_remote_code)
        if skeleton is not None:
            families = [family_of(router) for router in find_routers(skeleton).values()]
            if all(family is None or family.refused is not None for family in families):
                chosen_routers(skeleton, None)  # says why
            return build
    raise UnsupportedModelError(
        f"{str(name)!r} (model type {getattr(config, 'model_type', None)!r}) is no language model "
        "that transformers can build"
    )


def _weightless_model(build: Any, config: Any, trust_remote_code: bool) -> nn.Module | None:
    """The model without weights; None if this class does not build such models."""
    make: Callable[..., nn.Module] = build.from_config
    try:
        with torch.device("meta"):
            return make(config, trust_remote_code=trust_remote_code)
    except Exception as problem:
        if "nrecognized configuration class" in str(problem):
            return None
        raise UnsupportedModelError(
            f"the model cannot be built: {first_line(problem)}"
        ) from problem


@contextmanager
def _explaining_load_errors(name: object, what: str) -> Iterator[None]:
    """Turn whatever transformers raises on bad input into one message."""
    try:
        yield
    except TielineError:
        raise
    except Exception as problem:  # a library of many authors: any class may come
        why = _damaged_file(name) or first_line(problem)
        raise UnsupportedModelError(f"cannot load the {what} of {str(name)!r}: {why}") from problem


def _damaged_file(name: object) -> str:
    """Which file of weights in a folder is cut off or none at all, in words; empty if none is."""
    for file in sorted(Path(str(name)).glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as problem:
            return f"the file {file.name!r} is damaged or cut off ({first_line(problem)})"
    return ""


def load_smoothed(
    source: str | Path, model_class: type[PreTrainedModel] | None = None, **options: Any
) -> PreTrainedModel:
    """Load a smoothed model, in evaluation mode.

    Args:
        source: folder or hub id that `save_pretrained` of a smoothed model wrote.
        model_class: class of transformers to build; None for the one that the configuration names.
        options: of `from_pretrained`, such as `dtype` or `revision`.
    """
    model = load_pretrained(source, model_class=model_class, **options)
    if SMOOTH not in changes_of(model.config):
        raise UnsupportedModelError(
            f"{str(source)!r} holds no smoothed model: load it as any other, and smooth it"
        )
    model.eval()
    return model


def load_dense(
    name: str | Path,
    *,
    revision: str | None = None,
    dtype: str = "auto",
) -> Model:
    """Load a model of any kind, in evaluation mode, with its tokenizer or None.

    Args:
        name: folder, hub id, or "demo".
        revision: branch, tag or commit on the hub.
        dtype: a name in `DTYPES`.
    """
    check_dtype(dtype)
    source = DEMO_FOLDER if is_demo(name) else model_source(name)
    options = _file_options(source, revision)
    with _explaining_load_errors(name, "configuration"):
        checkpoint = read_checkpoint(source, **options)
    with _explaining_load_errors(name, SAFETENSORS):
        model = load_pretrained(source, checkpoint=checkpoint, dtype=DTYPES[dtype], **options)
    check_finite_weights(model)
    try:
        tokenizer = _loaded_tokenizer(source, source, **options)
    except UnsupportedModelError:  # such as an image model
        tokenizer = None
    return Model(model.eval(), tokenizer, str(name))


def read_shape(
    name: str | Path | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> RoutedShape:
    """Read the shape of a model's routed layers from its config.json.

    Args:
        name: folder with a config.json or id on the hub; "demo" or None for the one in the box.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.
    """
    source = DEMO_FOLDER if name is None or is_demo(name) else model_source(name)
    options = Opening(revision, trust_remote_code=trust_remote_code)._hub_options(source)
    with _explaining_load_errors(source, "configuration"):
        checkpoint = read_checkpoint(source, **options)
    return routed_shape(checkpoint.config, checkpoint.changes)
