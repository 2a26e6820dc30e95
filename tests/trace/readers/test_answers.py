"""Answers of servers, samples of trainers, and objects of libraries."""

import base64
import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tieline.core.errors import TraceError
from tieline.trace import import_trace, read_routes
from tieline.trace.readers import ReadOptions, recognise_format

RNG = np.random.default_rng(3)
IDS = np.stack([RNG.permutation(9)[:2] for _ in range(7 * 3)]).reshape(7, 3, 2)
PROMPT, ANSWER = [4, 5, 6, 7], [8, 9, 10, 11]


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return base64.b64encode(stream.getvalue()).decode()


def raw(array):
    return base64.b64encode(np.ascontiguousarray(array, "<i4").tobytes()).decode()


def written(tmp_path, *values, name="a.json"):
    path = tmp_path / name
    path.write_text("\n".join(json.dumps(value) for value in values))
    return path


def vllm(routes, **more):
    choice = {"index": 0, "token_ids": ANSWER, "routed_experts": routes}
    return {"prompt_token_ids": PROMPT, "choices": [choice]} | more


def sglang(routes, **meta):
    counts = {"prompt_tokens": 4, "completion_tokens": 4}
    return {"text": "", "meta_info": {"routed_experts": routes} | counts | meta}


WHOLE = [
    ("vllm", vllm(npy(IDS.astype(np.uint8)))),
    ("vllm", vllm(npy(IDS.astype(np.uint16)))),
    ("vllm", vllm(IDS.tolist())),
    ("vllm", vllm({"data": raw(IDS), "shape": [7, 3, 2], "dtype": "int32"})),
    ("vllm", vllm(npy(IDS[4:]), prompt_routed_experts=npy(IDS[:4].astype(np.int16)))),
    ("vllm", {"prompt_token_ids": PROMPT, "outputs": [vllm(IDS.tolist())["choices"][0]]}),
    (
        "megatron",
        {
            "choices": [
                {
                    "prompt_token_ids": PROMPT,
                    "generation_token_ids": ANSWER,
                    "moe_topk_indices": IDS.tolist(),
                    "prompt_moe_topk_indices": IDS[:4].tolist(),
                }
            ]
        },
    ),
    (
        "megatron",
        {
            "prompt_token_ids": PROMPT,
            "generation_token_ids": ANSWER,
            "prompt_moe_topk_indices": IDS[:4].tolist(),
            "generation_moe_topk_indices": IDS[4:].tolist(),
        },
    ),
    ("slime", {"tokens": PROMPT + ANSWER, "rollout_routed_experts": IDS.tolist()}),
    ("slime", {"tokens": [PROMPT + ANSWER], "rollout_routed_experts": [npy(IDS)]}),
]


@pytest.mark.parametrize(("form", "value"), WHOLE)
def test_an_answer_is_recognised_and_read(tmp_path, form, value):
    path = written(tmp_path, value)
    assert recognise_format(path) == form
    for source, options in ((path, {}), (path, {"format": form}), (value, {})):
        trace = import_trace(source, **options)
        assert np.stack([x.experts.numpy() for x in trace.layers], 1).tolist() == IDS.tolist()
        assert trace.tokens.tolist() == (PROMPT + ANSWER)[:7]
        assert trace.provenance["producer"] == form
    lines = written(tmp_path, value, value, name="b.jsonl")
    assert import_trace(lines).documents.tolist() == [0] * 7 + [1] * 7


def test_the_start_of_the_rows_is_read_or_passed(tmp_path):
    late = vllm(npy(IDS[2:]), routed_experts_prompt_start=2)
    assert import_trace(late).positions.tolist() == [2, 3, 4, 5, 6]
    assert import_trace(late).tokens[0] == 6
    bare = vllm(npy(IDS[2:]))
    with pytest.raises(TraceError, match="pass start=2"):
        import_trace(bare)
    assert import_trace(bare, start=2).tokens[0] == 6
    with pytest.raises(TraceError, match="needs a whole number, got 'x'"):
        import_trace(vllm(npy(IDS), routed_experts_prompt_start="x"))


@pytest.mark.parametrize("box", ["meta_info", "sglext", "sgl_ext"])
def test_sglang_needs_a_shape_or_counts(tmp_path, box):
    answer = sglang(raw(IDS))
    answer[box] = answer.pop("meta_info")
    path = written(tmp_path, answer)
    assert recognise_format(path) == "sglang"
    with pytest.raises(TraceError, match="42 ids without a shape, of 7 rows: give layers, k"):
        import_trace(path)
    for options in ({"k": 2}, {"k": 2, "layers": 3}):
        trace = import_trace(path, **options)
        assert np.stack([x.experts.numpy() for x in trace.layers], 1).tolist() == IDS.tolist()
    with pytest.raises(TraceError, match="42 ids do not divide into rows of 4 layers × 2"):
        import_trace(path, k=2, layers=4)


def test_sglang_rows_start_where_they_say_and_choices_are_requests(tmp_path):
    part = sglang(raw(IDS[3:]), routed_experts_start_len=3)
    trace = import_trace({"choices": [part, part]}, k=2)
    assert trace.documents.tolist() == [0] * 4 + [1] * 4
    assert trace.positions[:4].tolist() == [3, 4, 5, 6]
    answer = sglang(raw(IDS)) | {"prompt_token_ids": PROMPT, "output_ids": ANSWER}
    assert import_trace(answer, k=2).tokens.tolist() == (PROMPT + ANSWER)[:7]
    nested = sglang(IDS.tolist())
    assert import_trace(nested).n_tokens == 7


def test_padding_of_miles_is_cut_and_its_name_told():
    padded = np.concatenate([IDS, np.full((3, 3, 2), -1)])
    trace = import_trace({"tokens": PROMPT + ANSWER, "rollout_routed_experts": padded.tolist()})
    assert trace.n_tokens == 7
    assert trace.provenance["producer"] == "miles"


def test_objects_of_libraries_are_read_by_their_fields():
    output = SimpleNamespace(token_ids=ANSWER, routed_experts=IDS.astype(np.uint8))
    request = SimpleNamespace(prompt_token_ids=PROMPT, outputs=[output])
    assert import_trace([request, request]).n_tokens == 14
    output.routed_experts = torch.from_numpy(IDS)
    trace = import_trace(request, format="tensorrt-llm")
    assert trace.provenance["producer"] == "tensorrt-llm"
    assert trace.tokens.tolist() == (PROMPT + ANSWER)[:7]
    sample = SimpleNamespace(tokens=PROMPT + ANSWER, rollout_routed_experts=IDS)
    assert import_trace(sample).n_tokens == 7


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (vllm("!!!"), r"choices\[0\].routed_experts: is not base64"),
        (vllm(raw(IDS)), "42 ids without a shape"),
        (vllm([[1, 2], [3]]), "lists of different lengths"),
        (vllm([1, 2]), r"needs integers of shape \(tokens, layers, k\)"),
        (vllm([[["a"]]]), "needs numbers"),
        (vllm({"data": "", "shape": [-1], "dtype": "int32"}), "needs data"),
        (vllm({"data": raw(IDS), "shape": [9, 3, 2], "dtype": "int32"}), "states 216 bytes"),
        (vllm(None), "no field routed_experts or prompt_routed_experts"),
        (vllm(npy(IDS)) | {"choices": 3}, "choices must be a list"),
        (vllm(npy(IDS)) | {"prompt_token_ids": ["a"]}, "token ids"),
        (vllm(npy(IDS[:, :2]), prompt_routed_experts=npy(IDS)), "prompt and answer have shapes"),
        (sglang("AAA="), "2 bytes are no int32 numbers"),
        (sglang(raw(IDS), routed_experts_shape=[7, 3]), "three whole numbers"),
        ({"rollout_routed_experts": [[1.5]]}, r"needs integers \(tokens, layers, k\)"),
        ({"other": 1}, "no field of routes was found"),
        ([[1, 2]], "no field of routes was found"),
    ],
)
def test_answers_of_another_shape_are_refused_with_file_and_field(tmp_path, value, message):
    path = written(tmp_path, value)
    with pytest.raises(TraceError, match=message) as problem:
        import_trace(path)
    assert "a.json" in str(problem.value)


def test_a_billion_stated_rows_cost_nothing():
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({10**9}, 3, 2), }}\n".encode()
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    with pytest.raises(TraceError, match="states 6000000000 bytes, there are 0"):
        import_trace(vllm(base64.b64encode(data).decode()))
    with pytest.raises(TraceError, match="states"):
        import_trace(vllm({"data": "", "shape": [10**9, 3, 2], "dtype": "int32"}))


class Recorder:
    """An object that only a pickle can restore."""


@pytest.mark.parametrize("name", ["a.pt", "a.npz", "a.json"])
def test_pickles_are_refused_by_name(tmp_path, name):
    torch.save({"records": torch.zeros(3)}, tmp_path / name)
    with pytest.raises(TraceError, match="records: needs integers"):
        import_trace(tmp_path / name)
    torch.save({"records": Recorder()}, tmp_path / name)
    with pytest.raises(TraceError, match=r"is a pickle.*np.savez"):
        import_trace(tmp_path / name)
    (tmp_path / name).write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(TraceError, match="is a pickle"):
        import_trace(tmp_path / name)
    with pytest.raises(TraceError, match="is a pickle"):
        read_routes(tmp_path / name, ReadOptions("sglang", k=2, layers=2))


@pytest.mark.parametrize("name", ["a.npy", "a.json", "a.csv", "a.safetensors"])
def test_an_empty_file_is_called_empty(tmp_path, name):
    (tmp_path / name).write_bytes(b" \n")
    with pytest.raises(TraceError, match=rf"{name}: is empty"):
        import_trace(tmp_path / name)


@pytest.mark.parametrize("content", [b"PK\x03\x04", b"(dp0\n.", b"\x80\x02}."])
def test_broken_and_old_pickles_are_refused_by_name(tmp_path, content):
    (tmp_path / "recorder.pt").write_bytes(content)
    with pytest.raises(TraceError, match=r"is a pickle.*np\.savez"):
        import_trace(tmp_path / "recorder.pt")


def test_text_that_is_no_json_is_in_no_format(tmp_path):
    (tmp_path / "a.json").write_text("hello\n")
    with pytest.raises(TraceError, match="none of the formats"):
        import_trace(tmp_path / "a.json")
