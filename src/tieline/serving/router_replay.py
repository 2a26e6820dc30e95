"""Routes in and out of the replay objects of trainers that share no environment with Tieline.

    Megatron-Core   RouterReplay of each router (megatron.core.transformer.moe.router_replay)
    verl            RouterReplay of each router (verl.utils.megatron.router_replay_patch), which
                    leaves tokens without a record to the live router
    verl, VeOmni    the one VeOmniRouterReplay (verl.utils.veomni.router_replay)
    Megatron-Core   the token dispatchers of the layers: experts and combine weights (`dispatched`)

    routers = ReplayedRouters(RouterReplay.global_router_replay_instances)
    RouteRows(routers.recorded(), documents).save("rollout.npz")     # what action RECORD noted

    routers.replay(RouteRows.load("rollout.npz").of(documents))      # in the order of this batch
    with routers.watch():                                            # action REPLAY_FORWARD
        model(...)
    logger.log(routers.step())                                       # rollout/flip_rate, ...

Files are read by `tieline diff`, `check` and `inspect`, and written by `tieline convert IN
rollout.npz`. Documents are the token ids of each sequence, in the order in which the routers see
them, packed and without padding. Needs torch and NumPy alone; nothing of the trainers is imported.
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
"""What a file holds: experts (tokens, layers, k), and a number per token each."""


@dataclass(frozen=True)
class RouteRows:
    """Experts of the tokens of some documents, one after the other.

    Attributes:
        experts: (tokens, layers, k), -1 for what has no record.
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
        """Write the tokens that have a record to an .npz file that Tieline reads."""
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
        """Read what `save` or `tieline convert IN FILE.npz` wrote."""
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

        A document takes the record of the same tokens, or of all but the last, from which an engine
        samples nothing. Of equal records the first is taken.
        """
        starts = np.cumsum([0, *map(len, self.documents)])
        first: dict[bytes, slice] = {}
        for number, document in enumerate(self.documents):
            rows = slice(int(starts[number]), int(starts[number + 1]))
            first.setdefault(_token_key(document), rows)
        rows_of_documents = [
            _padded_rows(self.experts, first, document)
            for document in (document.long() for document in documents)
        ]
        return RouteRows(torch.cat(rows_of_documents), documents)


def _token_key(document: Tensor) -> bytes:
    """The token ids of a document as bytes."""
    return document.cpu().long().numpy().tobytes()


def _padded_rows(experts: Tensor, first: dict[bytes, slice], document: Tensor) -> Tensor:
    """The rows of one document, -1 for tokens without a record."""
    rows = first.get(_token_key(document)) or first.get(_token_key(document[:-1]), slice(0, 0))
    padded = experts.new_full((len(document), *experts.shape[1:]), -1)
    padded[: rows.stop - rows.start] = experts[rows]
    return padded


class ReplayedRouters:
    """The replay objects of a trainer: what they recorded, what they replay, and how it differs.

    Args:
        routers: objects of each router on this rank in order, or the one of VeOmni.
    """

    def __init__(self, routers: Any) -> None:
        self._controller: Any = routers if hasattr(routers, "on_router_forward") else None
        self._routers: list[Any] = [] if self._controller is not None else list(routers)
        if not self._routers and self._controller is None:
            raise ValueError("there are no replay objects: build the model with replay enabled")
        self._blank: Tensor | None = None
        self._ends: Tensor | None = None
        self._live: dict[int, Tensor] = {}
        self._counts: FlipCounts | None = None
        self._tokens = torch.zeros(2, dtype=torch.int64, device="cpu")

    def recorded(self) -> Tensor:
        """Return what the objects recorded: experts (tokens, layers, k)."""
        if self._controller is not None:
            return self._controller.take_recorded().long().cpu()
        rows = [router.get_recorded_indices() for router in self._routers]
        if any(layer is None for layer in rows):
            raise ValueError("a router has recorded nothing: run the model in the action RECORD")
        return torch.stack([layer.detach().long() for layer in rows], dim=1).cpu()

    def live(self) -> Tensor:
        """Return what the live routers chose in the last watched pass: (tokens, layers, k)."""
        return torch.stack([self._live[layer] for layer in sorted(self._live)], dim=1)

    def replay(self, routes: RouteRows) -> None:
        """Hand each object its experts of the next forward pass.

        Tokens without a record go by the live router in verl's objects. Megatron's have no such
        choice: there the last token of a document takes the experts of the one before it, which no
        loss reads, and a document without any record is refused.
        """
        rows = routes.experts
        layers = len(self._routers) or rows.shape[1]
        if rows.shape[1] != layers:
            raise ValueError(f"the record has {rows.shape[1]} layers, the model {layers} routers")
        blank = (rows < 0).any(dim=2).any(dim=1)
        self._blank, self._ends = blank, _unsampled_ends(routes, blank)
        if self._controller is not None:
            if rows.shape[2] == 1 and bool(blank.any()):
                raise ValueError("VeOmni cannot leave tokens to the live router where k = 1")
            self._controller.begin_microbatch(list(rows.clamp(min=0).unbind(dim=1)))
            return
        takes_mask = (
            "replay_mask" in inspect.signature(self._routers[0].set_target_indices).parameters
        )
        filled = rows.clamp(min=0) if takes_mask else _with_ends(rows, blank, self._ends)
        for router, experts in zip(self._routers, filled.unbind(dim=1), strict=True):
            masks = {"replay_mask": ~blank} if takes_mask and bool(blank.any()) else {}
            router.set_target_indices(experts.contiguous(), **masks)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Compare what the live routers would choose with what they replay, in forward passes."""
        with ExitStack() as stack:
            if self._controller is not None:
                replaced = _replaced(self._controller, "on_router_forward", self._compared_choice)
                stack.enter_context(replaced)
            for layer, router in enumerate(self._routers):
                compared = partial(self._compared_topk, layer, router)
                stack.enter_context(_replaced(router, "get_replay_topk", compared))
            yield

    @torch.no_grad()
    def _compare_topk(
        self, layer: int, router: Any, live: Tensor, scores: Tensor, groups: int | None
    ) -> None:
        """Compare a router's own choice with what its object replays."""
        mask = getattr(router, "target_replay_mask", None)
        blank = self._blank if mask is None else ~mask.bool()
        self._compare(layer, live, router.target_topk_idx, _gaps(scores, live, groups), blank)

    def _compared_topk(
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
        """`get_replay_topk` of an object; its forward passes are compared, no repetitions."""
        if getattr(router.router_replay_action, "value", None) == "replay_forward":
            with torch.no_grad():
                groups = {"num_groups": num_groups, "group_topk": group_topk}
                live = default_compute_topk(scores, topk, **groups)[1]
            self._compare_topk(layer, router, live, scores, num_groups if group_topk else None)
        return choose(scores, topk, num_groups, group_topk, default_compute_topk)

    def _compared_choice(
        self,
        choose: Callable[..., Any],
        module: Any,
        routing_scores: Tensor,
        top_indices: Tensor,
    ) -> Any:
        """`on_router_forward` of VeOmni's object; a router that fires again repeats its forward."""
        layer = self._controller.num_fired
        answer = choose(module, routing_scores, top_indices)
        if self._controller.action.value == "replay" and self._controller.num_fired > layer:
            target = self._controller._targets[layer]
            ordered = target.sort(dim=1).values
            blank = (ordered[:, 1:] == ordered[:, :-1]).any(dim=1)  # its own sign of no record
            gaps = _gaps(routing_scores, top_indices, None)
            self._compare(layer, top_indices, target, gaps, blank)
        return answer

    def _compare(
        self, layer: int, live: Tensor, recorded: Tensor, gaps: Tensor, blank: Tensor | None
    ) -> None:
        """Count the flips of a layer."""
        self._live[layer] = live.cpu()
        recorded = recorded.to(live.device)
        is_recorded = torch.ones(len(live), dtype=torch.bool, device=live.device)
        if blank is not None:
            is_recorded = ~blank.to(live.device)
        if self._counts is None:
            self._counts = FlipCounts(len(self._routers) or self._controller.num_targets)
        flips = (live.sort(dim=1).values != recorded.sort(dim=1).values).any(dim=1)
        self._counts.add(layer, gaps[is_recorded], flips[is_recorded])
        if layer == 0:
            ends = 0 if self._ends is None else int(self._ends.sum())
            counts = [len(live), int((~is_recorded).sum()) - ends]
            self._tokens += torch.tensor(counts, device="cpu")

    def step(self, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return the numbers of the passes since the last call, empty for none.

        Args:
            group: ranks that have the same layers and other tokens, over which sums are taken; by
                default those of this process alone. Every rank of it must call this.
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


def _unsampled_ends(routes: RouteRows, blank: Tensor) -> Tensor:
    """The last tokens, without a record, of documents that have one: nothing was sampled there."""
    lengths = [len(document) for document in routes.documents]
    ends = torch.tensor(lengths, device=blank.device).cumsum(0)
    follows = torch.zeros_like(blank)
    follows[ends - 1] = True
    follows[ends - torch.tensor(lengths, device=blank.device)] = False  # the first of each document
    return follows & blank & ~blank.roll(1)


def _with_ends(rows: Tensor, blank: Tensor, ends: Tensor) -> Tensor:
    """The experts, those of the token before in place of these ends."""
    if bool((blank & ~ends).any()):
        raise ValueError(
            f"{int((blank & ~ends).sum())} of {len(blank)} tokens have no record, which Megatron's "
            "RouterReplay cannot leave to the live router: replay the documents that have one"
        )
    return torch.where(ends[:, None, None], rows.roll(1, 0), rows)


def _gaps(scores: Tensor, chosen: Tensor, groups: int | None) -> Tensor:
    """z_[k] - z_[k+1] of each token; with groups, of experts in those that have a chosen one."""
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
    """Note what Megatron's token dispatchers are handed inside the block, in the order of calls.

    Args:
        dispatchers: `token_dispatcher` of each layer.
        k: experts per token. A token from which the router dropped some has -1 in their places.

    Yields:
        experts (tokens, k) and combine weights (tokens, k) of each call, largest weight first.
    """
    calls: list[tuple[Tensor, Tensor]] = []

    def noted(
        preprocess: Callable[..., Any], hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> Any:
        kept = probs.detach().float().masked_fill(~routing_map.bool(), -1.0)
        weights, experts = kept.topk(k, dim=1)
        calls.append((experts.masked_fill(weights < 0, -1).cpu(), weights.clamp(min=0).cpu()))
        return preprocess(hidden_states, routing_map, probs)

    with ExitStack() as stack:
        for dispatcher in dispatchers:
            stack.enter_context(_replaced(dispatcher, "dispatch_preprocess", noted))
        yield calls


@contextmanager
def _replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Let a function that takes a method of one object first stand in its place."""
    setattr(owner, name, partial(function, getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name)
