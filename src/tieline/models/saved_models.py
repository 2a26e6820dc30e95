"""Saving and loading models that Tieline changed, so that nobody runs one without the change.

    record_change(model, "upcycle", facts)    before `model.save_pretrained(folder)`
    model = load_pretrained(folder)           restores it, weights included

    config.json    {"model_type": "<a sentence>", "tieline": {"changes": {...}, "config": {...}}}
    weights        model.tieline.safetensors, also in shards, with a tensor that marks them

The automatic classes of transformers refuse the model type and print the sentence; a class that is
named outright finds no weights of the usual name. A feature registers how it is restored: on the
skeleton before weights are read, and on the model after.

    save_model(folder, model, tokenizer)      the folder of a model, complete or absent

The marking tensor is found also where config.json lost the record; a plain model ignores one tensor
more without an error, and converters to other formats, which must name every tensor, stop at it.

`tieline.core.untrusted_input` refuses what the files alone show, before torch is imported, and
`weight_checks` what they show on the model. Once
tieline and transformers are imported, `AutoModelForCausalLM.from_pretrained` loads smoothed models
without `trust_remote_code` (`register_auto_classes`).
"""

import functools
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging

from tieline.core.errors import (
    UnsupportedModelError,
    UnusedTensorsWarning,
    first_line,
    require,
)
from tieline.core.files import check_folder, holds_model, whole_folder
from tieline.core.plugins import restorer_module
from tieline.core.setting_fields import require_setting
from tieline.core.untrusted_input import (
    check_config_sizes,
    check_files,
    check_stored,
    tensor_headers,
)
from tieline.models.class_changes import (
    Call,
    make_subclass,
    pickled_by,
    restore_class,
    wrapped_class,
)
from tieline.models.configuration import check_config_fields
from tieline.models.weight_checks import check_built
from tieline.serving.modeling_tieline import CHANGED, MARKER, TielineConfig

Facts = dict[str, Any]

KEY, VARIANT = "tieline", "tieline"
"""Field of config.json with the record, and part of the names of the files with the weights."""

ATTRIBUTE = "tieline_changes"
"""Attribute of a configuration in memory."""


class Restorer(NamedTuple):
    """How a feature is restored from its facts, which come from a file and may be wrong.

    Attributes:
        before: called with the skeleton, before weights are read.
        after: called with the model, once they are.
        check: called with the facts alone, before anything else; raises if they are malformed.
        saved: called with a model and the folder that it was just saved to.
    """

    before: Callable[[nn.Module, Facts], Any] = lambda model, facts: None
    after: Callable[[nn.Module, Facts], Any] = lambda model, facts: None
    check: Callable[[Facts], Any] = lambda facts: None
    saved: Callable[[nn.Module, Path], Any] = lambda model, folder: None


class Checkpoint(NamedTuple):
    """What a folder or hub id holds, before its weights are read.

    Attributes:
        config: the configuration of the model as it was before all changes.
        changes: facts by feature, in the order in which the features were applied.
        variant: part of the names of the files with the weights; None for the usual names.
    """

    config: Any
    changes: dict[str, Facts]
    variant: str | None


RESTORERS: dict[str, Restorer] = {}
"""By feature; those of features that were not asked for yet are missing (`restorer_of`)."""


def register_restorer(feature: str, restorer: Restorer) -> None:
    """Let `load_pretrained` restore a feature."""
    RESTORERS[feature] = restorer


def restorer_of(feature: str) -> Restorer | None:
    """How a feature is restored; imports the plug-in's module that registers it if need be."""
    if feature not in RESTORERS:
        module = restorer_module(feature)
        if module is not None:
            import_module(module)
    return RESTORERS.get(feature)


def changes_of(config: Any) -> dict[str, Facts]:
    """Return the features in force and their facts, in the order in which they were applied."""
    return dict(getattr(config, ATTRIBUTE, None) or {})


def record_change(model: nn.Module, feature: str, facts: Facts) -> None:
    """Patch `save_pretrained` to store these facts; models without a configuration are left."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "save_pretrained"):
        return
    changes = changes_of(config)
    if not changes:
        config.__class__ = _saving_config(type(config))
        model.__class__ = _saving_model(type(model))
    setattr(config, ATTRIBUTE, {**changes, feature: facts})


def forget_change(model: nn.Module, feature: str) -> None:
    """Undo `record_change`."""
    config: Any = getattr(model, "config", None)
    changes = changes_of(config)
    if changes.pop(feature, None) is None:
        return
    setattr(config, ATTRIBUTE, changes)
    if not changes:
        delattr(config, ATTRIBUTE)
        restore_class(config)
        restore_class(model)


def refuse_quantised(model: nn.Module, feature: str) -> None:
    """Refuse a quantised model, whose weights cannot be copied or replaced."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"the model is quantised: {feature!r} needs its weights in full precision"
        )


@functools.cache
def _saving_config(cls: type) -> type:
    """A subclass of a configuration that writes changes and model apart."""

    def outer_config_json(config: Any, call: Call, text: str) -> str:
        inner = json.loads(text)
        inner.pop(ATTRIBUTE, None)
        changes = changes_of(config)  # in their order, which the text has not
        kind = inner.get("model_type", config.model_type)
        sentence = CHANGED.format(kind=kind, changes=", ".join(changes))
        outer = {"model_type": sentence, KEY: {"changes": changes, "config": inner}}
        return json.dumps(outer, indent=2) + "\n"

    saving = wrapped_class(cls, "to_json_string", outer_config_json)
    return pickled_by(saving, _saving_config, cls)


@functools.cache
def _saving_model(cls: Any) -> type:
    """A subclass of a model whose weights are saved under names of their own."""

    @functools.wraps(cls.save_pretrained)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("variant") is None:
            kwargs["variant"] = VARIANT
        state = kwargs.get("state_dict")
        tensors = self.state_dict() if state is None else state
        on_disk = any(isinstance(t, Tensor) and t.is_meta for t in tensors.values())
        kwargs["state_dict"] = None if on_disk else {**tensors, MARKER: torch.ones(1, device="cpu")}
        done = cls.save_pretrained(self, save_directory, *args, **kwargs)
        for feature in changes_of(self.config) if kwargs.get("is_main_process", True) else ():
            restorer = restorer_of(feature)
            if restorer is not None:
                restorer.saved(self, Path(save_directory))
        return done

    return pickled_by(make_subclass(cls, save_pretrained=save_pretrained), _saving_model, cls)


def read_checkpoint(source: str | Path, **options: Any) -> Checkpoint:
    """Read the configuration of a model and what was changed in it; refuses unknown changes.

    Args:
        source: folder or hub id.
        options: of `AutoConfig.from_pretrained`, such as `revision`.
    """
    options = {"trust_remote_code": False} | options  # None would ask on the terminal
    folder = Path(source)
    if folder.is_dir():
        check_files(folder)
    fields, _ = PreTrainedConfig.get_config_dict(source, **options)
    check_config_sizes(fields)
    check_config_fields(fields, bool(options["trust_remote_code"]))
    if folder.is_dir():
        check_stored(fields, folder)
    if KEY in fields:
        config = _inner_config(fields[KEY])
        return Checkpoint(config, _checked_changes(fields[KEY].get("changes")), VARIANT)
    if folder.is_dir():
        refuse_stripped(folder)
    return Checkpoint(AutoConfig.from_pretrained(source, **options), {}, None)


def _inner_config(stored: Any) -> Any:
    """The configuration of the model itself, which stands beside its changes."""
    inner = stored.get("config") if isinstance(stored, dict) else None
    if not isinstance(inner, dict):
        raise UnsupportedModelError(f"the configuration has {KEY!r} but no 'config' inside")
    kind = str(inner.get("model_type"))
    if kind not in CONFIG_MAPPING:
        raise UnsupportedModelError(
            f"the changed model is of type {kind!r}, which transformers does not know"
        )
    return CONFIG_MAPPING[kind].from_dict(inner)


def _checked_changes(changes: Any) -> dict[str, Facts]:
    """The changes, refused unless they are a table and each can be restored from its facts."""
    if not isinstance(changes, dict):
        raise UnsupportedModelError(f"the changes of the checkpoint are no table: {changes!r:.80}")
    unknown = [name for name in changes if restorer_of(name) is None]
    if unknown:
        raise UnsupportedModelError(
            f"the checkpoint needs {unknown}, which this version of tieline does not know"
        )
    wrong = [name for name, facts in changes.items() if not isinstance(facts, dict)]
    require(not wrong, f"the facts of {wrong} are no table", UnsupportedModelError)
    for name, facts in changes.items():
        RESTORERS[name].check(facts)
    return changes


def load_pretrained(
    source: str | Path,
    *,
    model_class: type | None = None,
    checkpoint: Checkpoint | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Load a model of transformers with everything that Tieline changed in it.

    Args:
        source: folder or hub id.
        model_class: class to build, also an automatic one; None for the one that the configuration
            names.
        checkpoint: what `read_checkpoint` returned, if it was called already.
        options: further arguments of `from_pretrained`, such as `dtype`.
    """
    if checkpoint is None:
        names = ("revision", "local_files_only", "trust_remote_code")
        checkpoint = read_checkpoint(source, **{n: options[n] for n in names if n in options})
    config, changes, variant = checkpoint
    built = _with_structure(model_class or _configured_model_class(config), changes)
    if variant is not None:
        options = {"variant": variant} | options
    model = _read_model(built, source, {"use_safetensors": True, "config": config} | options)
    if changes:
        restore_class(model)
    for feature, facts in changes.items():
        RESTORERS[feature].after(model, facts)
        record_change(model, feature, facts)
    return model


def _configured_model_class(config: Any) -> type[PreTrainedModel]:
    """The class of transformers that the configuration names, which is text from a file."""
    names = getattr(config, "architectures", None) or []
    architecture = getattr(transformers, str(names[0]), None) if names else None
    if not isinstance(architecture, type) or not issubclass(architecture, PreTrainedModel):
        raise UnsupportedModelError(f"the checkpoint names no model of transformers: {names}")
    return architecture


def _with_structure(model_class: type, changes: Mapping[str, Facts]) -> Any:
    """A class whose instances have the structure of every change as soon as they are made."""
    if not changes:
        return model_class

    def build_with_changes(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        for feature, facts in changes.items():
            RESTORERS[feature].before(self, facts)

    ignored = getattr(model_class, "_keys_to_ignore_on_load_unexpected", None) or []
    members: dict[str, Any] = {"_keys_to_ignore_on_load_unexpected": [*ignored, f"^{MARKER}$"]}
    return make_subclass(model_class, __init__=build_with_changes, **members)


def _read_model(build: Any, source: str | Path, options: dict[str, Any]) -> PreTrainedModel:
    """Read the weights of a checkpoint; refuses one that would leave random numbers."""
    refusal = f"the checkpoint {str(source)!r} does not fit its configuration: "
    options = {"ignore_mismatched_sizes": True} | options  # reported, and refused below by name
    try:
        with _sizes_checked_when_built():
            model, report = build.from_pretrained(source, output_loading_info=True, **options)
    except RuntimeError as problem:
        raise UnsupportedModelError(refusal + first_line(problem)) from problem
    missing = sorted(report["missing_keys"])
    listed = ", ".join(map(repr, missing[:MOST_NAMED])) + _more_names_text(len(missing))
    count = f"{len(missing)} tensor{'s' * (len(missing) != 1)} ({listed})"
    lacks = f"it lacks {count}, which would be random numbers"
    require(not missing, refusal + lacks, UnsupportedModelError)
    shapes = [
        f"{name!r} has the shape {tuple(shape)} instead of {tuple(expected)}"
        for name, shape, expected in sorted(report["mismatched_keys"])
    ]
    wrong = f"{'; '.join(shapes[:MOST_NAMED])}{_more_names_text(len(shapes))}"
    hint = "; parts of the experts may be missing" if "experts" in wrong else ""
    require(not shapes, refusal + wrong + hint, UnsupportedModelError)
    _check_unused(model, sorted(report["unexpected_keys"]), refusal)
    return model


def _check_unused(model: PreTrainedModel, names: Sequence[str], refusal: str) -> None:
    """Refuse layers that the files hold beyond those of the model; warn of other unused tensors.

    Layers that predict further tokens, which transformers does not run, are no such layers.
    """
    modules = model.named_modules()
    lengths = {path: len(x) for path, x in modules if isinstance(x, nn.ModuleList)}
    unrun = _prediction_layers(model.config)
    for name in names:
        for path, number in _prefixes_and_numbers(name):
            require(
                number < lengths.get(path, number + 1) + unrun,
                f"{refusal}it describes {lengths.get(path)} of {path!r}, and the files hold number "
                f"{number}, counted from 0 ({name!r})",
                UnsupportedModelError,
            )
    if names and not getattr(model, "is_quantized", False):
        listed = ", ".join(map(repr, names[:MOST_NAMED])) + _more_names_text(len(names))
        warnings.warn(
            f"the model has no use for {len(names):,} of the tensors in its files ({listed})",
            UnusedTensorsWarning,
            stacklevel=2,
        )


def _prefixes_and_numbers(name: str) -> Iterator[tuple[str, int]]:
    """Yield each number in a tensor's name after its prefix: "model.layers" and 3."""
    fields = name.split(".")
    for depth, field in enumerate(fields):
        if field.isdecimal() and len(field) < 10:
            yield ".".join(fields[:depth]), int(field)


def _prediction_layers(config: Any) -> int:
    """Layers that a configuration names for predicting further tokens."""
    fields = vars(config.get_text_config())
    marks = ("nextn", "mtp")
    counts = [n for name, n in fields.items() if any(mark in name for mark in marks)]
    return sum(n for n in counts if type(n) is int and n > 0)


LOADING = threading.RLock()
"""Held while the step of `from_pretrained` that reads weights is another."""


@contextmanager
def _sizes_checked_when_built() -> Iterator[None]:
    """Inside the block, a model is compared with the headers of its files before it has memory."""
    with LOADING:
        original = PreTrainedModel.__dict__["_load_pretrained_model"]
        load = original.__func__

        def checked_model(
            model: Any, state: Any, files: Any, config: Any, *rest: Any, **more: Any
        ) -> Any:
            check_built(model, files or [], config.hf_quantizer is not None)
            return load(model, state, files, config, *rest, **more)

        PreTrainedModel._load_pretrained_model = staticmethod(checked_model)  # type: ignore[method-assign]
        try:
            yield
        finally:
            PreTrainedModel._load_pretrained_model = original


MOST_NAMED = 3
"""Tensors that a message names one by one."""


def _more_names_text(count: int) -> str:
    """As " and 4 more", for names beyond `MOST_NAMED`; empty for none."""
    return f" and {count - MOST_NAMED} more" if count > MOST_NAMED else ""


@contextmanager
def no_loading_bars() -> Iterator[None]:
    """No progress bars of transformers inside the block: files and layers are not the user's."""
    bars_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars_enabled:
            logging.enable_progress_bar()


def quiet_transformers() -> None:
    """Silence warnings of transformers, and its progress bars off a terminal, for commands."""
    logging.set_verbosity_error()
    if not sys.stderr.isatty():
        logging.disable_progress_bar()


def refuse_stripped(folder: Path) -> None:
    """Refuse a folder whose weights were changed and whose configuration lost the record."""
    for path in sorted(folder.glob("*.safetensors")):
        if MARKER in tensor_headers(path):
            raise UnsupportedModelError(
                f"{path.name} holds the tensor {MARKER!r}: the weights of a model that Tieline "
                "changed, but config.json has lost the record of it, so that they would run as "
                "another model; take the config.json that was saved with them"
            )


def save_model(
    folder: str | Path, model: Any, tokenizer: Any, *, overwrite: bool = False, **texts: str
) -> None:
    """Save a model in a folder, which is complete or absent.

    Args:
        folder: the folder to make.
        model: a model of transformers; None is refused.
        tokenizer: its tokenizer, or None.
        overwrite: whether a folder that holds a model may be replaced; another is only if empty.
        texts: further files by name, with "_" for "-" and without their suffix .json.
    """
    require(model is not None, "this result was read from a file: it has no model to save")
    _check_model_folder(Path(folder), overwrite)
    with whole_folder(Path(folder), replace=overwrite, kind=holds_model) as half:
        model.save_pretrained(half)
        if tokenizer is not None:
            tokenizer.save_pretrained(half)
        for name, text in texts.items():
            (half / f"{name.replace('_', '-')}.json").write_text(text)


def _check_model_folder(folder: Path, overwrite: bool) -> None:
    """Refuse a folder that cannot be made, or that may not be replaced."""
    check_folder(folder)
    if not folder.exists() or not any(folder.iterdir()):
        return
    message = "{folder} is not empty: choose another folder or add {overwrite}"
    require_setting(overwrite, message, folder=folder)
    require(holds_model(folder), f"{folder} holds something else than a model: it is not replaced")


class ChangedModelForCausalLM(PreTrainedModel):
    """The door to a smoothed model: `from_pretrained` returns the model of transformers itself."""

    config_class = TielineConfig  # type: ignore[assignment]

    @classmethod
    def from_pretrained(cls, source: Any, *args: Any, config: Any = None, **options: Any) -> Any:
        """Load a model with everything that Tieline changed in it.

        Args:
            source: folder or hub id.
            args: none that a smoothed model takes.
            config: as the automatic class read it; the record is read again, and checked.
            options: of `tieline.models.load_pretrained`.
        """
        if args:
            raise UnsupportedModelError("a smoothed model takes no arguments beside its folder")
        options.pop("trust_remote_code", None)  # our own code is here
        return load_pretrained(source, **options)


def register_auto_classes() -> None:
    """Let `AutoConfig` and `AutoModelForCausalLM` know smoothed models."""
    AutoConfig.register(TielineConfig.model_type, TielineConfig, exist_ok=True)
    AutoModelForCausalLM.register(TielineConfig, ChangedModelForCausalLM, exist_ok=True)
