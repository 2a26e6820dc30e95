"""Routes through the replay objects of Megatron-Core and verl: recorded, replayed and compared.

python examples/router_replay.py [megatron|verl|veomni]

    pip install --no-deps megatron-core==0.16.1 verl==0.9.1      # no Ray, no CUDA

Routers, replay objects and token dispatchers are theirs, the little model around them is not, and
no trainer of theirs runs. A bfloat16 copy is the engine: its routes are recorded and written to a
file. The float32 model gets the documents in another order, replays the file and is compared with
it; then once more with the rows of one document shifted by one.
"""

import argparse
import copy
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tieline.serving.router_replay import ReplayedRouters, RouteRows, dispatched

try:
    from megatron.core.transformer.moe import (  # pyright: ignore[reportMissingImports]
        router_replay as of_megatron,
    )
    from megatron.core.transformer.moe.router import (  # pyright: ignore[reportMissingImports]
        TopKRouter,
    )
    from megatron.core.transformer.moe.token_dispatcher import (  # pyright: ignore[reportMissingImports]
        MoEAllGatherTokenDispatcher,
    )
    from megatron.core.transformer.transformer_config import (  # pyright: ignore[reportMissingImports]
        TransformerConfig,
    )
except ImportError as missing:
    sys.exit(f"{missing}: pip install --no-deps megatron-core==0.16.1 verl==0.9.1")

VOCABULARY, WIDTH, LAYERS, EXPERTS, K = 64, 32, 3, 16, 2
ONE_RANK = SimpleNamespace(
    tp=None, cp=None, tp_cp=None, tp_dp_cp=None, ep=None, expt_tp=None, tp_ep=None
)


def part_of_verl(name: str) -> Any:
    """A module of verl without its package, which imports Ray."""
    folder = importlib.util.find_spec("verl")
    if folder is None or folder.submodule_search_locations is None:
        sys.exit("pip install --no-deps verl==0.9.1")
    for package in ("verl", "verl.utils", *(["verl.utils." + name.split(".")[0]])):
        module = ModuleType(package)
        path = Path(folder.submodule_search_locations[0], *package.split(".")[1:])
        module.__path__ = [str(path)]
        sys.modules[package] = module
    return importlib.import_module(f"verl.utils.{name}")


class Layer(nn.Module):
    """A router and a dispatcher of Megatron with experts of one matrix each."""

    def __init__(self, config: Any, controller: Any) -> None:
        super().__init__()
        self.router = TopKRouter(config, ONE_RANK)
        self.token_dispatcher = MoEAllGatherTokenDispatcher(
            EXPERTS, list(range(EXPERTS)), config, ONE_RANK
        )
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH**0.5)
        self.controller = controller

    def routing(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and map (tokens, experts)."""
        logits = (hidden @ self.router.weight.T).float()
        if self.controller is None:
            return self.router.routing(logits[:, None])
        scores = logits.softmax(dim=1)  # as VeOmni's blocks do around its hook
        ids = self.controller.on_router_forward(self, scores, scores.topk(K).indices)
        weights = torch.zeros_like(scores).scatter(1, ids, scores.gather(1, ids))
        return weights, weights > 0

    def forward(self, hidden: Tensor) -> Tensor:
        """Dispatch, compute, combine."""
        probs, routing_map = self.routing(hidden)
        dispatcher = self.token_dispatcher
        rows, weights = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        rows, counts, weights = dispatcher.dispatch_postprocess(rows, weights)
        groups = rows.split(counts.tolist())
        outputs = [group @ expert for group, expert in zip(groups, self.experts, strict=True)]
        weighted = torch.cat(outputs) * weights[:, None].to(rows)
        return hidden + dispatcher.combine_postprocess(dispatcher.combine_preprocess(weighted))


class LittleModel(nn.Module):
    """Tokens of packed documents in, logits out; a token sees the mean of those before it."""

    def __init__(self, config: Any, controller: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(config, controller) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, documents: list[Tensor]) -> Tensor:
        """Logits of all tokens."""
        hidden = self.embedding(torch.cat(documents))
        for layer in self.layers:
            means = [
                part.cumsum(0) / torch.arange(1, len(part) + 1)[:, None].to(part)
                for part in hidden.split([len(document) for document in documents])
            ]
            hidden = layer(nn.functional.layer_norm(hidden + torch.cat(means), (WIDTH,)))
        return self.head(hidden)


class TrainerObjects:
    """A model with the replay objects of a trainer, and the actions of these objects."""

    def __init__(self, trainer: str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.module, self.controller = of_megatron, None
        if trainer == "verl":
            self.module = part_of_verl("megatron.router_replay_patch")
            self.module.apply_router_replay_patch()
        if trainer == "veomni":
            self.module = part_of_verl("veomni.router_replay")
            self.controller = self.module.VeOmniRouterReplay()
        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=WIDTH,
            num_attention_heads=4,
            num_moe_experts=EXPERTS,
            moe_router_topk=K,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",  # noqa: S106 - no password
            use_cpu_initialization=True,
            **({"enable_routing_replay": True} if trainer == "verl" else {}),
            **({"moe_enable_routing_replay": True} if trainer == "megatron" else {}),
        )
        self.model: Any = LittleModel(config, self.controller)
        self.dispatchers = [layer.token_dispatcher for layer in self.model.layers]
        objects = [layer.router.router_replay for layer in self.model.layers]
        self.routers = ReplayedRouters(self.controller or objects)

    def act(self, action: str) -> None:
        """Set the action of all objects: "record", "replay_forward" or "replay_backward"."""
        if self.controller is None:
            actions = self.module.RouterReplayAction
            self.module.RouterReplay.set_global_router_replay_action(actions(action))
        elif action == "record":
            self.controller.begin_record()
        elif action == "replay_forward":
            self.controller.begin_replay()

    def rollout(self, documents: list[Tensor]) -> RouteRows:
        """Routes of a pass in bfloat16, without the last token of each, which has none."""
        engine: Any = copy.deepcopy(self.model).bfloat16()
        for layer, copied in zip(self.model.layers, engine.layers, strict=True):
            copied.router.router_replay = layer.router.router_replay  # as one process has them
            copied.controller = self.controller
        self.act("record")
        with torch.no_grad():
            engine(documents)
        lengths = [len(document) for document in documents]
        rows = [part[:-1] for part in self.routers.recorded().split(lengths)]
        return RouteRows(torch.cat(rows), [document[:-1] for document in documents])

    def update(self, documents: list[Tensor], record: RouteRows) -> dict[str, float]:
        """Replay the record in a training step; the numbers of the comparison."""
        self.act("replay_forward")
        self.routers.replay(record.of(documents))
        with self.routers.watch(), dispatched(self.dispatchers, K):
            logits = self.model(documents)
        nn.functional.cross_entropy(logits[:-1], torch.cat(documents)[1:]).backward()
        return self.routers.step()


def some_documents(seed: int, count: int = 12) -> list[Tensor]:
    """Documents of 20 to 40 random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(20, 41, (count,), generator=generator).tolist()
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]


def main() -> None:
    """Record, replay, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trainer", nargs="?", choices=["megatron", "verl", "veomni"])
    trainer = parser.parse_args().trainer or "megatron"
    objects, documents = TrainerObjects(trainer), some_documents(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rollout.npz"
        objects.rollout(documents).save(file)  # for tieline diff, check and inspect
        record = RouteRows.load(file)
    first = len(record.documents[0])
    late = torch.cat([record.experts[:first].roll(1, 0), record.experts[first:]])
    for name, routes in (("sound", record), ("late", RouteRows(late, record.documents))):
        scalars = objects.update(documents[::-1], routes)
        print(
            f"{name}: {scalars['rollout/tokens']:.0f} tokens, "
            f"{scalars['rollout/flip_rate']:.2%} flip, "
            f"{scalars['rollout/unexplained_max']:.2%} unexplained in the worst layer, "
            f"{scalars['rollout/unrecorded']:.2%} without a record"
        )


if __name__ == "__main__":
    main()
