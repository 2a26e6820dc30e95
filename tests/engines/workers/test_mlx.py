"""The worker for mlx-lm without MLX: modules that are dictionaries, as MLX has them."""

from types import SimpleNamespace

import numpy as np
import pytest

from tieline.engines.workers import mlx as worker


class Linear(dict):
    def __init__(self, weight):
        super().__init__(weight=weight)

    def __call__(self, x):
        return x @ self["weight"].T


class ChoosingGate(dict):
    def __call__(self, x):
        return np.zeros((len(x), 2), int), np.ones((len(x), 2))


class SwitchGLU(dict):
    def __call__(self, x, indices):
        return x


class Block:
    def __init__(self, gate):
        self.gate, self.experts = gate, SwitchGLU()

    def __call__(self, x):
        logits = self.gate(x)
        if isinstance(logits, tuple):
            return self.experts(x, logits[0])
        return self.experts(x, np.argsort(-logits, -1)[..., :2])


def model(gates):
    blocks = {layer: Block(gate) for layer, gate in gates.items()}
    modules = []
    for layer, block in blocks.items():
        path = f"model.layers.{layer}.mlp"
        modules += [(path, block), (f"{path}.gate", block.gate)]
        modules += [(f"{path}.switch_mlp", block.experts)]
    return list(blocks.values()), modules


def gates(count, width=4, experts=6):
    generator = np.random.default_rng(0)
    return {2 * n + 1: Linear(generator.normal(size=(experts, width))) for n in range(count)}


def test_gates_and_blocks_are_recorded_and_compute_as_before():
    chosen = gates(3)
    blocks, modules = model(chosen)
    x = np.random.default_rng(1).normal(size=(1, 5, 4))
    before = [block(x) for block in blocks]
    recorder = worker.MlxRecorder(modules)
    assert [np.array_equal(a, block(x)) for a, block in zip(before, blocks, strict=True)] == [
        True
    ] * 3
    arrays = recorder.take_document(5, np.asarray)
    assert arrays["layers"] == [1, 3, 5]
    assert arrays["logits"].shape == (5, 3, 6)
    assert arrays["logits"][:, 1].tolist() == (x[0] @ chosen[3]["weight"].T).tolist()
    order = np.argsort(-arrays["logits"], -1)[..., :2]
    assert arrays["picks"].tolist() == order.tolist()


def test_a_gate_that_chooses_by_itself_gives_ids_only():
    blocks, modules = model({0: ChoosingGate()})
    recorder = worker.MlxRecorder(modules)
    blocks[0](np.zeros((3, 4)))
    assert "logits" not in recorder.take_document(3, np.asarray)


def test_no_block_and_other_rows_are_errors():
    with pytest.raises(Exception, match="no block of experts"):
        worker.MlxRecorder([]).take_document(3, np.asarray)
    blocks, modules = model(gates(1))
    recorder = worker.MlxRecorder(modules)
    blocks[0](np.zeros((1, 5, 4)))
    with pytest.raises(Exception, match="for 4 tokens"):
        recorder.take_document(4, np.asarray)
    with pytest.raises(Exception, match="no layer number"):
        worker.layer_of_module("model.mlp")


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("lm_head.weight", ("lm_head", "weight", None)),
        ("model.norm.weight", ("model.norm", "weight", None)),
        (
            "model.layers.2.mlp.experts.7.up_proj.weight",
            ("model.layers.2.mlp.switch_mlp.up_proj", "weight", 7),
        ),
        (
            "model.layers.2.block_sparse_moe.experts.0.w2.weight",
            ("model.layers.2.block_sparse_moe.switch_mlp.down_proj", "weight", 0),
        ),
    ],
)
def test_names_of_a_checkpoint_are_found(name, parameter):
    assert worker.module_parameter(name) == parameter


def test_a_quantised_model_that_is_not_is_refused_with_its_bits():
    config = {"quantization": {"bits": 4, "group_size": 64}}
    worker.check_quantised({}, {"bits": 32.0, "share": 0.0})
    worker.check_quantised(config, {"bits": 4.5, "share": 0.99})
    with pytest.raises(
        Exception, match=r"4 bits and has 16\.00 bits per weight: 0% of its weights"
    ):
        worker.check_quantised(config, {"bits": 16.0, "share": 0.0})


def test_bits_per_weight_count_scales_and_biases():
    class Quantised(dict):
        bits = 4

    arrays = {
        "weight": np.zeros((8, 16), np.uint32),  # 8 x 128 weights of 4 bits
        "scales": np.zeros((8, 2), np.float16),
        "biases": np.zeros((8, 2), np.float16),
    }
    modules = [("a", Quantised(arrays)), ("b", Linear(np.zeros(1024, np.float16)))]
    tree = SimpleNamespace(named_modules=lambda: modules)
    sizes = worker.weight_sizes(SimpleNamespace(array=np.ndarray), tree)
    assert sizes["share"] == 0.5
    assert sizes["bits"] == (1024 * 4 + 32 * 16 + 1024 * 16) / 2048


def test_an_engine_that_cannot_compute_a_precision_says_what_to_leave_away():
    def call(_):
        raise RuntimeError("[GatherMM::eval] Currently only supports float32.")

    core = SimpleNamespace(array=np.asarray, eval=lambda _: None)
    with pytest.raises(Exception, match="leave --engine-defaults"):
        worker.document_logits(core, call, np.arange(3))
