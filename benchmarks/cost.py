"""What it costs to run a Mixture of Experts on a text: bytes, operations, memory, network.

With L layers of which R are routed, width d, E experts of width h of which k (and s shared ones)
run per token, a words of attention parameters per layer and T tokens in sequences of n:

    parameters  = 2 v d + Σ layers [ a + 2 d ] + R (3 E d h + 3 s d h + E d) + (L - R) 3 d f
    operations  = 2 T (L a + R (3 (k + s) d h + E d) + (L - R) 3 d f) + attention 4 T n m L
    memory      = one routed layer in the compute precision, times what was measured around it
    network     = tp: 2 all-reduces of T d per layer;  ep: T d to each chosen rank and back

(v words, f width of dense layers, m heads times their size.) Times are a read of all bytes at the
speed of the disk plus the operations at the speed of matrix products, times `OVERHEAD`.
"""

from dataclasses import dataclass

OVERHEAD = 1.48
"""Measured time over (read + operations): 287 s for 77 s + 117 s, see `MEASURED`."""

AROUND = 1.85
"""Measured memory over one layer: 4.60 GB for 2.49 GB."""


@dataclass(frozen=True)
class Layout:
    """The sizes of a published model.

    Attributes:
        layers: decoder layers L.
        routed: those with experts, R.
        width: of the model, d.
        experts: E.
        chosen: experts per token k.
        shared: experts that every token uses.
        expert_width: h.
        dense_width: f of the layers without experts.
        attention: parameters of the attention of a layer.
        head_words: heads times the size of a head, m.
        vocabulary: v.
        stored: bytes of a parameter on the disk.
    """

    layers: int
    routed: int
    width: int
    experts: int
    chosen: int
    shared: int
    expert_width: int
    dense_width: int
    attention: int
    head_words: int
    vocabulary: int
    stored: int = 2

    @property
    def expert(self) -> int:
        """Parameters of an expert."""
        return 3 * self.width * self.expert_width

    @property
    def routed_layer(self) -> int:
        """Parameters of a layer with experts."""
        experts = (self.experts + self.shared) * self.expert + self.experts * self.width
        return self.attention + 2 * self.width + experts

    @property
    def parameters(self) -> int:
        """All parameters; embedding and head are two matrices."""
        dense = self.attention + 2 * self.width + 3 * self.width * self.dense_width
        plain = (self.layers - self.routed) * dense
        return 2 * self.vocabulary * self.width + self.routed * self.routed_layer + plain


def grouped_attention(width: int, heads: int, shared: int, size: int) -> int:
    """Parameters of attention with `shared` heads of keys and values."""
    return width * size * 2 * (heads + shared)


def latent_attention(width: int, heads: int, queries: int = 1536, keys: int = 512) -> int:
    """Parameters of DeepSeek's latent attention: 128 + 64 per query, 128 per value."""
    down = width * (queries + keys + 64)
    return down + queries * heads * 192 + keys * heads * 256 + heads * 128 * width


LAYOUTS = {
    "Mixtral-8x7B": Layout(
        32, 32, 4096, 8, 2, 0, 14336, 0, grouped_attention(4096, 32, 8, 128), 4096, 32000
    ),
    "Qwen3-235B-A22B": Layout(
        94, 94, 4096, 128, 8, 0, 1536, 0, grouped_attention(4096, 64, 4, 128), 8192, 151936
    ),
    "DeepSeek-V3": Layout(
        61, 58, 7168, 256, 8, 1, 2048, 18432, latent_attention(7168, 128), 16384, 129280, 1
    ),
    "Kimi-K2": Layout(
        61, 60, 7168, 384, 8, 1, 2048, 18432, latent_attention(7168, 64), 8192, 163840, 1
    ),
}
"""Sizes from the published configurations."""

PUBLISHED = {
    "Mixtral-8x7B": 46.7e9,
    "Qwen3-235B-A22B": 235e9,
    "DeepSeek-V3": 671e9,
    "Kimi-K2": 1.04e12,
}
"""Parameters that the makers state, to check the sizes by."""

MEASURED_LAYOUT = Layout(
    24, 24, 2048, 128, 8, 0, 768, 0, grouped_attention(2048, 32, 4, 128), 4096, 151936
)
"""The half of Qwen3-30B-A3B that was streamed on a CPU of two cores."""

MEASURED = {"bytes": 31.21e9, "operations": 11.2e12, "layer": 2.49e9, "seconds": 287.0}
"""What was measured on it: 4,096 tokens in sequences of 512, bf16 on the disk, float32 computed."""


@dataclass(frozen=True)
class Machine:
    """What a machine does per second, and how many devices share the work.

    Attributes:
        disk: bytes read.
        rate: operations of matrix products, of one device.
        link: bytes sent and received between devices, of one device.
        devices: how many.
        memory: bytes of one device.
        width: bytes of a parameter that is computed with.
    """

    disk: float
    rate: float
    link: float
    devices: int
    memory: float
    width: int


LAPTOP = Machine(disk=405e6, rate=95e9, link=0.0, devices=1, memory=16e9, width=4)
"""Measured here on two cores: one cold read, and float32 products of the shape of an expert."""

NODE = Machine(disk=6e9, rate=0.4 * 989e12, link=450e9, devices=8, memory=80e9, width=2)
"""Eight H100 by their data sheet, of whose bf16 peak 40 % is assumed; not measured."""


@dataclass(frozen=True)
class Cost:
    """What a run costs.

    Attributes:
        bytes: read from the disk.
        operations: of all forward passes.
        layer: bytes of one routed layer in the compute precision.
        memory: bytes that a device needs: streamed on one device, else its part of the model.
        network: bytes that a device sends for expert parallelism (0 for one device).
        network_tensor: the same for tensor parallelism.
        seconds: wall time, streamed on one device, else loaded and run on all.
    """

    bytes: float
    operations: float
    layer: float
    memory: float
    network: float
    network_tensor: float
    seconds: float


def operations(layout: Layout, tokens: int, sequence: int) -> float:
    """Return the operations of the forward passes of an inspection, which leaves out the head."""
    routed = (layout.chosen + layout.shared) * layout.expert + layout.experts * layout.width
    dense = (layout.layers - layout.routed) * 3 * layout.width * layout.dense_width
    used = layout.layers * layout.attention + layout.routed * routed + dense
    attention = 4.0 * tokens * sequence * layout.head_words * layout.layers
    return 2.0 * tokens * used + attention


def cost(layout: Layout, machine: Machine, tokens: int = 16384, sequence: int = 512) -> Cost:
    """Return what inspecting a model on a text costs.

    Args:
        layout: sizes of the model.
        machine: where it runs.
        tokens: of the text.
        sequence: tokens per sequence.
    """
    stored = float(layout.parameters * layout.stored)
    work = operations(layout, tokens, sequence)
    layer = float(layout.routed_layer * machine.width)
    alone = machine.devices == 1
    part = layout.parameters * machine.width / machine.devices
    sent = tokens * layout.width * machine.width
    away = 1 - 1 / machine.devices
    ranks = min(layout.chosen, machine.devices)
    by_experts = 2.0 * layout.routed * sent * ranks * away / machine.devices
    by_tensors = 2.0 * 2.0 * layout.layers * sent * away
    by_experts, by_tensors = (0.0, 0.0) if alone else (by_experts, by_tensors)
    network = 0.0 if alone else by_experts / machine.link
    seconds = stored / machine.disk + work / (machine.rate * machine.devices) + network
    return Cost(
        bytes=stored,
        operations=work,
        layer=layer,
        memory=AROUND * layer if alone else part,
        network=by_experts,
        network_tensor=by_tensors,
        seconds=OVERHEAD * seconds,
    )


def errors() -> dict[str, float]:
    """Return how far the model is from what was measured or published, relative to that."""
    predicted = cost(MEASURED_LAYOUT, LAPTOP, 4096, 512)
    deviations = {name: getattr(predicted, name) / value - 1 for name, value in MEASURED.items()}
    sizes = {name: LAYOUTS[name].parameters / value - 1 for name, value in PUBLISHED.items()}
    return deviations | sizes
