"""Routes through the replay objects of Megatron-Core and verl: files here, theirs where they are.

    pip install --no-deps --target DIR megatron-core==0.16.1 verl==0.9.1
    TIELINE_REAL_PACKAGES=DIR python -m pytest tests/serving/test_router_replay.py

The objects run in a process of its own, beside the little model of examples/router_replay.py.
"""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import tieline
from tests.trace.writers.test_export import same, weighted_trace
from tieline.serving.router_replay import RouteRows
from tieline.trace import export, import_trace

PACKAGES = os.environ.get("TIELINE_REAL_PACKAGES", "")
real = pytest.mark.skipif(not PACKAGES, reason="TIELINE_REAL_PACKAGES names no folder")
SOURCE = Path(tieline.__file__).parents[1]


def rows_of(trace, lengths):
    experts = torch.stack([layer.experts for layer in trace.layers], 1).long()
    return RouteRows(experts, trace.tokens.split(list(lengths)))


def test_what_is_saved_is_read_by_tieline_and_the_other_way(tmp_path):
    trace = weighted_trace((6, 4), layers=(0, 1))
    rows = rows_of(trace, (6, 4))
    rows.save(tmp_path / "a.npz")
    same(import_trace(tmp_path / "a.npz"), trace)
    again = RouteRows.load(export(trace, tmp_path / "b.npz"))
    assert torch.equal(again.experts, rows.experts)
    assert [x.tolist() for x in again.documents] == [x.tolist() for x in rows.documents]


def test_weights_are_kept(tmp_path):
    trace = weighted_trace((3,), layers=(0, 1))
    weights = torch.stack([layer.weights for layer in trace.layers], 1)
    rows = rows_of(trace, (3,))
    RouteRows(rows.experts, rows.documents, weights).save(tmp_path / "a.npz")
    read = import_trace(tmp_path / "a.npz")
    assert torch.equal(torch.stack([layer.weights for layer in read.layers], 1), weights)


def test_documents_are_found_by_their_tokens():
    rows = rows_of(weighted_trace((6, 4)), (6, 4))
    first, second = rows.documents
    longer = torch.cat([second, torch.tensor([3])])  # its last token was sampled, never routed
    replayed = rows.of([longer, torch.tensor([1, 2]), first])
    assert torch.equal(replayed.experts[:4], rows.experts[6:])
    assert bool((replayed.experts[4:7] == -1).all())
    assert torch.equal(replayed.experts[7:], rows.experts[:6])


def test_tokens_without_a_record_are_left_out_of_the_file(tmp_path):
    rows = rows_of(weighted_trace((4, 3)), (4, 3))
    longer = [torch.cat([x, torch.tensor([1])]) for x in rows.documents]
    rows.of(longer).save(tmp_path / "a.npz")
    assert torch.equal(RouteRows.load(tmp_path / "a.npz").experts, rows.experts)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.pop("tokens"), "has no tokens: write it with `tieline convert IN OUT.npz`"),
        (lambda a: a.update(tokens=a["tokens"][1:]), "a number per token"),
        (lambda a: a.update(routed_experts=a["routed_experts"][0]), "experts .tokens, layers, k"),
        (lambda a: a.update(positions=a["positions"] * 1.0), "whole numbers"),
        (lambda a: a.update(positions=a["positions"] + 1), "positions without a record"),
        (lambda a: a.update(tokens=np.array([object()] * 7)), "allow_pickle"),
    ],
)
def test_a_file_of_another_form_is_refused(change, message, tmp_path):
    rows_of(weighted_trace((4, 3)), (4, 3)).save(tmp_path / "a.npz")
    arrays = dict(np.load(tmp_path / "a.npz"))
    change(arrays)
    np.savez(tmp_path / "b.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        RouteRows.load(tmp_path / "b.npz")


def test_the_door_needs_torch_and_numpy_alone():
    code = (
        "import sys, tieline.serving.router_replay;"
        "heavy = {'transformers', 'safetensors', 'jaxtyping', 'pydantic'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def run(code, *arguments):
    """Run code beside the packages; the last line that it prints, as JSON."""
    folders = [str(SOURCE), str(SOURCE.parent / "examples"), *PACKAGES.split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", HEAD + textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


HEAD = """
import json, sys, torch
from router_replay import K, TrainerObjects, some_documents
from tieline.serving.router_replay import RouteRows, dispatched

trainer, words = sys.argv[1], sys.argv[2:]
objects, documents = TrainerObjects(trainer), some_documents(0)
record = objects.rollout(documents)
"""
TRAINERS = pytest.mark.parametrize("trainer", ["megatron", "verl", "veomni"])


@real
@TRAINERS
def test_the_record_is_replayed_and_dispatched_in_another_order(trainer, tmp_path):
    code = """
        record.save(words[0])
        read = RouteRows.load(words[0])
        batch = documents[::-1]
        objects.act("replay_forward")
        objects.routers.replay(read.of(batch))
        with dispatched(objects.dispatchers, K) as calls, torch.no_grad():
            objects.model(batch)
        used = torch.stack([experts for experts, _ in calls], 1).sort(2).values
        expected = read.of(batch).experts.sort(2).values
        known = (expected >= 0).all(2).all(1)
        ends = torch.tensor([len(x) for x in batch]).cumsum(0) - 1
        sums = torch.stack([weights.sum(1) for _, weights in calls])
        print(json.dumps({
            "replayed": torch.equal(used[known], expected[known]),
            "left": (~known).nonzero().flatten().tolist() == ends.tolist(),
            "weights": bool((sums > 0).all()),
        }))
    """
    done = run(code, trainer, tmp_path / "rollout.npz")
    assert done == {"replayed": True, "left": True, "weights": True}
    trace = import_trace(tmp_path / "rollout.npz")
    assert (len(trace.layers), int(trace.documents.max()) + 1) == (3, 12)


@real
@TRAINERS
def test_the_numbers_are_those_of_the_live_choice(trainer):
    code = """
        scalars = objects.update(documents, record)
        live, replayed = objects.routers.live(), record.of(documents).experts
        known = (replayed >= 0).all(2).all(1)
        flips = (live.sort(2).values != replayed.sort(2).values).any(2)[known].double().mean(0)
        print(json.dumps([scalars, flips.tolist(), len(known)]))
    """
    scalars, flips, tokens = run(code, trainer)
    assert [scalars[f"rollout/flip_rate/layer_{i}"] for i in range(3)] == flips
    assert scalars["rollout/tokens"] == tokens
    assert scalars["rollout/flip_rate_max"] == max(flips)
    assert (scalars["rollout/unexplained"], scalars["rollout/unrecorded"]) == (0, 0)


@real
@TRAINERS
def test_faults_are_unexplained_and_rounding_is_not(trainer):
    code = """
        first = len(record.documents[0])
        late = torch.cat([record.experts[:first].roll(1, 0), record.experts[first:]])
        others = record.experts.roll(1, 2)
        others = (record.experts + 1) % 16
        faults = [record.experts, late, others]
        print(json.dumps([
            objects.update(documents, RouteRows(x, record.documents))["rollout/unexplained_max"]
            for x in faults
        ]))
    """
    sound, late, other = run(code, trainer)
    assert sound == 0
    assert late > 0.01
    assert other > 0.3


@real
@TRAINERS
def test_a_repeated_forward_pass_is_counted_once(trainer):
    code = """
        objects.act("replay_forward")
        objects.routers.replay(record.of(documents))
        with objects.routers.watch():
            objects.model(documents)
            objects.act("replay_backward")
            objects.model(documents)
        scalars = objects.routers.step()
        assert objects.routers.step() == {}
        print(json.dumps([scalars["rollout/tokens"], sum(map(len, documents))]))
    """
    counted, tokens = run(code, trainer)
    assert counted == tokens


@real
@TRAINERS
def test_documents_without_a_record(trainer):
    code = """
        half = RouteRows(*[record.of(documents[:6]).experts, documents[:6]])
        try:
            scalars = objects.update(documents, half)
            print(json.dumps([scalars["rollout/unrecorded"], scalars["rollout/unexplained"]]))
        except ValueError as problem:
            print(json.dumps(str(problem)))
    """
    answer = run(code, trainer)
    if trainer == "megatron":
        assert "tokens have no record, which Megatron's RouterReplay cannot leave" in answer
    else:
        assert 0.3 < answer[0] < 0.7
        assert answer[1] == 0


@real
@pytest.mark.parametrize("trainer", ["megatron", "verl"])
def test_layers_and_empty_objects_are_refused(trainer):
    code = """
        problems = []
        objects.module.RouterReplay.clear_global_indices()
        for action in (
            lambda: objects.routers.replay(RouteRows(record.experts[:, :2], record.documents)),
            lambda: objects.routers.recorded(),
            lambda: type(objects.routers)([]),
        ):
            try:
                action()
            except ValueError as problem:
                problems.append(str(problem))
        print(json.dumps(problems))
    """
    assert run(code, trainer) == [
        "the record has 2 layers, the model 3 routers",
        "a router has recorded nothing: run the model in the action RECORD",
        "there are no replay objects: build the model with replay enabled",
    ]


@real
@pytest.mark.parametrize("trainer", ["megatron", "verl", "veomni"])
def test_the_example_runs(trainer):
    folders = [str(SOURCE), *PACKAGES.split(os.pathsep)]
    done = subprocess.run(
        [sys.executable, str(SOURCE.parent / "examples/router_replay.py"), trainer],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
    )
    sound, late = done.stdout.splitlines()[-2:]
    assert "0.00% unexplained" in sound
    assert "0.00% unexplained" not in late
