"""Write the tables of families in the documentation from the records.

    python -m tools.family_tables

The end of `docs/families.md` is `support_table()`; `docs/smooth.md` contains `smoothing_list()`.
"""

import re
from pathlib import Path

from tieline.models.families import GroupRule, RouterFamily
from tieline.models.family_table import TRANSFORMERS_FAMILIES
from tieline.models.smoothed_router import smoothing_refusal

DOCS = Path(__file__).parents[1] / "docs"


def support_table(families: tuple[RouterFamily, ...] = TRANSFORMERS_FAMILIES) -> str:
    """Return Markdown tables: how each family routes, and which are refused and why."""
    captured = [family for family in families if family.refused is None]
    refused = [family for family in families if family.refused is not None]
    count = len({family.name for family in captured})
    return "\n".join(
        [
            f"## Captured: {count} families\n",
            *_table(["family", "router", "ranked", "groups", "weights", "distance", "note"]),
            *map(_captured_row, captured),
            "\n## Refused\n",
            *_table(["family", "router", "reason"]),
            *(_row(f.name, _code(f.routers), f.refused or "") for f in refused),
            "",
        ]
    )


def smoothing_list(families: tuple[RouterFamily, ...] = TRANSFORMERS_FAMILIES) -> str:
    """Return Markdown: the families that `smooth_` can smooth, and why it refuses others."""
    smoothed = sorted({family.name for family in families if smoothing_refusal(family) is None})
    refused = [family for family in families if smoothing_refusal(family) is not None]
    return "\n".join(
        [
            f"Smoothed: {len(smoothed)} families.\n",
            ", ".join(f"`{name}`" for name in smoothed) + ".\n",
            f"Refused by name: {len(refused)} kinds of routers.\n",
            *_table(["family", "router", "reason"]),
            *(_row(f.name, _code(f.routers), smoothing_refusal(f) or "") for f in refused),
            "",
        ]
    )


def _captured_row(family: RouterFamily) -> str:
    notes = [
        family.note,
        family.refused_in_training and f"refused in training: {family.refused_in_training}",
    ]
    return _row(
        family.name,
        _code(family.routers),
        _ranked(family),
        _groups(family.groups),
        _weights(family),
        _distance(family),
        "; ".join(filter(None, notes)),
    )


def _ranked(family: RouterFamily) -> str:
    ranked = f"`{family.activation}`" if family.ranked == "activation" else family.ranked
    bias = family.bias or family.bias_argument
    return f"{ranked} + bias" if bias else ranked


def _distance(family: RouterFamily) -> str:
    if family.ranked != "logits" or family.weight is None:
        return "no"
    return "yes" if family.groups is None else "without groups"


def _groups(groups: GroupRule | None) -> str:
    if groups is None:
        return ""
    rule = {"max": "best expert", "top2sum": "two best experts"}[groups.score]
    units = f", by {groups.ranked}" if groups.ranked else ""
    return f"{rule}{units}"


def _weights(family: RouterFamily) -> str:
    special = family.norm_order is not None or family.shared_weights is not None
    special |= callable(family.combine) or callable(family.scale)
    if special or family.refused_weights is not None:
        return "see note"
    how = {"always": ", renormalised", "never": ""}.get(
        family.renormalise, f", renormalised if `{family.renormalise}`"
    )
    scaled = f", × `{family.scale}`" if family.scale else ""
    name = f"`{family.activation}`" if family.combine == "activation" else family.combine
    return f"{name}{how}{scaled}"


def _table(columns: list[str]) -> list[str]:
    return [_row(*columns), _row(*["---"] * len(columns))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main() -> None:
    """Replace both tables in the pages."""
    pages = {
        "families.md": (r"## Captured: .*\Z", support_table()),
        "smooth.md": (r"Smoothed: \d+ families\.\n.*?(?<=\|\n)(?=\n|\Z)", smoothing_list()),
    }
    for name, (pattern, table) in pages.items():
        page = DOCS / name
        text = page.read_text(encoding="utf-8")
        written = table.join(re.split(pattern, text, flags=re.DOTALL))
        page.write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
