"""What the records of a forward pass read back from an accelerator: one copy, when it has ended.

Reading a number makes the host wait until the device has caught up. So while a pass runs, records
stay on the device and checks are noted (`PassChecks`); when it has ended `layers_on_cpu` moves all
of it together, and raises what a check found. On the CPU every check is made at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool
from torch import Tensor

from tieline.trace.record import LayerTrace

__all__ = ["PassChecks", "layers_on_cpu", "refuse_if"]


class PassChecks:
    """Checks of one forward pass whose answers are read when it has ended."""

    def __init__(self) -> None:
        self._noted: list[tuple[Tensor, Callable[[], None]]] = []
        self._kept: dict[torch.device, Tensor] = {}

    def add(self, wrong: Bool[Tensor, ""], refuse: Callable[[], None]) -> None:
        """Note that `refuse`, which raises, is to be called if `wrong`."""
        self._noted.append((wrong, refuse))

    def on_device(self, rows: Tensor, device: torch.device) -> Tensor:
        """Row numbers of the pass on a device, copied once."""
        if device not in self._kept:
            self._kept[device] = rows.to(device)
        return self._kept[device]

    def take(self) -> list[tuple[Tensor, Callable[[], None]]]:
        """The noted checks, which are forgotten."""
        noted, self._noted = self._noted, []
        return noted


def refuse_if(
    wrong: Bool[Tensor, ""], refuse: Callable[[], None], checks: PassChecks | None = None
) -> None:
    """Call `refuse`, which raises, if `wrong`; on an accelerator with `checks`, at the end."""
    if checks is not None and wrong.device.type != "cpu":
        checks.add(wrong, refuse)
    elif bool(wrong):
        refuse()


def layers_on_cpu(layers: Sequence[LayerTrace], checks: PassChecks) -> list[LayerTrace]:
    """The layers with all their tensors on the CPU; raises what the checks of the pass refuse."""
    noted = checks.take()
    columns = [
        (index, name, tensor)
        for index, layer in enumerate(layers)
        for name, tensor in layer.tensors().items()
        if tensor.device.type != "cpu"
    ]
    if not columns and not noted:
        return list(layers)
    flags = [wrong for wrong, _ in noted]
    copies = _copy_together([*flags, *(tensor for _, _, tensor in columns)])
    for wrong, (_, refuse) in zip(copies, noted, strict=False):
        refuse_if(wrong, refuse)
    changes: list[dict[str, Tensor]] = [{} for _ in layers]
    for (index, name, _), copy in zip(columns, copies[len(flags) :], strict=True):
        changes[index][name] = copy
    return [replace(layer, **new) for layer, new in zip(layers, changes, strict=True)]


def _copy_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the CPU, by one transfer per device that holds some of them."""
    copies: dict[int, Tensor] = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [n for n, tensor in enumerate(tensors) if tensor.device == device]
        numbers.sort(key=lambda n: -tensors[n].dtype.itemsize)  # keeps every start aligned
        sizes = [tensors[n].numel() * tensors[n].dtype.itemsize for n in numbers]
        flat = torch.cat([tensors[n].contiguous().flatten().view(torch.uint8) for n in numbers])
        for n, part in zip(numbers, _bytes_on_cpu(flat).split(sizes), strict=True):
            copies[n] = part.view(tensors[n].dtype).view(tensors[n].shape)
    return [copies[n] for n in range(len(tensors))]


def _bytes_on_cpu(flat: Tensor) -> Tensor:
    """Bytes on the CPU: through pinned memory, which is scarce and so not kept, where it helps."""
    if flat.device.type != "cuda":
        return flat.cpu()
    pinned = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
    return pinned.copy_(flat).clone()
