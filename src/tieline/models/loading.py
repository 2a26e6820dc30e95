"""Load Mixtures of Experts to inspect, dense models to upcycle, and shapes of routed layers.

    load_model       a Mixture of Experts with its tokenizer, from a folder or the hub
    load_smoothed    a model that was saved smoothed, without a tokenizer
    load_dense       a dense model: folder or hub id
    read_shape       the shape of a model's routed layers, from its configuration alone
    use_experts      choose transformers' implementation of the experts

Only safetensors are read. Whether a model is a Mixture of Experts of a known family is checked on a
skeleton without weights before any weight is read or downloaded.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from tieline.core.errors import ParameterError, TielineError, UnsupportedModelError, require
from tieline.models.changes import (
    Checkpoint,
    changes_of,
    first_line,
    load_pretrained,
    read_checkpoint,
)
from tieline.models.demo import DEMO, DEMO_FOLDER, is_demo, load_demo_model, load_demo_tokenizer
from tieline.models.families import chosen_routers, family_of, find_routers
from tieline.models.precision import DTYPES, computed_dtype, remember_stored, stored_dtype
from tieline.models.sizes import CHOSEN, EXPERTS
from tieline.models.smooth import FEATURE as SMOOTH
from tieline.models.spread import check_parallel, distributed_config
from tieline.models.stream_loading import open_stream, too_large
from tieline.models.streaming import ModelStream

OWN_LAYERS = '"tieline_switch"'
"""The model type, in a config.json, of a decoder of Tieline's own layers (`training.language`)."""

_CLASSES = (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel)


class LoadedModel(NamedTuple):
    """A model in evaluation mode, its tokenizer, and the name it was loaded by.

    Attributes:
        stream: what reads the model's weights when they are needed; None if they are in memory.
    """

    model: nn.Module
    tokenizer: Any
    name: str
    stream: ModelStream | None = None


def load_model(
    name: str | Path | None = None,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    trust_remote_code: bool = False,
    stream: bool | None = False,
    memory: int | None = None,
    keep: bool = True,
    copies: int = 1,
    parallel: str | None = None,
) -> LoadedModel:
    """Load a Mixture-of-Experts model and its tokenizer, with all changes that it was saved with.

    Args:
        name: folder with a checkpoint, or id on the hub; "demo" or None for the one in the box.
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
    require(dtype in DTYPES, f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    where = _device(device)
    check_parallel(parallel)
    require(not (stream and parallel), "a streamed model runs in one process, not on several")
    stream = False if parallel else stream  # several processes have room for the parts
    name = DEMO if name is None else name
    if is_demo(name) and not stream:
        return _demo(dtype, where, parallel)
    source = DEMO_FOLDER if is_demo(name) else _source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"local_files_only": True} if isinstance(source, Path) else {"revision": revision}
    with _explained(name, "configuration"):
        checkpoint = read_checkpoint(source, **options)
    # a changed model is not what its configuration alone describes, so it has no skeleton to check
    config, plain = checkpoint.config, not checkpoint.changes
    model_class = _model_class(config, name, trust_remote_code) if plain else None
    tokenizer = _loaded_tokenizer(source, name, config=config, **options)
    spread = _spread(parallel, model_class, checkpoint, trust_remote_code)
    placed: dict[str, Any] = {"device_map": "auto"} if where is None else {}
    placed = {"distributed_config": spread} if spread else placed
    stored = stored_dtype(config)
    computed = computed_dtype(dtype, stored, where)

    def read(origin: str | Path, **more: Any) -> Any:
        chosen = {"model_class": model_class, "checkpoint": checkpoint, "dtype": computed}
        return load_pretrained(origin, **chosen, **placed, **more)

    with _explained(name, "weights (safetensors only: pickled weights are never loaded)"):
        if stream or (stream is None and too_large(source, computed)):
            require(where == torch.device("cpu"), f"streamed models run on the CPU, not {device!r}")
            room = {"memory": memory, "copies": copies}
            opened = open_stream(source, read, revision=revision, keep=keep, **room)
            remember_stored(opened.model, stored)
            return LoadedModel(opened.model, tokenizer, str(name), opened)
        model: Any = read(source, **options)
    check_weights(model)
    model = model.float() if computed is torch.float32 and _is_mixed(model) else model
    model = model if where is None or spread else model.to(where)
    remember_stored(model, stored)
    return LoadedModel(model.eval(), tokenizer, str(name))


def _is_mixed(model: nn.Module) -> bool:
    """Whether a model's floating-point numbers have several precisions.

    transformers unpacks blocks of fp8 to the precision that is asked for, and leaves what the same
    files have beside them in the precision that it is stored in.
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    return len(dtypes) > 1 and dtypes <= {torch.float32, torch.bfloat16, torch.float16}


def load_tokenizer(name: str | Path) -> Any:
    """Load the tokenizer of a model without its weights.

    Args:
        name: folder, id on the hub, or "demo".
    """
    if is_demo(name):
        return load_demo_tokenizer()
    source = _source(name)
    local = {"local_files_only": True} if isinstance(source, Path) else {}
    return _loaded_tokenizer(source, name, **local)


def _spread(
    parallel: str | None, build: Any, checkpoint: Checkpoint, trust_remote_code: bool
) -> Any:
    """How the model is spread over processes; refuses one that Tieline has changed."""
    if parallel in (None, "data"):
        return None
    changed = ", ".join(checkpoint.changes)
    require(
        not changed,
        f"parallel {parallel!r} is for models as transformers has them, and this one was changed: "
        f"{changed}",
        UnsupportedModelError,
    )
    skeleton = _skeleton(build, checkpoint.config, trust_remote_code)
    assert skeleton is not None
    return distributed_config(parallel, skeleton)


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
"""Where the words of most tokenizers are, for messages."""


def _loaded_tokenizer(source: str | Path, name: object, **options: Any) -> Any:
    """The tokenizer; refuses one without words, as transformers makes it of a folder without."""
    listed = f"{', '.join(TOKENIZER_FILES[:-1])} or {TOKENIZER_FILES[-1]}"
    hint = f"put {listed} into {str(name)!r}, from the model that it was made of"
    absent = isinstance(source, Path) and not any((source / x).is_file() for x in TOKENIZER_FILES)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except Exception as problem:  # a library of many authors: any class may come
        why = f"there is no tokenizer: {hint}" if absent else first_line(problem)
        raise UnsupportedModelError(
            f"cannot load the tokenizer of {str(name)!r}: {why}"
        ) from problem
    if not _has_words(tokenizer):
        raise UnsupportedModelError(f"there is no tokenizer, or one without words: {hint}")
    return tokenizer


def _has_words(tokenizer: Any) -> bool:
    """Whether the vocabulary has more than special tokens; true where it cannot be listed."""
    try:
        return bool(set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens))
    except (AttributeError, NotImplementedError):
        return True


def check_weights(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite weights, naming the first such tensor.

    One pass over the parameters, without a copy: a NaN anywhere makes minimum and maximum NaN.
    """
    wrong = {name: p for name, p in model.named_parameters() if not _finite(p)}
    if not wrong:
        return
    name, tensor = next(iter(wrong.items()))
    bad = ~tensor.detach().isfinite()
    others = f", and so are values of {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
    raise UnsupportedModelError(
        f"weight {name!r}: {int(bad.sum()):,} of {bad.numel():,} values are NaN or infinite, the "
        f"first at {bad.nonzero()[0].tolist()}{others}"
    )


def _finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.numel() or tensor.dtype not in CHECKED:
        return True
    low, high = torch.aminmax(tensor.detach())
    return bool(low.isfinite()) and bool(high.isfinite())


CHECKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Types of weights that can hold NaN and be compared."""


def _demo(dtype: str, device: torch.device | None, parallel: str | None = None) -> LoadedModel:
    if not (DEMO_FOLDER / "config.json").is_file():
        raise TielineError(f"the demo model is missing from the package: {DEMO_FOLDER}")
    asked = DTYPES[dtype]
    asked = asked if isinstance(asked, torch.dtype) else torch.float32
    if parallel not in (None, "data"):
        checkpoint = read_checkpoint(DEMO_FOLDER, local_files_only=True)
        spread = _spread(parallel, AutoModelForCausalLM, checkpoint, False)
        sharded: Any = load_demo_model(asked, distributed_config=spread)
        return LoadedModel(sharded, load_demo_tokenizer(), DEMO)
    model: Any = load_demo_model(asked)
    return LoadedModel(model.to(device or "cpu"), load_demo_tokenizer(), DEMO)


def _source(name: str | Path) -> str | Path:
    """The folder, if there is one; else the hub id, if it can be one."""
    folder = Path(name)
    if folder.is_dir():
        require((folder / "config.json").is_file(), f"no config.json in the folder {str(name)!r}")
        _refuse_run(folder)
        return folder
    segments = str(name).split("/")
    is_id = (
        isinstance(name, str)
        and len(segments) <= 2
        and all(segments)
        and segments[0] not in (".", "..")
    )
    require(is_id, f"no such folder, and no hub id either: {str(name)!r}")
    return str(name)


def _refuse_run(folder: Path) -> None:
    """Refuse the folder of a training run and the model in it, naming the one that is readable."""
    inside = (folder / "model" / "config.json").is_file()
    run = folder if inside else folder.parent
    if not inside and OWN_LAYERS not in (folder / "config.json").read_text(errors="replace"):
        return
    what = "the folder of a training run" if inside else "a model of Tieline's own layers"
    stock = run / "stock"
    raise UnsupportedModelError(
        f"{str(folder)!r} is {what}: its form for transformers is {str(stock)!r}"
        if stock.is_dir()
        else f"{str(folder)!r} is {what}, which has no form for transformers: its router or gate "
        "is none that transformers knows"
    )


def _device(name: str) -> torch.device | None:
    """The device; None to spread the model."""
    if name == "auto":
        return None
    try:
        torch.empty(0, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError) as problem:
        raise ParameterError(f"device {name!r} cannot be used: {first_line(problem)}") from problem


def _model_class(config: Any, name: object, trust_remote_code: bool) -> Any:
    """The class that builds the model; refuses a model without a router of a known family."""
    for build in _CLASSES:
        skeleton = _skeleton(build, config, trust_remote_code)
        if skeleton is not None:
            _check_routers(skeleton)
            return build
    raise UnsupportedModelError(
        f"{str(name)!r} (model type {getattr(config, 'model_type', None)!r}) is no language model "
        "that transformers can build"
    )


def _check_routers(skeleton: nn.Module) -> None:
    """Refuse a model without routers, or with none that can be captured."""
    families = [family_of(router) for router in find_routers(skeleton).values()]
    if all(family is None or family.refused is not None for family in families):
        chosen_routers(skeleton, None)  # says why


def _skeleton(build: Any, config: Any, trust_remote_code: bool) -> nn.Module | None:
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
def _explained(name: object, what: str) -> Iterator[None]:
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
) -> LoadedModel:
    """Load a model of any kind, in evaluation mode, with its tokenizer or None.

    Args:
        name: folder or hub id.
        revision: branch, tag or commit on the hub.
        dtype: a name in `DTYPES`.
    """
    require(dtype in DTYPES, f"dtype must be one of {sorted(DTYPES)}, got {dtype!r}")
    source = _source(name)
    options: dict[str, Any] = {"revision": revision}
    if isinstance(source, Path):
        options = {"local_files_only": True}
    with _explained(name, "configuration"):
        checkpoint = read_checkpoint(source, **options)
    with _explained(name, "weights (safetensors only: pickled weights are never loaded)"):
        model = load_pretrained(source, checkpoint=checkpoint, dtype=DTYPES[dtype], **options)
    check_weights(model)
    return LoadedModel(model.eval(), _tokenizer(source, options), str(name))


def _tokenizer(source: str | Path, options: dict[str, Any]) -> Any:
    """The tokenizer; None for a model without one, such as an image model."""
    try:
        return _loaded_tokenizer(source, source, **options)
    except UnsupportedModelError:
        return None


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
        pixels = torch.randn(rows, config.num_channels, *sides, generator=generator)
        return model(pixel_values=pixels.to(model.dtype))[0]
    if model.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"{type(model).__name__} takes {model.main_input_name!r}, not tokens or pixels"
        )
    vocabulary = config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (rows, length), generator=generator)
    return model(input_ids=ids)[0]


NAMES: dict[str, tuple[str, ...]] = {
    "n_experts": EXPERTS,
    "k": CHOSEN,
    "width": (
        "moe_intermediate_size",
        "expert_ffn_hidden_size",
        "ffn_hidden_size",
        "intermediate_size",
    ),
    "hidden": ("hidden_size", "d_model"),
}
"""Names of each number in configurations; the first one present counts."""


class RoutedShape(NamedTuple):
    """Shape of a routed layer.

    Attributes:
        n_experts: routed experts N.
        k: experts chosen per token.
        width: hidden width H of an expert.
        hidden: width of the model.
        shared: experts that every token uses; 0 where the configuration names none.
        n_groups: groups of experts, 1 where routing is not group-limited.
        k_groups: groups that a token may choose from.
    """

    n_experts: int
    k: int
    width: int
    hidden: int
    shared: int = 0
    n_groups: int = 1
    k_groups: int = 1


def read_shape(
    name: str | Path | None = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> RoutedShape:
    """Read the shape of a model's routed layers from its config.json.

    Args:
        name: folder with a config.json or id on the hub; "demo" or None for the one in the box.
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether code that comes with the model may run.
    """
    source = DEMO_FOLDER if name is None or is_demo(name) else _source(name)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    options |= {"local_files_only": True} if isinstance(source, Path) else {"revision": revision}
    with _explained(source, "configuration"):
        checkpoint = read_checkpoint(source, **options)
    return shape_of(checkpoint.config, checkpoint.changes)


def shape_of(config: Any, changes: Mapping[str, Mapping[str, Any]] | None = None) -> RoutedShape:
    """Return the shape that a configuration, or its text part, describes.

    Refuses a configuration without experts, and one whose experts per token is a list.

    Args:
        config: of the model.
        changes: facts of the changes of the model, by feature; those of one that gave the model its
            experts name "n_experts" and "k".
    """
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    sizes_of_experts = {"n_experts", "k"}
    changed = [facts for facts in (changes or {}).values() if sizes_of_experts <= facts.keys()]
    stated = {name: changed[-1][name] for name in sizes_of_experts} if changed else {}
    sizes = {field: stated.get(field) or _number(config, field) for field in NAMES}
    groups = getattr(config, "n_group", None) or 1
    limited = (getattr(config, "topk_group", None) or 1) if groups > 1 else 1
    shared = getattr(config, "n_shared_experts", None) or 0
    return RoutedShape(**sizes, shared=int(shared), n_groups=int(groups), k_groups=int(limited))


def _number(config: Any, field: str) -> int:
    for name in NAMES[field]:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    kind = getattr(config, "model_type", type(config).__name__)
    raise UnsupportedModelError(
        f"the configuration of {kind!r} names no {field}: none of {', '.join(NAMES[field])} is a "
        "positive integer; give --n-experts, --topk, --expert-width and --hidden instead"
    )


def can_use_experts(model: nn.Module) -> bool:
    """Whether the experts of a model have more than one implementation."""
    can = getattr(model, "_can_set_experts_implementation", None)
    return bool(can()) if callable(can) else False


def use_experts(model: nn.Module, name: str | None) -> None:
    """Run the experts by "eager", "grouped_mm", "batched_mm" or another registered name.

    Args:
        model: a model of transformers.
        name: the implementation; None leaves the model as it is.
    """
    if name is None:
        return
    chooser: Any = model
    if not can_use_experts(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} has one implementation of its experts: {name!r} cannot be set"
        )
    try:
        chooser.set_experts_implementation(name)
    except (ValueError, RuntimeError, ImportError) as problem:
        raise ParameterError(f"experts implementation {name!r}: {problem}") from problem
