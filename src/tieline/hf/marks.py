"""What Tieline changed in a model, kept in its configuration, so that saving and loading keep it.

    mark(model.config, "upcycle", facts)     before `model.save_pretrained(folder)`
    model = load_pretrained(folder)          restores it, weights included

The facts stand where transformers looks for a quantisation, without the name of a method: every
`from_pretrained` of transformers refuses such a checkpoint, so no program that knows nothing of the
change can run the model without it. A feature registers how it is restored, on the skeleton before
weights are read and on the model after.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from tieline.core.errors import UnsupportedModelError, require

__all__ = ["Restorer", "load_pretrained", "mark", "marks_of", "register_restorer", "unmark"]

Facts = dict[str, Any]
PLACE, KEY = "quantization_config", "tieline"
NOTE = "changed by tieline: load it with tieline.hf.load_pretrained"


def _nothing(model: nn.Module, facts: Facts) -> None:
    """What a feature does that has nothing to do."""


class Restorer(NamedTuple):
    """How a feature is restored from its facts, which come from a file and may be wrong.

    Attributes:
        before: on the skeleton, before weights are read.
        after: on the model, once they are.
    """

    before: Callable[[nn.Module, Facts], None] = _nothing
    after: Callable[[nn.Module, Facts], None] = _nothing


RESTORERS: dict[str, Restorer] = {}
"""By feature."""


def register_restorer(feature: str, restorer: Restorer) -> None:
    """Let `load_pretrained` restore a feature."""
    RESTORERS[feature] = restorer


def mark(config: Any, feature: str, facts: Facts) -> None:
    """Note in the configuration that a feature is in force; refuses a quantised model."""
    require(
        getattr(config, PLACE, None) is None or bool(marks_of(config)),
        f"the model is quantised, so {feature!r} cannot be saved with it",
        UnsupportedModelError,
    )
    setattr(config, PLACE, {"note": NOTE, KEY: {**marks_of(config), feature: facts}})


def unmark(config: Any, feature: str) -> None:
    """Take the note of a feature off again."""
    rest = {name: facts for name, facts in marks_of(config).items() if name != feature}
    if rest:
        setattr(config, PLACE, {"note": NOTE, KEY: rest})
    elif hasattr(config, PLACE):
        delattr(config, PLACE)


def marks_of(config: Any) -> dict[str, Any]:
    """The features in force and their facts, in the order in which they came."""
    place = getattr(config, PLACE, None)
    marks = place.get(KEY) if isinstance(place, dict) else None
    return dict(marks) if isinstance(marks, dict) else {}


def load_pretrained(
    source: str | Path,
    *,
    model_class: type[PreTrainedModel] | None = None,
    config: Any = None,
    **options: Any,
) -> PreTrainedModel:
    """A model of transformers with everything that Tieline changed in it; others load as ever.

    Args:
        source: folder or hub id.
        model_class: class to build; None for the one that the configuration names.
        config: the configuration, if it has been read already.
        options: further arguments of `from_pretrained`, such as `dtype`.
    """
    if config is None:
        kept = {name: options[name] for name in ("revision", "local_files_only") if name in options}
        config = AutoConfig.from_pretrained(source, **kept)
    marks = marks_of(config)
    _check_known(marks)
    plain = copy.deepcopy(config)
    for feature in marks:
        unmark(plain, feature)
    built = _with_structure(model_class or _named_class(config), marks)
    model = _read(built, source, {"use_safetensors": True, "config": plain} | options)
    model.__class__ = built.__mro__[1] if marks else built
    for feature, facts in marks.items():
        RESTORERS[feature].after(model, facts)
        mark(model.config, feature, facts)
    return model


def _check_known(marks: dict[str, Any]) -> None:
    unknown = [name for name in marks if name not in RESTORERS]
    require(
        not unknown,
        f"the checkpoint needs {unknown}, which this version of tieline does not know",
        UnsupportedModelError,
    )
    wrong = [name for name, facts in marks.items() if not isinstance(facts, dict)]
    require(not wrong, f"the facts of {wrong} are no table", UnsupportedModelError)


def _named_class(config: Any) -> type[PreTrainedModel]:
    """The class of transformers that the configuration names, which is text from a file."""
    names = getattr(config, "architectures", None) or []
    found = getattr(transformers, str(names[0]), None) if names else None
    fits = isinstance(found, type) and issubclass(found, PreTrainedModel)
    require(fits, f"the checkpoint names no model of transformers: {names}", UnsupportedModelError)
    assert isinstance(found, type)
    return found


def _with_structure(
    model_class: type[PreTrainedModel], marks: dict[str, Any]
) -> type[PreTrainedModel]:
    """The class, with every feature's structure in place as soon as an instance is made."""
    if not marks:
        return model_class

    def build(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        for feature, facts in marks.items():
            RESTORERS[feature].before(self, facts)

    names = {"__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), {"__init__": build, **names})


def _read(
    build: type[PreTrainedModel], source: str | Path, options: dict[str, Any]
) -> PreTrainedModel:
    """The model with the weights of the checkpoint, refused if these would leave random numbers."""
    reader: Any = build.from_pretrained  # returns two things if it is asked for the report
    try:
        model, report = reader(source, output_loading_info=True, **options)
    except RuntimeError as problem:  # other shapes
        raise UnsupportedModelError(
            f"the checkpoint {str(source)!r} does not fit its configuration: {problem}"
        ) from problem
    missing = sorted(report["missing_keys"])
    require(
        not missing,
        f"the checkpoint {str(source)!r} does not fit its configuration: it lacks "
        f"{len(missing)} tensors, {missing[:3]} ...",
        UnsupportedModelError,
    )
    return model
