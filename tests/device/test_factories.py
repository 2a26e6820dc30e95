"""Every tensor that the package creates names its device: torch's default may be any.

Parameters of modules follow it, as those of torch's own modules do.
"""

import ast
from pathlib import Path

from torch.utils._device import _device_constructors

SOURCE = Path(__file__).parents[2] / "src" / "tieline"
FACTORIES = {constructor.__name__ for constructor in _device_constructors()}


def nameless_factories(tree):
    """Lines that create a tensor without naming its device, parameters apart."""
    in_parameters = {
        inner
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "nn.Parameter"
        for inner in ast.walk(call)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or call in in_parameters:
            continue
        room, _, name = ast.unparse(call.func).rpartition(".")
        names_device = any(keyword.arg in ("device", None) for keyword in call.keywords)
        if room == "torch" and name in FACTORIES and not names_device:
            yield call.lineno


def test_every_tensor_of_the_instrument_names_its_device():
    rooms = (path for path in SOURCE.rglob("*.py") if "lab" not in path.relative_to(SOURCE).parts)
    nameless = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in rooms
        for line in nameless_factories(ast.parse(path.read_text()))
    ]
    assert not nameless, nameless


def test_a_tensor_without_a_device_is_seen():
    source = "x = torch.zeros(3)\nw = nn.Parameter(torch.zeros(3))\ny = torch.ones(2, device=d)"
    assert list(nameless_factories(ast.parse(source))) == [1]
