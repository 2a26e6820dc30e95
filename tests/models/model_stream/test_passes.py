"""A streamed model computes, bit for bit, what the same model in memory computes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import SUPPORTED, lively, tiny_model
from tests.models.tiny_whole import WHOLE, tiny_whole
from tieline.core.errors import ParameterError, TielineError, UnsupportedModelError
from tieline.models import capture, find_routers
from tieline.models.demo import load_demo_tokenizer
from tieline.models.model import Model
from tieline.models.model_stream import ExpertGroups, plan_groups
from tieline.run.forward import forward, only_running
from tieline.run.streamed_passes import PassJob, StreamEvents, run_in_lockstep
from tieline.trace.record import identical_values

pytestmark = [
    pytest.mark.usefixtures("single_thread"),
    pytest.mark.cpu("streamed models run on the CPU; another device is refused"),
]

QUICK = ("olmoe", "deepseek_v3", "gpt_oss", "llama4", "zaya", "qwen3_next", "granitemoe")
FAMILIES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in SUPPORTED
]


def saved(folder, family, dtype=torch.float32, **changes):
    """The folder of a small model in several files."""
    model = tiny_whole(family) if family in WHOLE else tiny_model(family, **changes)
    model = lively(model)
    for name, buffer in model.named_buffers():
        if name.endswith("balancing_biases"):  # transformers resets the last one when it loads
            buffer[-1] = -1.0
    model.to(dtype).save_pretrained(folder, max_shard_size="60KB")
    load_demo_tokenizer().save_pretrained(folder)
    return folder


def some_batches():
    generator = torch.Generator().manual_seed(5)
    shapes = ((2, 9), (2, 9), (1, 6))
    return [torch.randint(3, 60, shape, generator=generator) for shape in shapes]


def first(output):
    logits = getattr(output, "logits", None)
    return output[0] if logits is None else logits


def watched(model):
    """Routers of the encoder where encoder and decoder see different tokens; None for all."""
    return [name for name in find_routers(model) if ".encoder." in name] or None


def ordinary(folder, dtype="fp32"):
    model = Model.open(folder, dtype=dtype).module
    with only_running(model), capture(model, layers=watched(model)) as recorder:
        outputs = [first(forward(model, ids)) for ids in some_batches()]
    return outputs, recorder.trace()


def streamed(loaded, events=None, **options):
    model = loaded.module
    with only_running(model), capture(model, layers=watched(model)) as recorder:
        jobs = [lambda ids=ids: first(forward(model, ids)) for ids in some_batches()]
        outputs = run_in_lockstep(loaded.stream, list(map(PassJob, jobs)), events, **options)
    return outputs, recorder.trace()


def agree(folder, dtype="fp32", **options):
    loaded = Model.open(folder, dtype=dtype, stream=True, **options)
    (expected, trace), (logits, streamed_trace) = ordinary(folder, dtype), streamed(loaded)
    drawn = watched(loaded.module) is not None  # diffusion_gemma: its decoder starts from noise
    assert drawn or all(map(torch.equal, expected, logits))
    assert identical_values(trace, streamed_trace)
    return loaded


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_streams_to_the_same_bits(family, tmp_path):
    loaded = agree(saved(tmp_path / "model", family))
    weights = loaded.stream.weights
    assert weights.layers
    assert all(tensor.is_meta for name in weights.units for tensor in tensors_of(weights, name))


def tensors_of(weights, unit):
    return [weights.tensor_named(name) for name in weights.meta if weights.unit_of(name) == unit]


@pytest.mark.parametrize("family", ["olmoe", "deepseek_v3"])
def test_bfloat16_streams_to_the_same_bits(family, tmp_path):
    folder = saved(tmp_path / "model", family, torch.bfloat16)
    agree(folder, "bf16")
    agree(folder, "fp32")  # cast on the way


def test_every_byte_is_read_once_and_the_head_only_if_it_runs(tmp_path):
    loaded = Model.open(saved(tmp_path / "model", "olmoe"), stream=True)
    shards = loaded.stream.weights.shards
    _, without_head = streamed(loaded, head=False)
    assert shards.bytes_read == shards.size - shards.tensors["lm_head.weight"].size
    assert shards.bytes_read == loaded.stream.size
    _, with_head = streamed(loaded)
    assert shards.bytes_read == 2 * shards.size - shards.tensors["lm_head.weight"].size
    assert identical_values(without_head, with_head)


def test_units_are_told_while_their_weights_are_there(tmp_path):
    loaded, units, reads = Model.open(saved(tmp_path / "model", "olmoe"), stream=True), [], []
    weights = loaded.stream.weights

    class Events(StreamEvents):
        def on_unit_done(self, unit):
            units.append(unit)
            assert not any(tensor.is_meta for tensor in tensors_of(weights, unit))

        def on_read(self, done, total):
            reads.append((done, total))

    streamed(loaded, Events(), head=False)
    assert units == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    assert reads == sorted(reads)
    assert reads[-1][0] == reads[-1][1] == loaded.stream.size


def test_an_error_in_one_batch_ends_all_and_frees_the_weights(tmp_path):
    loaded = Model.open(saved(tmp_path / "model", "olmoe"), stream=True)
    model, weights = loaded.module, loaded.stream.weights

    def wrong():
        forward(model, torch.tensor([[10**6]]))

    jobs = [PassJob(lambda: forward(model, some_batches()[0])), PassJob(wrong)]
    with pytest.raises(IndexError), only_running(model):
        run_in_lockstep(loaded.stream, jobs)
    assert all(tensor.is_meta for name in weights.units for tensor in tensors_of(weights, name))


GROUPED = ("olmoe", "deepseek_v3", "qwen3_moe", "mixtral", "minimax_m2")


def in_groups(folder, family, size, **options):
    """The model with its experts read `size` at a time."""
    loaded = Model.open(folder, stream=True, dtype="fp32", **options)
    weights = loaded.stream.weights
    for unit in weights.layers:
        groups = ExpertGroups(weights, unit, size)
        if groups.stacks:
            loaded.stream.groups[unit] = groups
    assert loaded.stream.groups
    loaded.module.set_experts_implementation("eager")
    return loaded


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("family", GROUPED)
def test_experts_in_groups_keep_the_matrix_products_of_each_batch(family, size, tmp_path):
    folder = saved(tmp_path / "model", family)
    model = Model.open(folder, dtype="fp32").module
    model.set_experts_implementation("eager")
    with only_running(model):
        expected = [first(forward(model, ids)) for ids in some_batches()]
    loaded = in_groups(folder, family, size)
    logits, _ = streamed(loaded)
    assert all(map(torch.equal, expected, logits))
    shards = loaded.stream.weights.shards
    assert shards.bytes_read <= shards.size  # experts that no token chose need not be read


def test_a_budget_makes_groups_and_one_that_is_too_small_says_how_much_is_needed(tmp_path):
    folder = saved(tmp_path / "model", "olmoe")
    loaded = Model.open(folder, stream=True, dtype="fp32")
    model, weights = loaded.module, loaded.stream.weights
    layer = weights.size("model.layers.0")
    assert not plan_groups(model, weights, memory=2 * layer, taken=0)
    groups = plan_groups(model, weights, memory=layer, taken=0)
    assert set(groups) == set(weights.layers)
    assert 1 <= groups["model.layers.0"].count < 8
    with pytest.raises(ParameterError, match=r"too small: .* give at least"):
        plan_groups(model, weights, memory=1000, taken=0)
    with pytest.raises(ParameterError, match="too small"):
        Model.open(folder, stream=True, memory=10**6)


BLOCK = 16


def rewrite(folder, change, quantised):
    """Change the tensors of every file, and say in the configuration how they are stored."""
    files = {}
    for file in folder.glob("*.safetensors"):
        tensors = {}
        for name, tensor in load_file(file).items():
            tensors |= change(name, tensor)
        save_file(tensors, file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file.name)
    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    settings = json.loads(config.read_text()) | {"quantization_config": quantised}
    config.write_text(json.dumps(settings))
    return folder


def in_blocks_of_fp8(name, tensor):
    if not name.endswith("proj.weight") or any(size % BLOCK for size in tensor.shape):
        return {name: tensor}
    rows, columns = tensor.shape
    blocks = tensor.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    small = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return {name: small.reshape(rows, columns), f"{name}_scale_inv": scales}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_blocks_of_fp8_are_scaled_as_in_an_ordinary_load(family, tmp_path):
    folder = rewrite(saved(tmp_path / "model", family), in_blocks_of_fp8, FP8)
    agree(folder)
    model = Model.open(folder, dtype="fp32").module
    model.set_experts_implementation("eager")
    with only_running(model):
        expected = [first(forward(model, ids)) for ids in some_batches()]
    logits, _ = streamed(in_groups(folder, family, 3))
    assert all(map(torch.equal, expected, logits))


def test_what_stands_beside_blocks_of_fp8_is_computed_in_the_precision_asked_for(tmp_path):
    folder = saved(tmp_path / "model", "deepseek_v3", torch.bfloat16)
    rewrite(folder, lambda name, tensor: in_blocks_of_fp8(name, tensor.float())
            if name.endswith("proj.weight") else {name: tensor}, FP8)  # fmt: skip
    agree(folder)
    loaded = Model.open(folder, dtype="fp32", stream=True)
    assert {tensor.dtype for tensor in loaded.module.parameters()} == {torch.float32}


def in_cut_blocks(side, unpacked):
    """Blocks of fp8 whose last rows and columns are cut, or the numbers that they stand for."""

    def change(name, tensor):
        if not name.endswith("proj.weight"):
            return {name: tensor}
        rows, columns = tensor.shape
        padded = torch.nn.functional.pad(tensor, (0, -columns % side, 0, -rows % side))
        blocks = padded.reshape(padded.shape[0] // side, side, -1, side)
        scales = blocks.abs().amax(dim=(1, 3)) / 448
        small = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        read = (small.float() * scales[:, None, :, None]) if unpacked else small
        kept = read.reshape(padded.shape)[:rows, :columns].contiguous()
        return {name: kept} if unpacked else {name: kept, f"{name}_scale_inv": scales}

    return change


@pytest.mark.parametrize("side", [5, 24])  # of 32 rows: 7 scales, and 2 as for blocks of 16
def test_blocks_of_fp8_may_be_cut_off_by_the_end_of_a_matrix(side, tmp_path):
    stored = FP8 | {"weight_block_size": [side, side]}
    cut = rewrite(saved(tmp_path / "cut", "deepseek_v3"), in_cut_blocks(side, False), stored)
    plain = saved(tmp_path / "plain", "deepseek_v3")
    configuration = (plain / "config.json").read_text()
    rewrite(plain, in_cut_blocks(side, True), None)
    (plain / "config.json").write_text(configuration)
    ready = (Model.open(folder, stream=True, dtype="fp32") for folder in (plain, cut))
    plain_logits, logits = (streamed(loaded)[0] for loaded in ready)
    for expected, other in zip(plain_logits, logits, strict=True):
        torch.testing.assert_close(expected, other, rtol=1e-6, atol=1e-6)
    grouped, _ = streamed(in_groups(cut, "deepseek_v3", 3))
    for expected, other in zip(plain_logits, grouped, strict=True):
        torch.testing.assert_close(expected, other, rtol=1e-5, atol=1e-5)


def in_mxfp4(name, tensor):
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {name: tensor}
    experts, inner, outer = tensor.shape
    generator = torch.Generator().manual_seed(len(name))
    shape = (experts, outer, inner // 32)
    blocks = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}


def test_mxfp4_is_unpacked_as_in_an_ordinary_load(tmp_path):
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    agree(rewrite(saved(tmp_path / "model", "gpt_oss"), in_mxfp4, quantised))


def damaged(folder, how):
    files = sorted(folder.glob("*.safetensors"))
    if how == "missing":
        files[1].unlink()
    elif how == "cut":
        files[1].write_bytes(files[1].read_bytes()[:-9])
    elif how == "empty":
        files[1].write_bytes(b"")
    return files[1].name


@pytest.mark.parametrize("how", ["missing", "cut", "empty"])
def test_damaged_files_are_refused_by_name_before_any_work(how, tmp_path):
    folder = saved(tmp_path / "model", "olmoe")
    name = damaged(folder, how)
    with pytest.raises(UnsupportedModelError, match=name):
        Model.open(folder, stream=True)


def test_tensors_that_are_missing_or_of_another_shape_are_refused_before_any_work(tmp_path):
    folder = saved(tmp_path / "model", "olmoe")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(TielineError, match=r"lacks \d+ tensors"):
        Model.open(folder, stream=True)
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 65}))
    with pytest.raises(TielineError, match=r"shape \(64, 32\) instead of \(65, 32\)"):
        Model.open(folder, stream=True)


def test_a_file_that_is_cut_off_during_the_run_is_told_at_once(tmp_path):
    folder = saved(tmp_path / "model", "olmoe")
    loaded = Model.open(folder, stream=True)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:64])
    with pytest.raises(UnsupportedModelError, match="was cut off while it was read"):
        streamed(loaded)


def test_the_system_is_asked_for_the_next_layer_while_one_computes(tmp_path, monkeypatch):
    loaded = Model.open(saved(tmp_path / "model", "olmoe", num_hidden_layers=4), stream=True)
    weights, prefetched = loaded.stream.weights, []
    monkeypatch.setattr(weights.shards, "prefetch", lambda names: prefetched.append(set(names)))
    streamed(loaded)
    first, *later = weights.layers
    assert prefetched == [set(weights.plans[name].keys) for name in (first, *later)]
