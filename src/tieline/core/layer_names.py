"""How layers are named: by number in sentences, without what all share in tables.

layer_label     one layer: "layer 3"
layer_labels    layers that a sentence must tell apart
short_names     names without the parts that all share: "3"
"""

import re
from collections import Counter
from collections.abc import Sequence


def layer_labels(names: Sequence[str]) -> dict[str, str]:
    """Label "layer 3" for the name "model.layers.3.mlp.gate", where that tells the layers apart."""
    numbers = [re.search(r"\d+", name) for name in names]
    counts = Counter(match.group() for match in numbers if match)
    return {
        name: f"layer {match.group()}"
        if match and counts[match.group()] == 1
        else f"layer {name!r}"
        for name, match in zip(names, numbers, strict=True)
    }


def layer_label(name: str | None) -> str:
    """Return "layer 3" for "model.layers.3.mlp.gate", "encoder layer 3" for a router of an encoder.

    A name with no number, or with several, is quoted: "layer 'gate'".
    """
    path = (name or "").split(".")
    numbers = [part for part in path if part.isdecimal()]
    if len(numbers) != 1:
        return f"layer {name!r}"
    stack = next((f"{part} " for part in path if part in ("encoder", "decoder")), "")
    return f"{stack}layer {int(numbers[0])}"


def short_names(names: Sequence[str]) -> list[str]:
    """Names without the dotted parts that all share in front and behind.

    `model.layers.3.mlp.gate` becomes `3` beside its likes; a single name stays as it is.
    """
    paths = [name.split(".") for name in names]
    shortest = min((len(path) for path in paths), default=0)
    front = _shared_segments(paths, range(shortest))
    back = _shared_segments(paths, range(-1, -shortest - 1, -1))
    if len(set(names)) < 2 or front + back >= shortest:
        return list(names)
    return [".".join(path[front : len(path) - back]) for path in paths]


def _shared_segments(paths: list[list[str]], indices: range) -> int:
    """Number of leading indices at which all paths agree."""
    count = 0
    for index in indices:
        if len({path[index] for path in paths}) > 1:
            break
        count += 1
    return count
