"""Batches of verl and NeMo-RL, arrays of slime and miles, and of FlashInfer."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from tieline.core.errors import TraceError
from tieline.trace import import_trace

RNG = np.random.default_rng(5)
IDS = np.stack([RNG.permutation(9)[:2] for _ in range(3 * 6 * 2)]).reshape(3, 6, 2, 2)
LENGTHS = (6, 4, 5)


def batch(fill):
    """Three sequences whose last tokens have no row, padded on the right."""
    ids, mask = IDS.copy(), np.zeros((3, 6), int)
    for row, length in enumerate(LENGTHS):
        ids[row, length - 1 :] = fill
        mask[row, :length] = 1
    return ids, mask


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("fill", "producer"), [(0, "verl"), (-1, "nemo")])
@pytest.mark.parametrize("suffix", ["npz", "safetensors", "npy"])
def test_padding_and_last_tokens_are_left_out(tmp_path, masked, fill, producer, suffix):
    ids, mask = batch(fill)
    tokens = np.arange(18).reshape(3, 6)
    arrays = {"routed_experts": ids, "input_ids": tokens}
    arrays |= {"attention_mask": mask} if masked else {}
    path = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        np.save(path, ids)
    else:
        np.savez(path, **arrays) if suffix == "npz" else save_file(arrays, path)
    trace = import_trace(path)
    assert trace.n_tokens == 5 + 3 + 4
    assert trace.positions.tolist() == [*range(5), *range(3), *range(4)]
    assert trace.provenance["producer"] == producer
    if suffix != "npy":
        assert trace.tokens.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 12, 13, 14, 15]
    assert trace.layers[1].experts[5].tolist() == IDS[1, 0, 1].tolist()


def test_left_padding_moves_no_position():
    ids, mask = batch(0)
    flipped = {"routed_experts": ids[:, ::-1], "attention_mask": mask[:, ::-1]}
    trace = import_trace(flipped)
    assert trace.positions.max() == 5
    assert trace.documents.tolist().count(1) == 3


def test_tokens_left_to_the_live_router_are_left_out():
    ids, mask = batch(-1)
    ids[0, 2] = -1
    trace = import_trace({"routed_experts": ids, "attention_mask": mask})
    assert trace.positions[:4].tolist() == [0, 1, 3, 4]


def test_one_expert_per_token_is_not_taken_for_padding():
    ids = np.zeros((5, 4, 1, 1), int)
    ids[:, :3] = 1 + np.arange(3)[:, None, None]
    mask = np.ones((5, 4), int)
    arrays = {"routed_experts": ids, "attention_mask": mask}
    assert import_trace(arrays).n_tokens == 15  # the last row of all five sequences alone is 0
    ids[0, 0] = 0
    assert import_trace(arrays).n_tokens == 20  # expert 0 is chosen elsewhere too


def test_arrays_of_trainers_are_recognised_by_name(tmp_path):
    ids, _ = batch(-1)
    np.savez(tmp_path / "a.npz", rollout_routed_experts=ids)
    assert import_trace(tmp_path / "a.npz").provenance["producer"] == "miles"
    arrays = {f"rollout_routed_experts_{i}": IDS[i, : LENGTHS[i] - 1] for i in range(3)}
    arrays |= {f"tokens_{i}": np.arange(LENGTHS[i]) for i in range(3)}
    np.savez(tmp_path / "b.npz", **arrays)
    trace = import_trace(tmp_path / "b.npz")
    assert trace.provenance["producer"] == "slime"
    assert trace.documents.tolist() == [0] * 5 + [1] * 3 + [2] * 4
    np.savez(tmp_path / "c.npz", rollout_routed_experts=IDS[0])
    assert import_trace(tmp_path / "c.npz").provenance["producer"] == "slime"
    np.savez(tmp_path / "d.npz", routing_replay_out=IDS[0, :, 0].astype(np.int16))
    assert len(import_trace(tmp_path / "d.npz").layers) == 1
    assert import_trace(tmp_path / "a.npz", format="nemo").provenance["producer"] == "nemo"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_mask": np.ones((3, 5), int)}, r"attention_mask must have shape \(3, 6\)"),
        ({"input_ids": np.ones(3, int)}, "input_ids must have shape"),
        ({"routed_experts": IDS.astype(float)}, "ids must be integers"),
        ({"routed_experts": IDS * 0}, "no token was routed"),
        ({"attention_mask": np.zeros((3, 6), int)}, "no token was routed"),
    ],
)
def test_batches_that_do_not_fit_are_refused(change, message):
    with pytest.raises(TraceError, match=message):
        import_trace({"routed_experts": IDS} | change)
