"""A smoothed model for those who have no Tieline: rules as data, a modelling file, a model card.

    portable_rules    the rule of every smoothed router as JSON values; None if some has none
    make_portable     add rules, modelling file and model card to a folder that was just saved

The folder then loads with `trust_remote_code=True` in plain transformers, and after `import
tieline` without it. Families whose rule is not one of `modeling_tieline`'s keep the form that
Tieline alone loads.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tieline.core.files import write_whole
from tieline.models.families import RouterFamily, family_of
from tieline.models.layouts import COLUMNS
from tieline.models.router_rule import (
    combine_rule,
    family_scale,
    group_limit,
    renormalises_weights,
    score_units,
)
from tieline.models.smoothed_router import RouterSmoothing, router_smoothing
from tieline.serving import modeling_tieline

MODEL_TYPE = "tieline"
MODELLING_FILE = Path(modeling_tieline.__file__)

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
    known = (
        units in ("logits", "softmax", "sigmoid") and combine_rule(family, router) != "activation"
    )
    return family.layout is COLUMNS and known and not any(special)


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
    }
    fields[MODEL_TYPE]["rules"] = rules
    shutil.copyfile(MODELLING_FILE, folder / MODELLING_FILE.name)
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
