"""Labels of layers in sentences."""

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
