"""What is written is accepted by the projects' own code, where they are installed.

    pip install --no-deps --target DIR megatron-core verl ...
    TIELINE_REAL_PACKAGES=DIR python -m pytest tests/trace/writers/test_real.py

They pin other versions than ours, so each runs in a process of its own.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tieline
from tests.trace.writers.test_export import weighted_trace
from tieline.trace import import_trace

PACKAGES = os.environ.get("TIELINE_REAL_PACKAGES", "")
pytestmark = pytest.mark.skipif(not PACKAGES, reason="TIELINE_REAL_PACKAGES names no folder")
HERE = str(Path(tieline.__file__).parents[1])


def run(code, *arguments):
    """Run code with the packages on its path and return its last line of output."""
    paths = os.pathsep.join([HERE, *PACKAGES.split(os.pathsep)])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_megatron_replays_the_list(tmp_path):
    trace = weighted_trace((6, 4), layers=(1, 3))
    path = trace.export(tmp_path / "a.safetensors", "megatron")
    code = """
        import sys, torch
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
        from tieline.trace import import_trace, replay_list

        trace = import_trace(sys.argv[1])
        routers = [RouterReplay() for _ in trace.layers]
        RouterReplay.set_replay_data(replay_list(trace))
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        for router, layer in zip(routers, trace.layers):
            scores = torch.rand(trace.n_tokens, layer.facts.n_experts)
            probabilities, ids = router.get_replay_topk(scores, layer.facts.k)
            assert ids.tolist() == layer.experts.tolist()
            assert torch.equal(probabilities, scores.gather(1, layer.experts.long()))
        print("taken")
    """
    assert run(code, path) == "taken"


def test_verl_aligns_the_batch(tmp_path):
    trace = weighted_trace((6, 4), layers=(0, 1))
    path = trace.export(tmp_path / "a.npz", "verl")
    code = """
        import sys, numpy as np, torch
        from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data

        batch = np.load(sys.argv[1])
        mask = torch.from_numpy(batch["attention_mask"]).bool()
        routes = torch.from_numpy(batch["routed_experts"].astype(np.int64))
        ids = torch.from_numpy(batch["input_ids"])

        def jagged(values):
            parts = [row[shown] for row, shown in zip(values, mask)]
            return torch.nested.as_nested_tensor(parts, layout=torch.jagged)

        aligned = align_r3_router_replay_data(jagged(routes), jagged(ids))
        print([len(part) for part in aligned.unbind()])
        np.save(sys.argv[2], torch.cat(list(aligned.unbind())).numpy())
    """
    assert run(code, path, tmp_path / "aligned.npy") == "[6, 4]"
    again = import_trace(tmp_path / "aligned.npy")
    for mine, theirs in zip(again.layers, trace.layers, strict=True):
        assert mine.experts.tolist() == theirs.experts.tolist()
