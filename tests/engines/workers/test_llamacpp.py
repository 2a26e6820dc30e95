"""The worker for llama.cpp without llama.cpp: tensors in memory, a graph of names, defaults."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from tieline.engines.workers import llamacpp as worker
from tools import demo_gguf


def tensor_of(array, kind=0, strides=None):
    """A header as ggml has it and the memory behind it; axes are given slowest first."""
    shape = [1] * (4 - array.ndim) + list(array.shape)
    size = array.itemsize
    wide = strides or [int(np.prod(shape[axis + 1 :])) * size for axis in range(4)]
    head = worker.TensorHead()
    head.type = kind
    for axis in range(4):
        head.ne[axis], head.nb[axis] = shape[3 - axis], wide[3 - axis]
    return head


def reader(memory):
    def fetch(_tensor, to, offset, size):
        assert offset + size <= memory.nbytes
        ctypes.memmove(to, memory.ctypes.data + offset, size)

    return lambda head: worker.read_tensor(ctypes.addressof(head), fetch)


def test_a_contiguous_tensor_is_read_with_its_slowest_axis_first():
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert reader(values)(tensor_of(values)).reshape(3, 4).tolist() == values.tolist()


def test_a_view_of_the_first_columns_is_read_by_its_strides():
    columns = np.arange(20, dtype=np.int32).reshape(5, 4)  # an argsort of which the first two count
    head = tensor_of(columns[:, :2], kind=26, strides=[80, 80, 16, 4])
    assert reader(columns)(head).reshape(5, 2).tolist() == columns[:, :2].tolist()


def test_another_type_is_refused():
    values = np.zeros((2, 2), np.float32)
    with pytest.raises(RuntimeError, match="type 8"):
        reader(values)(tensor_of(values, kind=8))


def graph(layers, tokens=3, experts=6, k=2, extra=()):
    """Names and arrays as a graph computes them."""
    generator = np.random.default_rng(0)
    nodes = []
    for layer in layers:
        logits = generator.normal(size=(tokens, experts)).astype(np.float32)
        picks = np.argsort(-logits, 1)[:, :k].astype(np.int32)
        weights = np.take_along_axis(logits, picks, 1)
        nodes += [
            (f"ffn_norm-{layer}", logits),
            (f"ffn_moe_logits-{layer}", logits),
            (f"ffn_moe_topk-{layer}", picks),
            (f"ffn_moe_weights-{layer}", weights[:, :, None]),
            *((f"{name}-{layer}", make(logits, weights)) for name, make in extra),
        ]
    return nodes


def recorded(nodes):
    recorder = worker.LlamaRecorder(lambda n: nodes[n][0].encode(), lambda n: nodes[n][1])
    answers = [recorder(n, True, None) for n in range(len(nodes))]
    for n in range(len(nodes)):
        if answers[n]:
            assert recorder(n, False, None)
    return recorder, answers


def test_the_callback_takes_what_routers_compute_and_nothing_else():
    nodes = graph([0, 2, 10])
    recorder, answers = recorded(nodes)
    assert [nodes[n][0] for n in range(len(nodes)) if not answers[n]] == [
        "ffn_norm-0",
        "ffn_norm-2",
        "ffn_norm-10",
    ]
    arrays = recorder.take_document(3)
    assert arrays["layers"] == [0, 2, 10]
    assert arrays["scores"] == "ffn_moe_logits"
    assert arrays["picks"].shape == arrays["weights"].shape == (3, 3, 2)
    arrays_by_name = dict(nodes)
    assert arrays["logits"][:, 2].tolist() == arrays_by_name["ffn_moe_logits-10"].tolist()
    assert arrays["weights"][:, 1].tolist() == arrays_by_name["ffn_moe_weights-2"][:, :, 0].tolist()
    with pytest.raises(Exception, match="no router"):
        recorder.take_document(3)


def test_what_a_family_ranks_in_place_of_logits_is_taken():
    extra = (
        ("ffn_moe_probs_biased", lambda logits, _: logits + 1),
        ("ffn_moe_weights_norm", lambda _, weights: weights / weights.sum(1, keepdims=True)),
    )
    arrays = recorded(graph([1], extra=extra))[0].take_document(3)
    assert (arrays["scores"], arrays["weights_name"]) == (
        "ffn_moe_probs_biased",
        "ffn_moe_weights_norm",
    )
    assert np.allclose(arrays["weights"].sum(-1), 1)


def test_a_last_layer_with_one_row_is_an_error():
    nodes = graph([0, 1])
    nodes[-2] = (nodes[-2][0], nodes[-2][1][-1:])
    with pytest.raises(Exception, match="2 numbers of ffn_moe_topk-1 for 3 tokens"):
        recorded(nodes)[0].take_document(3)


def test_an_error_in_the_callback_comes_out_of_take():
    def read(_):
        raise MemoryError("no room")

    recorder = worker.LlamaRecorder(lambda _: b"ffn_moe_topk-0", read)
    assert recorder(0, True, None)
    assert not recorder(0, False, None)
    with pytest.raises(MemoryError, match="no room"):
        recorder.take_document(1)


DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_threads": 4,
    "flash_attn_type": -1,
    "type_k": 1,
    "type_v": 1,
    "cb_eval": None,
    "cb_eval_user_data": None,
}


def test_plausible_defaults_pass():
    worker.check_defaults(SimpleNamespace(**DEFAULTS))


@pytest.mark.parametrize(
    ("name", "value"),
    [("type_k", 1 << 20), ("n_ctx", 1 << 31), ("n_seq_max", 0), ("cb_eval", 1), ("n_threads", -4)],
)
def test_defaults_of_another_layout_are_refused(name, value):
    with pytest.raises(Exception, match="not the one that llama-cpp-python declares"):
        worker.check_defaults(SimpleNamespace(**DEFAULTS | {name: value}))


def test_a_library_may_lack_a_function_that_nobody_calls():
    with worker._lenient_libraries():
        library = ctypes.CDLL(None)
    missing = library.llama_batch_of_next_year
    missing.argtypes = []
    assert library.strlen(b"abc") == 3
    with pytest.raises(RuntimeError, match="llama_batch_of_next_year"):
        missing()
    assert type(ctypes.CDLL(None)) is not type(library)


def test_tokens_beyond_the_vocabulary_are_of_another_model():
    worker.check_ids([np.array([1, 511])], 512)
    with pytest.raises(Exception, match=r"token 512 .* 512 tokens: it is of another model"):
        worker.check_ids([np.array([1]), np.array([512])], 512)


def test_log_probabilities_are_normalised():
    logits = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32) * 30
    assert np.allclose(np.exp(worker.log_softmax(logits).astype(float)).sum(1), 1, atol=1e-6)


def test_names_of_experts_are_those_of_stacks():
    name = "model.layers.3.mlp.experts.12.up_proj.weight"
    assert worker.stacked_gguf_name(name) == ("model.layers.3.mlp.experts.up_proj.weight", 12)
    assert worker.stacked_gguf_name("lm_head.weight") == ("lm_head.weight", None)


def test_interleaved_rows_come_back_as_halves():
    heads, half, width = 2, 3, 4
    straight = np.arange(heads * 2 * half * width).reshape(heads * 2 * half, width)
    mixed = straight.reshape(heads, 2, half, width).swapaxes(1, 2).reshape(-1, width)
    assert worker.uninterleaved_rows(mixed, heads).tolist() == straight.tolist()
    assert demo_gguf._interleaved(straight, heads).tolist() == mixed.tolist()


def test_the_first_complaint_of_the_log_is_told():
    lines = ["loading\n", "load: error: unknown arch", "itecture 'x'\n", "failed\n"]
    assert worker.first_error_line(lines) == "load: error: unknown architecture 'x'"
    lines = ["gguf_init: invalid magic characters: 'hell'\n", "load: error loading model: a.gguf\n"]
    assert "invalid magic" in worker.first_error_line(lines)  # which says more than the next line


@pytest.mark.parametrize(
    ("ranked", "gating", "largest", "units"),
    [
        (None, 2, 0.5, "logits"),
        ("ffn_moe_logits", 1, 9.0, "logits"),
        ("ffn_moe_probs_biased", 2, 0.5, "sigmoid"),
        ("ffn_moe_probs_masked", 1, 0.5, "softmax"),
        ("ffn_moe_probs_biased", 0, 1.5, "sigmoid"),
        ("ffn_moe_probs_biased", 0, 0.5, "softmax"),
    ],
)
def test_units_are_those_that_the_file_states(ranked, gating, largest, units):
    assert worker.score_units(ranked, gating, np.array([0.1, largest])) == units
