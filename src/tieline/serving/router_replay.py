"""Exchange routes with the replay objects of trainers that run without Tieline.

    Megatron-Core   RouterReplay of each router (megatron.core.transformer.moe.router_replay)
    verl            RouterReplay of each router (verl.utils.megatron.router_replay_patch); the live
                    router chooses for tokens without a record
    verl, VeOmni    the one VeOmniRouterReplay (verl.utils.veomni.router_replay)
    Megatron-Core   the token dispatchers of the layers: experts and combine weights (`dispatched`)

    routers = ReplayedRouters(RouterReplay.global_router_replay_instances)
    RouteRows(routers.recorded(), documents).save("rollout.npz")     # after action RECORD

    routers.replay(RouteRows.load("rollout.npz").of(documents))      # in the order of this batch
    with routers.watch():                                            # action REPLAY_FORWARD
        model(...)
    logger.log(routers.step())                                       # rollout/flip_rate, ...

Files are read by `tieline diff`, `check` and `inspect`, and written by `tieline convert IN
rollout.npz`. Documents are the token ids of each sequence, in the order in which the routers get
them, packed and without padding. Needs torch and NumPy only; nothing of the trainers is imported.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tieline.serving.flip_counts import PREFIX, FlipCounts, flip_scalars, summed_over_ranks

ARRAYS = ("routed_experts", "tokens", "documents", "positions")
"""Arrays of a file: experts (tokens, layers, k), and three arrays with an integer per token."""


@dataclass(frozen=True)
class RouteRows:
    """Experts of the tokens of several documents, one after the other.

    Attributes:
        experts: (tokens, layers, k), -1 without a record.
        documents: token ids of each document.
        weights: combine weights of the experts, or None.
    """

    experts: Tensor
    documents: Sequence[Tensor]
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = sum(map(len, self.documents))
        if self.experts.ndim != 3 or len(self.experts) != tokens:
            raise ValueError(
                f"experts must be (tokens, layers, k) of {tokens} tokens, "
                f"got {tuple(self.experts.shape)}"
            )

    def save(self, path: str | Path) -> None:
        """Write the tokens with a record to an .npz file that Tieline reads."""
        if Path(path).suffix != ".npz":
            raise ValueError(f"{path}: must end in .npz")
        lengths = torch.tensor([len(document) for document in self.documents], device="cpu")
        numbers = torch.arange(len(lengths), device="cpu")
        documents = torch.repeat_interleave(numbers, lengths)
        positions = torch.cat([torch.arange(n, device="cpu") for n in lengths.tolist()])
        tokens = torch.cat([document.cpu().long() for document in self.documents])
        recorded = (self.experts >= 0).all(dim=2).all(dim=1).cpu()
        columns = (self.experts.cpu().int(), tokens, documents, positions)
        arrays = {name: x[recorded].numpy() for name, x in zip(ARRAYS, columns, strict=True)}
        if self.weights is not None:
            arrays["weights"] = self.weights.cpu().float()[recorded].numpy()
        np.savez_compressed(path, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "RouteRows":
        """Read a file of `save` or of `tieline convert IN FILE.npz`."""
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in ARRAYS if name not in file]
            if missing:
                raise ValueError(
                    f"{path}: has no {missing[0]}: write it with `tieline convert IN OUT.npz`"
                )
            experts, tokens, documents, positions = (np.asarray(file[name]) for name in ARRAYS)
        shaped = experts.ndim == 3 and len(experts) > 0
        if not shaped or any(x.shape != experts.shape[:1] for x in (tokens, documents, positions)):
            raise ValueError(f"{path}: needs experts (tokens, layers, k) and a number per token")
        if any(x.dtype.kind not in "iu" for x in (experts, tokens, documents, positions)):
            raise ValueError(f"{path}: experts, tokens, documents, positions must be whole numbers")
        starts = np.flatnonzero(np.diff(documents, prepend=documents[0] - 1))
        lengths = np.diff(starts, append=len(documents))
        if bool((positions != np.arange(len(positions)) - np.repeat(starts, lengths)).any()):
            raise ValueError(f"{path}: a document has positions without a record")
        ids = torch.from_numpy(tokens.astype(np.int64)).split(lengths.tolist())
        return cls(torch.from_numpy(experts.astype(np.int64)), ids)

    def of(self, documents: Sequence[Tensor]) -> "RouteRows":
        """Return the rows of these documents, -1 for tokens without a record.

        A document gets the record of the same tokens, or of all but the last, after which an engine
        samples nothing. The first of equal records is used.
        """
        starts = np.cumsum([0, *map(len, self.documents)])
        first: dict[bytes, slice] = {}
        for number, document in enumerate(self.documents):
            rows = slice(int(starts[number]), int(starts[number + 1]))
            first.setdefault(_token_bytes(document), rows)
        rows_of_documents = [
            _recorded_rows(self.experts, first, document)
            for document in (document.long() for document in documents)
        ]
        return RouteRows(torch.cat(rows_of_documents), documents)


def _token_bytes(document: Tensor) -> bytes:
    """Return the token ids of a document as bytes."""
    return document.cpu().long().numpy().tobytes()


def _recorded_rows(
    experts: Tensor, rows_by_tokens: dict[bytes, slice], token_ids: Tensor
) -> Tensor:
    """Return the recorded rows of one document, -1 for tokens without a record."""
    rows = rows_by_tokens.get(_token_bytes(token_ids)) or rows_by_tokens.get(
        _token_bytes(token_ids[:-1]), slice(0, 0)
    )
    padded = experts.new_full((len(token_ids), *experts.shape[1:]), -1)
    padded[: rows.stop - rows.start] = experts[rows]
    return padded


class ReplayedRouters:
    """The replay objects of a trainer: reads their records, hands them routes and counts flips.

    Args:
        routers: replay objects of the routers of this rank in order, or the single one of VeOmni.
    """

    def __init__(self, routers: Any) -> None:
        self._controller: Any = routers if hasattr(routers, "on_router_forward") else None
        self._routers: list[Any] = [] if self._controller is not None else list(routers)
        if not self._routers and self._controller is None:
            raise ValueError("there are no replay objects: build the model with replay enabled")
        self._unrecorded: Tensor | None = None
        self._last_tokens: Tensor | None = None
        self._live: dict[int, Tensor] = {}
        self._counts: FlipCounts | None = None
        self._tokens = torch.zeros(2, dtype=torch.int64, device="cpu")

    def recorded(self) -> Tensor:
        """Return the experts (tokens, layers, k) that the objects recorded."""
        if self._controller is not None:
            return self._controller.take_recorded().long().cpu()
        rows = [router.get_recorded_indices() for router in self._routers]
        if any(layer is None for layer in rows):
            raise ValueError("a router has recorded nothing: run the model in the action RECORD")
        return torch.stack([layer.detach().long() for layer in rows], dim=1).cpu()

    def live(self) -> Tensor:
        """Return the experts (tokens, layers, k) of the live routers in the last watched pass."""
        return torch.stack([self._live[layer] for layer in sorted(self._live)], dim=1)

    def replay(self, routes: RouteRows) -> None:
        """Pass each object its experts of the next forward pass.

        In verl's objects the live router chooses for tokens without a record. Megatron's cannot
        leave tokens out: there the last token of a document gets the experts of the previous one,
        which no loss depends on, and a document without any record raises an error.
        """
        rows = routes.experts
        layers = len(self._routers) or rows.shape[1]
        if rows.shape[1] != layers:
            raise ValueError(f"the record has {rows.shape[1]} layers, the model {layers} routers")
        missing = (rows < 0).any(dim=2).any(dim=1)
        self._unrecorded, self._last_tokens = missing, _unrecorded_last_tokens(routes, missing)
        if self._controller is not None:
            if rows.shape[2] == 1 and bool(missing.any()):
                raise ValueError("VeOmni cannot leave tokens to the live router where k = 1")
            self._controller.begin_microbatch(list(rows.clamp(min=0).unbind(dim=1)))
            return
        takes_mask = (
            "replay_mask" in inspect.signature(self._routers[0].set_target_indices).parameters
        )
        filled = rows.clamp(min=0)
        if not takes_mask:
            filled = _with_last_tokens_filled(rows, missing, self._last_tokens)
        for router, experts in zip(self._routers, filled.unbind(dim=1), strict=True):
            masks = {"replay_mask": ~missing} if takes_mask and bool(missing.any()) else {}
            router.set_target_indices(experts.contiguous(), **masks)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Compare the live routers' own choice with the replayed one in forward passes."""
        with ExitStack() as stack:
            if self._controller is not None:
                replaced = _wrapped_method(
                    self._controller, "on_router_forward", self._router_forward_and_count
                )
                stack.enter_context(replaced)
            for layer, router in enumerate(self._routers):
                compared = partial(self._replay_topk_and_count, layer, router)
                stack.enter_context(_wrapped_method(router, "get_replay_topk", compared))
            yield

    @torch.no_grad()
    def _count_topk_flips(
        self, layer: int, router: Any, live: Tensor, scores: Tensor, groups: int | None
    ) -> None:
        """Compare the own choice of Megatron's or verl's router with the replayed one."""
        mask = getattr(router, "target_replay_mask", None)
        missing = self._unrecorded if mask is None else ~mask.bool()
        self._count_flips(
            layer, live, router.target_topk_idx, _topk_gaps(scores, live, groups), missing
        )

    def _replay_topk_and_count(
        self,
        layer: int,
        router: Any,
        choose: Callable[..., Any],
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> Any:
        """`get_replay_topk` of an object that counts flips in forward passes only."""
        if getattr(router.router_replay_action, "value", None) == "replay_forward":
            with torch.no_grad():
                groups = {"num_groups": num_groups, "group_topk": group_topk}
                live = default_compute_topk(scores, topk, **groups)[1]
            self._count_topk_flips(layer, router, live, scores, num_groups if group_topk else None)
        return choose(scores, topk, num_groups, group_topk, default_compute_topk)

    def _router_forward_and_count(
        self,
        choose: Callable[..., Any],
        module: Any,
        routing_scores: Tensor,
        top_indices: Tensor,
    ) -> Any:
        """`on_router_forward` of VeOmni's object that counts flips in first calls only."""
        layer = self._controller.num_fired
        answer = choose(module, routing_scores, top_indices)
        if self._controller.action.value == "replay" and self._controller.num_fired > layer:
            target = self._controller._targets[layer]
            ordered = target.sort(dim=1).values
            missing = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)  # its own sign of no record
            gaps = _topk_gaps(routing_scores, top_indices, None)
            self._count_flips(layer, top_indices, target, gaps, missing)
        return answer

    def _count_flips(
        self, layer: int, live: Tensor, recorded: Tensor, gaps: Tensor, missing: Tensor | None
    ) -> None:
        """Add a layer's live and recorded choices (tokens, k) to the flip counts."""
        self._live[layer] = live.cpu()
        recorded = recorded.to(live.device)
        is_recorded = torch.ones(len(live), dtype=torch.bool, device=live.device)
        if missing is not None:
            is_recorded = ~missing.to(live.device)
        if self._counts is None:
            self._counts = FlipCounts(len(self._routers) or self._controller.num_targets)
        flips = (live.sort(dim=1).values != recorded.sort(dim=1).values).any(dim=1)
        self._counts.add(layer, gaps[is_recorded], flips[is_recorded])
        if layer == 0:
            ends = 0 if self._last_tokens is None else int(self._last_tokens.sum())
            counts = [len(live), int((~is_recorded).sum()) - ends]
            self._tokens += torch.tensor(counts, device="cpu")

    def step(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return the metrics of the passes since the last call; empty without passes.

        Args:
            group: ranks with the same layers and other tokens, to sum over; by default this process
                only. Every rank of the group must call this.
        """
        if self._counts is None:
            return {}
        gaps, tokens = self._counts.gaps, self._tokens
        if group is not None:
            gaps, tokens = summed_over_ranks(gaps, group), summed_over_ranks(tokens, group)
        self._counts, self._tokens = None, torch.zeros_like(tokens)
        count, unrecorded = tokens.tolist()
        scalars = flip_scalars(gaps) | {"unrecorded": unrecorded / count, "tokens": float(count)}
        return {f"{PREFIX}{name}": value for name, value in scalars.items()}


def _unrecorded_last_tokens(routes: RouteRows, missing: Tensor) -> Tensor:
    """Return the mask of last tokens without a record in documents that have one."""
    lengths = [len(document) for document in routes.documents]
    ends = torch.tensor(lengths, device=missing.device).cumsum(0)
    follows = torch.zeros_like(missing)
    follows[ends - 1] = True
    follows[ends - torch.tensor(lengths, device=missing.device)] = False  # first of each document
    return follows & missing & ~missing.roll(1)


def _with_last_tokens_filled(rows: Tensor, missing: Tensor, ends: Tensor) -> Tensor:
    """Replace the rows of last tokens by the previous token's; raises if others are missing."""
    if bool((missing & ~ends).any()):
        raise ValueError(
            f"{int((missing & ~ends).sum())} of {len(missing)} tokens have no record, which "
            "Megatron's RouterReplay cannot leave to the live router: replay the documents that "
            "have one"
        )
    return torch.where(ends[:, None, None], rows.roll(1, 0), rows)


def _topk_gaps(scores: Tensor, chosen: Tensor, groups: int | None) -> Tensor:
    """Return z_[k] - z_[k+1] of each token; with groups, within groups of chosen experts."""
    scores, chosen = scores.detach().float(), chosen.long()
    taken = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
    left_out = ~taken
    if groups:
        used = taken.view(len(taken), groups, -1).any(dim=2, keepdim=True)
        left_out &= used.expand(-1, -1, scores.shape[1] // groups).reshape(scores.shape)
    best = scores.masked_fill(~left_out, -torch.inf).amax(dim=1)
    return (scores.gather(1, chosen).amin(dim=1) - best).clamp(min=0)


@contextmanager
def dispatched(dispatchers: Sequence[Any], k: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the arguments of Megatron's token dispatchers inside the block, in call order.

    Args:
        dispatchers: `token_dispatcher` of each layer.
        k: experts per token; -1 stands for experts that the router dropped.

    Yields:
        experts (tokens, k) and combine weights (tokens, k) of each call, largest weight first.
    """
    calls: list[tuple[Tensor, Tensor]] = []

    def recording(
        preprocess: Callable[..., Any], hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> Any:
        kept = probs.detach().float().masked_fill(~routing_map.bool(), -1.0)
        weights, experts = kept.topk(k, dim=1)
        calls.append((experts.masked_fill(weights < 0, -1).cpu(), weights.clamp(min=0).cpu()))
        return preprocess(hidden_states, routing_map, probs)

    with ExitStack() as stack:
        for dispatcher in dispatchers:
            stack.enter_context(_wrapped_method(dispatcher, "dispatch_preprocess", recording))
        yield calls


@contextmanager
def _wrapped_method(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of an object, inside the block, by `function(method, ...)`."""
    setattr(owner, name, partial(function, getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
