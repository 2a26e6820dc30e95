"""What a capture has seen: records per forward pass, kept as one trace or handed on to a sink."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor, nn

from tieline.errors import TielineError, TraceError, require
from tieline.hf.batches import Batch, DocumentCounter
from tieline.hf.layers import Call, LayerObserver
from tieline.trace.ops import concatenate
from tieline.trace.record import LayerTrace, RoutingTrace

__all__ = ["Recorder", "Sink"]


@runtime_checkable
class Sink(Protocol):
    """Consumer of the layers of each forward pass, such as `SummaryBuilder`."""

    def update(
        self,
        layer: int | str,
        chunk: LayerTrace,
        documents: Int[Tensor, " tokens"],
        positions: Int[Tensor, " tokens"],
        tokens: Int[Tensor, " tokens"],
    ) -> None:
        """Take what one layer, called by its router's name, did with these tokens."""
        ...


class Recorder:
    """Collects the routing of every forward pass of a model under capture.

    Layers are in the order in which they run. With a sink, those of each pass are handed to it when
    the pass has ended and then forgotten. A pass that raises leaves nothing behind.

    Attributes:
        n_tokens: number of tokens recorded so far.
        provenance: model, revision, dtype and versions, as every trace carries them.
    """

    def __init__(
        self,
        counter: DocumentCounter,
        epsilons: tuple[float, ...],
        provenance: dict[str, object],
        sink: Sink | None,
    ) -> None:
        """Number documents by `counter`; keep passes, or hand them to `sink`."""
        self._counter = counter
        self._epsilons = epsilons
        self.provenance = provenance
        self._sink = sink
        self._batch: Batch | None = None
        self._pass: dict[str, LayerTrace] = {}
        self._layers: tuple[str, ...] | None = None
        self._passes: list[RoutingTrace] = []
        self.n_tokens = 0

    @property
    def under_way(self) -> Mapping[str, LayerTrace]:
        """The layers that have run so far in the current forward pass, by their routers' names."""
        return self._pass

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """A forward pass of the model starts with these arguments."""
        self._pass = {}
        self._batch = self._counter.read(arguments)

    def observe(self, observer: LayerObserver, router: nn.Module, call: Call, output: Any) -> None:
        """A router was called and returned `output`."""
        batch = self._batch
        if batch is None:
            raise TielineError(
                f"layer {observer.name!r} ran outside the forward pass of the captured model, so "
                "its tokens are unknown: call the model itself, or capture the part that is called"
            )
        require(
            observer.name not in self._pass,
            f"layer {observer.name!r} ran twice in one forward pass: which call is it?",
            TielineError,
        )
        self._pass[observer.name] = observer.observe(router, call, output, batch)

    def finish(self) -> None:
        """The forward pass ended well: keep it or hand it on."""
        batch, found = self._batch, self._pass
        self._batch, self._pass = None, {}
        if batch is None or len(batch.tokens) == 0:
            return
        self._check_layers(tuple(found))
        self.n_tokens += len(batch.tokens)
        layers = tuple(found.values())
        if self._sink is None:
            self._passes.append(self._trace(layers, batch))
            return
        for layer in layers:
            self._sink.update(layer.name, layer, batch.documents, batch.positions, batch.tokens)

    def trace(self) -> RoutingTrace:
        """The routing of all tokens so far, in the order of the passes."""
        require(self._sink is None, "the sink has consumed the passes: no trace kept", TraceError)
        require(bool(self._passes), "no forward pass has been captured yet", TraceError)
        return concatenate(self._passes)

    def _trace(self, layers: tuple[LayerTrace, ...], batch: Batch) -> RoutingTrace:
        keys = batch.tokens, batch.documents, batch.positions
        return RoutingTrace(layers, *keys, self._epsilons, self.provenance)

    def _check_layers(self, names: tuple[str, ...]) -> None:
        if self._layers is None:
            require(bool(names), "no router ran in the forward pass", TielineError)
            self._layers = names
        require(
            names == self._layers,
            f"layers {sorted(set(names) ^ set(self._layers))} ran in some forward passes only",
            TielineError,
        )
