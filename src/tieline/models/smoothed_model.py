"""A continuous choice of experts on a model of transformers, in place and undoable.

    record = smooth_(model, budget=2.5, calibration=calibrate(model, [ids]))
    model(input_ids=ids)               # continuous in its inputs where ties were
    model.save_pretrained("smooth")    # `tieline.models.load_pretrained` loads it again
    record.undo()                      # or unsmooth_(model)

Nothing is retrained. Every router chooses by the projection of `ProjectedTopK`, or by the ramp of
`SmoothTopK` (paper 1, section 6), in the scoring of its family; ε is given, or follows from a
budget of experts or from the noise of a precision, layer by layer.

`make_portable` adds rules, a modelling file and a model card to a saved folder, for those who have
no Tieline: plain transformers loads it with `trust_remote_code=True`. Families whose rule
`modeling_tieline` does not state keep the form that Tieline alone loads.

Changed are the class of each smoothed router, `_is_expert_parallel` of the experts beside it (so
that they skip unused slots), the number of columns that modules around the router count, and the
classes of model and configuration (`models.changes`), so that saving stores the smoothing.
"""

import json
import math
import shutil
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, cast

from torch import Tensor, nn

from tieline.core.errors import ParameterError, UnsupportedModelError, require
from tieline.core.files import write_whole
from tieline.core.records import from_plain, to_plain
from tieline.core.text import layer_label
from tieline.models.band_width import (
    CalibrationScores,
    RampForm,
    chosen_epsilons,
    given_epsilons,
)
from tieline.models.experts import FLAG, experts_of, skip_rule, used_slots_only
from tieline.models.families import RouterFamily, family_of, find_routers
from tieline.models.router_output import attach_handler, detach_handler
from tieline.models.router_output_layouts import COLUMNS
from tieline.models.router_rule import (
    combine_rule,
    family_scale,
    group_limit,
    renormalises_weights,
    score_units,
)
from tieline.models.saved_models import (
    Restorer,
    changes_of,
    forget_change,
    record_change,
    register_restorer,
)
from tieline.models.smoothed_router import (
    GateName,
    LayerPlan,
    RouterSmoothing,
    default_k_max,
    layer_plan,
    plan_layers,
    router_smoothing,
    smoothing_refusal,
)
from tieline.serving import modeling_tieline

MODEL_TYPE = "tieline"
MODELLING_FILE = Path(modeling_tieline.__file__)
MLX_FILE = MODELLING_FILE.with_name("modeling_tieline_mlx.py")  # needs MLX, so is not imported

CARD = """\
# A smoothed Mixture-of-Experts model

The routers of this `{kind}` share the seats of nearly tied experts, so that rounding no longer
makes its output jump. Its weights are those of the original; without the rules in `config.json`
they would run as another model, which is why `model_type` is "tieline".

- **transformers**: `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`; the code
  is `modeling_tieline.py` in this folder.
- **Tieline**: `import tieline`, then the same without `trust_remote_code`; or
  `tieline.models.load_pretrained(FOLDER)`.
- **vLLM**: with Tieline's plug-in installed, `vllm serve FOLDER`.
- **mlx-lm**: `mlx_lm.generate --model FOLDER --trust-remote-code`; the code is
  `modeling_tieline_mlx.py`.
- llama.cpp and TensorRT-LLM cannot serve it: their routers take a fixed number of experts by a rule
  of their own.

{layers} routers are smoothed by the gate `{gate}`, ε from {least:.3g} to {most:.3g} in units of
what they rank ({units}).
"""


def portable_rules(model: nn.Module) -> list[dict[str, Any]] | None:
    """Return the rule of every smoothed router of a model, or None if one cannot be stated.

    Args:
        model: a smoothed model of transformers.
    """
    rules = []
    for name, router in model.named_modules():
        handler = router_smoothing(router)
        if handler is None:
            continue
        family = family_of(router)
        if family is None or not _is_stated(family, router):
            return None
        rules.append(_portable_rule(name, router, family, handler))
    return rules or None


def _is_stated(family: RouterFamily, router: nn.Module) -> bool:
    """Whether the modelling file knows the rule of a router."""
    scale, limit = family_scale(family, router), group_limit(family.groups, router)
    special = (
        family.in_block,
        family.skip_class,
        family.probabilities,
        family.counts_columns,
        family.shared_weights is not None,
        family.least_sum,
        family.norm_order,
        family.identity_experts,
        isinstance(scale, Tensor),
    )
    units = score_units(family, router, limit is not None)
    stated = (
        units in ("logits", "softmax", "sigmoid") and combine_rule(family, router) != "activation"
    )
    return family.layout is COLUMNS and stated and not any(special)


def _portable_rule(
    name: str, router: nn.Module, family: RouterFamily, handler: RouterSmoothing
) -> dict[str, Any]:
    """The rule of one router as JSON values."""
    limit, scale = group_limit(family.groups, router), family_scale(family, router)
    flag = family.bias_flag is None or bool(getattr(router, family.bias_flag))
    return {
        "name": name,
        "gate": handler.gate,
        "k": handler.k,
        "k_max": handler.k_max,
        "epsilon": handler.epsilon,
        "a": handler.a,
        "b": handler.b,
        "ranked": score_units(family, router, limit is not None),
        "own_dtype": family.own_dtype,
        "combine": combine_rule(family, router),
        "renormalise": renormalises_weights(family, router),
        "sum_offset": family.sum_offset,
        "scale": None if scale is None else float(scale),
        "bias": family.bias if flag else None,
        "bias_argument": family.bias_argument if flag else None,
        "groups": None if limit is None else [limit.n_groups, limit.k_groups, limit.score],
        "eager_skip": family.eager_skip,
    }


def make_portable(model: nn.Module, folder: Path) -> bool:
    """Add what plain transformers needs to the folder of a smoothed model that was just saved.

    Returns:
        whether it was done; a model with other changes, or with a router whose rule cannot be
        stated, is left as it was.
    """
    path = folder / "config.json"
    if not path.is_file():
        return False
    fields = json.loads(path.read_text(encoding="utf-8"))
    rules = portable_rules(model)
    if rules is None or list(fields[MODEL_TYPE]["changes"]) != ["smooth"]:
        return False
    module = MODELLING_FILE.stem
    names = {"AutoConfig": "TielineConfig", "AutoModelForCausalLM": "TielineForCausalLM"}
    fields |= {
        "model_type": MODEL_TYPE,
        "architectures": ["TielineForCausalLM"],
        "auto_map": {door: f"{module}.{name}" for door, name in names.items()},
        "model_file": MLX_FILE.name,  # where mlx-lm looks for the model
    }
    fields[MODEL_TYPE]["rules"] = rules
    for file in (MODELLING_FILE, MLX_FILE):
        shutil.copyfile(file, folder / file.name)
    write_whole(folder / "README.md", _model_card(fields, rules).encode())
    write_whole(path, (json.dumps(fields, indent=2) + "\n").encode())
    return True


def _model_card(fields: dict[str, Any], rules: list[dict[str, Any]]) -> str:
    """The model card of a folder."""
    widths = [rule["epsilon"] for rule in rules]
    return CARD.format(
        kind=fields[MODEL_TYPE]["config"]["model_type"],
        layers=len(rules),
        least=min(widths),
        most=max(widths),
        units=", ".join(sorted({rule["ranked"] for rule in rules})),
        gate=rules[0]["gate"],
    )


FEATURE = "smooth"
VERSIONS = {"ramp": 1, "projected": 2}
"""Of the form in which a configuration holds the record, by gate: before 2 there was no other."""

MOST_LAYERS, MOST_EXPERTS = 10_000, 1_000_000
"""Limits of a record that is read, so that a file cannot claim any amount of memory."""


@dataclass(frozen=True)
class LayerSmoothing:
    """How one router is smoothed.

    Attributes:
        name: its qualified name.
        family: name of its family.
        k: experts that it chooses.
        n_experts: experts that it ranks.
        k_max: most experts per token; all of them for the projection, which cuts none off.
        epsilon: width of the band; 0 leaves the router as it was.
        units: what its selection scores, and so ε, are: logits, softmax, sigmoid or sqrtsoftplus.
    """

    name: str
    family: str
    k: int
    n_experts: int
    k_max: int
    epsilon: float
    units: str

    @property
    def smoothed(self) -> bool:
        """Whether the router's choice is changed."""
        return self.epsilon > 0 and self.k < self.n_experts


@dataclass(frozen=True)
class Smoothing:
    """How a model is smoothed.

    Attributes:
        layers: its routers in order, those with ε = 0 included.
        refused: routers that cannot be smoothed, by name, with the reason.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end.
        how: how ε was chosen, in words.
        detach_ramp: whether no gradient goes through the shares.
        gate: "projected", or "ramp", to which a and b belong.
    """

    layers: tuple[LayerSmoothing, ...]
    refused: Mapping[str, str] = field(default_factory=dict)
    a: float = 1.0
    b: float = 1.0
    how: str = "given"
    detach_ramp: bool = True
    gate: GateName = "ramp"
    _model: "weakref.ref[nn.Module] | None" = field(
        default=None, repr=False, compare=False, metadata={"json": False}
    )

    @property
    def epsilons(self) -> dict[str, float]:
        """ε by router name."""
        return {layer.name: layer.epsilon for layer in self.layers}

    def undo(self) -> None:
        """Undo the smoothing."""
        model = None if self._model is None else self._model()
        require(model is not None, "the model of this record is gone: nothing to undo")
        assert model is not None
        unsmooth_(model)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, read again by `read_smoothing`."""
        return {"version": VERSIONS[self.gate], **to_plain(self)}


def read_smoothing(facts: Any) -> Smoothing:
    """Read the record of an untrusted configuration; refuses a malformed one."""
    try:
        gate = facts.get("gate", "ramp")
        require(gate in VERSIONS, f"its gate is {gate!r}")
        require(facts["version"] == VERSIONS[gate], f"its version is {facts['version']!r}")
        missing = {"layers", "refused", "a", "b", "how", "detach_ramp"} - set(facts)
        require(not missing, f"it lacks {sorted(missing)}")
        require(len(facts["layers"]) <= MOST_LAYERS, f"it has {len(facts['layers'])} layers")
        record = from_plain(Smoothing, facts)
        positive = 0 < record.a < math.inf and 0 < record.b < math.inf
        require(positive, f"its ramp is a={record.a}, b={record.b}")
        for layer in record.layers:
            counts = (layer.k, layer.k_max, layer.n_experts)
            require(1 <= layer.k <= layer.k_max, f"(k, k_max, experts) = {counts}")
            require(layer.k_max <= layer.n_experts <= MOST_EXPERTS, f"experts: {counts}")
            require(0 <= layer.epsilon < math.inf, f"epsilon {layer.epsilon!r}")
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        raise UnsupportedModelError(
            f"the configuration holds a smoothing that cannot be read: {problem}"
        ) from problem
    return record


@contextmanager
def smoothed_routers(model: nn.Module, record: Smoothing, names: Collection[str]) -> Iterator[None]:
    """Inside the block, these routers of a model are smoothed as the record says.

    Args:
        model: the model, which is not smoothed itself.
        record: how.
        names: of routers; those that the record leaves alone stay as they are.
    """
    changed: list[tuple[nn.Module, str, Any]] = []
    layers = [layer for layer in record.layers if layer.smoothed and layer.name in names]
    for layer in layers:
        _smooth_layer(model, layer, record, changed)
    try:
        with ExitStack() as stack:
            for layer in layers:
                stack.enter_context(used_slots_only(experts_of(model, layer.name)))
            yield
    finally:
        for layer in layers:
            detach_handler(model.get_submodule(layer.name))
        for module, attribute, value in reversed(changed):
            setattr(module, attribute, value)


def recorded_smoothing(model: nn.Module) -> Smoothing:
    """Return how a model is smoothed; refuses one that is not."""
    facts = changes_of(getattr(model, "config", None)).get(FEATURE)
    require(facts is not None, f"{type(model).__name__} is not smoothed")
    return read_smoothing(facts)


def with_widths(record: Smoothing, widths: Mapping[str, float]) -> Smoothing:
    """Return the record with other widths ε > 0 of routers that it smooths, by name."""
    layers = [
        replace(layer, epsilon=widths.get(layer.name, 0.0) or layer.epsilon)
        if layer.smoothed
        else layer
        for layer in record.layers
    ]
    return replace(record, layers=tuple(layers))


CHANGED = "tieline_changed"
"""Attribute of the model with the values to restore: (module, attribute, value before)."""


def apply_smoothing(model: nn.Module, record: Smoothing) -> Smoothing:
    """Smooth the routers of `model` as the record says; returns the record with its model."""
    changed: list[tuple[nn.Module, str, Any]] = []
    for layer in record.layers:
        if layer.smoothed:
            _smooth_layer(model, layer, record, changed)
    setattr(model, CHANGED, changed)
    record_change(model, FEATURE, record.to_dict())
    return replace(record, _model=weakref.ref(model))


def restore_smoothing(model: nn.Module, facts: dict[str, Any]) -> Smoothing:
    """Smooth a loaded model as its configuration says; refuses facts that do not fit it."""
    record = read_smoothing(facts)
    routers = find_routers(model)
    for layer in record.layers:
        router = routers.get(layer.name)
        family = None if router is None else family_of(router)
        if router is None or family is None or smoothing_refusal(family) is not None:
            raise UnsupportedModelError(
                f"the configuration does not match the checkpoint: it smooths {layer.name!r}, "
                f"which is no router that can be smoothed; the model has {list(routers)}"
            )
        plan = layer_plan(layer.name, router)
        actual = (plan.family.name, plan.k, plan.n_experts, plan.units)
        stored = (layer.family, layer.k, layer.n_experts, layer.units)
        require(
            actual == stored,
            f"the configuration does not match the checkpoint: {layer_label(layer.name)} is "
            f"smoothed as (family, k, experts, units) = {stored}, the model has {actual}",
            UnsupportedModelError,
        )
    return apply_smoothing(model, record)


def _smooth_layer(
    model: nn.Module,
    layer: LayerSmoothing,
    record: Smoothing,
    changed: list[tuple[nn.Module, str, Any]],
) -> None:
    """Attach the smoothing to one router; notes in `changed` what else it set."""
    plan = layer_plan(layer.name, model.get_submodule(layer.name))
    experts = experts_of(model, layer.name)
    settings = _column_settings(model, plan, layer.k_max, experts)
    for module, attribute, value in settings:
        changed.append((module, attribute, getattr(module, attribute)))
        setattr(module, attribute, value)
    how = RouterSmoothing(
        layer.name,
        plan.family,
        layer.k,
        layer.k_max,
        layer.epsilon,
        record.a,
        record.b,
        record.detach_ramp,
        skip_rule(plan.family, experts, layer.n_experts),
        record.gate,
        tuple(module for module, attribute, _ in settings if attribute == SLOTS),
    )
    attach_handler(plan.router, plan.family, how)


SLOTS = "top_k"
"""Attribute in which the modules around a router count its columns."""


def _column_settings(
    model: nn.Module, plan: LayerPlan, k_max: int, experts: nn.Module | None
) -> list[tuple[nn.Module, str, Any]]:
    """Attributes to set on the modules around a router."""
    if plan.family.counts_columns:
        block = plan.name.rpartition(".")[0]
        around = [block, block.rpartition(".")[0]]
        modules = [model.get_submodule(name) for name in around]
        counting = [m for m in modules if isinstance(getattr(m, SLOTS, None), int)]
        return [(module, SLOTS, k_max) for module in counting]
    if experts is not None and hasattr(experts, FLAG):
        return [(experts, FLAG, True)]
    return []


DEFAULT_EXTRA = 0.5
"""Mean number of experts beyond k per token, unless something else is asked for."""


class GateOptions(TypedDict, total=False):
    """How smoothed experts share their seats.

    Attributes:
        gate: "projected": tied experts share a seat (`ProjectedTopK`); "ramp": experts below the
            threshold are added (`SmoothTopK`), narrowed to k_max of them. By default "projected",
            but "ramp" where a, b or k_max are given, which belong to it.
        a: exponent at the lower end of the ramp.
        b: exponent at its upper end: 1 is a straight ramp, 50 is the paper's.
        k_max: slots per token of the ramp, k < k_max <= E; by default k + max(2, k/2).
        detach_ramp: let no gradient through the shares, as for training; true by default.
    """

    gate: GateName | None
    a: float
    b: float
    k_max: int | None
    detach_ramp: bool


def smooth_(
    model: nn.Module,
    epsilon: float | Sequence[float] | Mapping[str, float] | None = None,
    budget: float | None = None,
    noise: str | float | None = None,
    *,
    calibration: CalibrationScores | None = None,
    layers: Collection[str] | None = None,
    how: str | None = None,
    **form: Unpack[GateOptions],
) -> Smoothing:
    """Make the choice of the routers of `model` continuous; changes nothing if it raises.

    With none of `epsilon`, `budget` and `noise`, the budget is k + 0.5. With budget and noise, a
    layer gets the smaller of both widths.

    Args:
        model: a Mixture-of-Experts model of transformers.
        epsilon: width of the band in units of the selection scores: one number, one per router in
            order, or by router name. Where it is 0 the router keeps its original code.
        budget: mean number of experts per token, k < budget < k_max, or < E for the projection.
        noise: precision whose noise the ramp covers, such as "bf16", "int8" or "router bf16"; or
            the standard deviation of the gap itself.
        calibration: what `run.calibration.calibrate` measured on the tokens to choose ε on; not
            needed if `epsilon` is given.
        layers: names of routers; all that can be smoothed by default.
        how: how ε was chosen, in words, where it is given.
        form: `gate`, `a`, `b`, `k_max` and `detach_ramp`, as `GateOptions` describes them.
    """
    ramp, k_max = _checked_ramp(form), form.get("k_max")
    plans, refused = plan_layers(model, layers)
    slots = {plan.name: _slots_per_token(plan, k_max, ramp.gate) for plan in plans}
    open_plans = [plan for plan in plans if plan.k < plan.n_experts]
    if epsilon is not None:
        require(budget is None and noise is None, "give epsilon, or budget and noise, not both")
        widths, how = given_epsilons(epsilon, plans), how or "given"
    else:
        if budget is None and noise is None:
            budget = open_plans[0].k + DEFAULT_EXTRA if open_plans else None
        widths = chosen_epsilons(open_plans, slots, (budget, noise), calibration, ramp)
        how = " and ".join(
            f"{word} {value}"
            for word, value in (("budget", budget), ("noise", noise))
            if value is not None
        )
    records = tuple(
        LayerSmoothing(
            plan.name,
            plan.family.name,
            plan.k,
            plan.n_experts,
            slots[plan.name],
            float(widths.get(plan.name, 0.0)),
            plan.units,
        )
        for plan in plans
    )
    detach_ramp = form.get("detach_ramp", True)
    record = Smoothing(records, dict(refused), ramp.a, ramp.b, how, detach_ramp, ramp.gate)
    return apply_smoothing(model, record)


def unsmooth_(model: nn.Module) -> None:
    """Undo `smooth_`: restores routers, experts and saving; refuses a model not smoothed."""
    if not hasattr(model, CHANGED):
        raise ParameterError(f"{type(model).__name__} is not smoothed: there is nothing to undo")
    for router in [m for m in model.modules() if router_smoothing(m) is not None]:
        detach_handler(router)
    for module, attribute, value in reversed(getattr(model, CHANGED)):
        setattr(module, attribute, value)
    delattr(model, CHANGED)
    forget_change(model, FEATURE)


def smoothing_record(model: nn.Module, **smoothing: Any) -> Smoothing:
    """Return how `smooth_` would smooth a model; the model itself is left as it is."""
    record = smooth_(model, **smoothing)
    unsmooth_(model)
    return record


def gate_named(name: str | None) -> GateName | None:
    """Return a gate's name; raises if there is no gate of that name."""
    require(name in (None, *VERSIONS), f"gate is 'projected' or 'ramp', got {name!r}")
    return cast("GateName | None", name)


def _checked_ramp(form: GateOptions) -> RampForm:
    """The gate and its exponents; raises if options of the ramp are given with the projection."""
    a, b, k_max = form.get("a", 1.0), form.get("b", 1.0), form.get("k_max")
    require(
        0 < a < math.inf and 0 < b < math.inf, f"a and b must be positive and finite: {a=}, {b=}"
    )
    of_ramp, gate = (a, b) != (1.0, 1.0) or k_max is not None, gate_named(form.get("gate"))
    require(
        gate != "projected" or not of_ramp,
        f"a, b and k_max belong to the ramp, got {a=:g}, {b=:g}, {k_max=} with gate='projected'",
    )
    return RampForm(gate or ("ramp" if of_ramp else "projected"), a, b)


def _slots_per_token(plan: LayerPlan, k_max: int | None, gate: GateName) -> int:
    """Slots that a token may use: all experts for the projection, k_max for the ramp."""
    if gate == "projected":
        return plan.n_experts
    if k_max is None or plan.k == plan.n_experts:
        return default_k_max(plan.k, plan.n_experts)
    require(
        plan.k < k_max <= plan.n_experts,
        f"k_max must be above k and at most the number of experts, got {k_max} for k={plan.k} of "
        f"{plan.n_experts} in {layer_label(plan.name)}",
    )
    return k_max


register_restorer(
    FEATURE, Restorer(after=restore_smoothing, check=read_smoothing, saved=make_portable)
)
