"""Emulated precision: what is rounded, what is not, and that the native model does the same."""

import copy

import pytest
import torch

from tests.models.tiny import WIDTH, batch, lively, tiny_model
from tieline.core.errors import ParameterError
from tieline.models import emulate as emulate_room
from tieline.models import find_routers, number_formats, rounding_buffers
from tieline.models.emulate import emulate, rounded_products
from tieline.models.number_formats import FORMATS
from tieline.run.observers import RouteRecorder, observing
from tieline.run.plan import Pass

FAMILIES = ["mixtral", "olmoe", "qwen3_moe", "gpt_oss", "deepseek_v3"]


def first_router(model):
    return next(iter(find_routers(model).values()))


def router_logits(router, x):
    return router(x)[0]


def dyadic(*shape):
    """Numbers of few bits: their products and sums are exact in float32."""
    return torch.randint(-64, 65, shape) / 32


@pytest.mark.parametrize("family", FAMILIES)
def test_a_router_in_bf16_is_what_torch_makes_of_it_in_bf16(family):
    router = first_router(lively(tiny_model(family)))
    x = dyadic(50, WIDTH) * 1.0078125  # more bits than bf16 holds
    native = copy.deepcopy(router).to(torch.bfloat16)
    logits = native(x.bfloat16())[0]
    with torch.inference_mode(), emulate(router, "bf16"):
        emulated_logits = router(x)[0]
    # sums in another order may fall on the other side of half a step
    step = 2.0**-7 * logits.float().abs().clamp(min=2**-6)
    assert ((emulated_logits - logits.float()).abs() <= step).all()
    if logits.dtype == torch.bfloat16:
        assert (emulated_logits == logits.float()).double().mean() > 0.95
        assert torch.equal(emulated_logits, emulated_logits.bfloat16().float())


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "int8", "int8_group", "int4"])
def test_a_router_in_few_bits_is_the_product_of_rounded_numbers(name):
    router = first_router(lively(tiny_model("olmoe")))
    x, chosen = torch.randn(20, WIDTH), FORMATS[name]
    with emulate(router, name):
        logits = router_logits(router, x)
    inputs = x if chosen.activations is None else chosen.activations(x)
    assert torch.allclose(logits, inputs @ chosen.weights(router.weight).T, atol=1e-6)
    assert not torch.allclose(logits, x @ router.weight.T, atol=1e-4)


@pytest.mark.parametrize("region", ["router", "all", "others"])
def test_only_the_parts_asked_for_are_in_the_format_and_all_is_restored(region):
    model = lively(tiny_model("olmoe"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    clean = model(input_ids=batch()).logits
    with emulate(model, "int4", region):
        changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    routers = {n for n in before if ".gate." in n}
    inner = {n for n, v in before.items() if v.ndim >= 2 and "layers" in n}
    assert changed == {"router": routers, "all": inner, "others": inner - routers}[region]
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert torch.equal(model(input_ids=batch()).logits, clean)


def test_weights_come_back_also_after_an_error():
    model = lively(tiny_model("olmoe"))
    clean = model(input_ids=batch()).logits
    with pytest.raises(KeyError), emulate(model, "int4", "all"):
        raise KeyError
    assert torch.equal(model(input_ids=batch()).logits, clean)


def test_routers_that_are_kept_are_not_touched():
    model = lively(tiny_model("olmoe"))
    names = list(find_routers(model))
    clean = model(input_ids=batch()).logits
    with emulate(model, "bf16", "router", keep=names):
        assert torch.equal(model(input_ids=batch()).logits, clean)
    with emulate(model, "bf16", "router", keep=names[:1]):
        some = model(input_ids=batch()).logits
    with emulate(model, "bf16", "router"):
        every = model(input_ids=batch()).logits
    assert not torch.equal(some, clean)
    assert not torch.equal(some, every)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_whole_model_in_bf16_errs_as_the_native_one_does(family):
    """The errors have the same size and are correlated; random ones would be √2 times apart."""
    model = lively(tiny_model(family))
    native = copy.deepcopy(model).to(torch.bfloat16)
    for name, buffer in native.named_buffers():  # transformers keeps this one in float32
        if name.endswith("e_score_correction_bias"):
            buffer.data = model.get_buffer(name).clone()
    ids = batch(4, 24)
    with torch.inference_mode():
        exact, low = model(input_ids=ids).logits, native(input_ids=ids).logits.float()
        with emulate(model, "bf16", "all"):
            emulated_logits = model(input_ids=ids).logits
    pairs = (emulated_logits, low), (exact, low), (exact, emulated_logits)
    apart, native, emulated = ((a - b).norm(dim=-1).median().item() for a, b in pairs)
    assert 0.85 < emulated / native < 1.15
    assert apart < 0.9 * native


def test_positions_stay_exact_however_long_the_text():
    """In bf16 positions past 256 would be rounded, which no model does."""
    model = lively(tiny_model("olmoe", max_position_embeddings=2048))
    rotary_outputs = []
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, output: rotary_outputs.append(output)
    )
    ids = batch(1, 700)
    with torch.inference_mode():
        model(input_ids=ids)
        with emulate(model, "bf16", "all"):
            model(input_ids=ids)
    assert all(
        torch.equal(exact, emulated) for exact, emulated in zip(*rotary_outputs, strict=True)
    )


def test_a_router_that_computes_in_float32_keeps_its_logits_in_the_whole_model_alone():
    model = lively(tiny_model("deepseek_v3"))
    router, x = first_router(model), torch.randn(9, WIDTH)
    with emulate(router, "bf16", "router"):
        rounded = router_logits(router, x)
    with emulate(model, "bf16", "all"):
        single = router_logits(router, x)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert torch.allclose(
        single, x.bfloat16().float() @ router.weight.bfloat16().float().T, atol=1e-6
    )
    assert not torch.equal(single, single.bfloat16().float())


def test_scores_of_a_router_in_float32_are_recorded_unrounded_inside_emulation():
    model = lively(tiny_model("deepseek_v3"))
    recorder = RouteRecorder(model)
    recorder.on_start(Pass(0), batch())
    with torch.no_grad(), emulate(model, "bf16", "all"), observing(model, [recorder]):
        model(input_ids=batch())
    for name in find_routers(model):
        layer = recorder.recorded(Pass(0), name)
        assert not torch.equal(layer.scores, layer.scores.bfloat16().float())


def test_transposed_experts_share_scales_along_their_inputs():
    model = lively(tiny_model("gpt_oss"))
    experts = model.model.layers[0].mlp.experts
    before = experts.gate_up_proj.clone()  # (experts, inputs, outputs)
    with emulate(model, "int4", "all"):
        after = experts.gate_up_proj.clone()
    largest = before.abs().amax(dim=1, keepdim=True)
    steps = after / (largest / 7)
    assert torch.allclose(steps, steps.round(), atol=1e-4)


def test_unknown_formats_parts_and_layers_are_refused():
    model = tiny_model("olmoe")
    with pytest.raises(ParameterError, match="unknown format 'fp4'"), emulate(model, "fp4"):
        pass
    with (
        pytest.raises(ParameterError, match="no routers named"),
        emulate(model, "bf16", keep=["x"]),
    ):
        pass


@pytest.mark.cpu("an accelerator rounds a tensor as one, not in pieces of a cache")
def test_layouts_of_rounded_tensors_are_asked_of_torch_once(monkeypatch):
    calls = []
    snapped = number_formats.Rounding._snapped_values
    monkeypatch.setattr(rounding_buffers, "PIECE", 64)
    monkeypatch.setattr(
        number_formats.Rounding,
        "_snapped_values",
        lambda self, values: calls.append(values.device.type) or snapped(self, values),
    )
    rounding_buffers.rounded_layout.cache_clear()
    values = torch.randn(40, 8)
    for _ in range(3):
        rounding_buffers.rounded_in_pieces(values, FORMATS["bf16"].weights)
    assert calls.count("meta") == 1


@pytest.fixture
def roundings(monkeypatch):
    """Shapes of what is rounded, in order."""
    shapes = []
    for name in ("rounded_in_pieces", "round_in_place"):
        rounding = getattr(emulate_room, name)
        monkeypatch.setattr(
            emulate_room,
            name,
            lambda values, *rest, rounding=rounding: (
                shapes.append(tuple(values.shape)) or rounding(values, *rest)
            ),
        )
    return shapes


def test_what_was_rounded_is_rounded_again_only_after_a_write(roundings):
    x, kept = torch.randn(6, 5), torch.randn(6, 5)
    model, grid = lively(tiny_model("olmoe")), FORMATS["bf16"].results
    with torch.inference_mode(), rounded_products(model, "bf16", "all"):
        sums = x + x.mul(3.0)
        roundings.clear()
        doubled = sums + sums
        assert roundings == [(6, 5)]  # the result alone: both terms are on the grid
        sums.view(-1)[3:].add_(1e-3)  # through a view, so that `sums` itself is not named
        roundings.clear()
        again = sums * 1.0
        assert roundings == [(6, 5)] * 2
        kept * 1.0
    assert torch.equal(doubled, grid(doubled))
    assert torch.equal(again, grid(again))
    assert not torch.equal(kept, grid(kept))  # what others may hold stays as it is


@pytest.mark.cpu("tensors of the pretended device share one address")
def test_a_write_to_one_tensor_leaves_the_others_rounded(roundings):
    x, model = torch.randn(6, 5), lively(tiny_model("olmoe"))
    with torch.inference_mode(), rounded_products(model, "bf16", "all"):
        sums, other = x + x, x + x.mul(2.0)
        sums.view(-1)[:3] = 1e-3  # through a view, so that `sums` itself is not named
        roundings.clear()
        other + other
        assert roundings == [(6, 5)]  # the result alone
        roundings.clear()
        moved = sums.transpose(0, 1)
        moved * 1.0
        assert roundings == [(5, 6)] * 2  # the write removed its mark
        roundings.clear()
        other.index_add_(0, torch.tensor([1]), x[:1])
        other * 1.0
        assert roundings == [(6, 5)] * 2


def test_rounded_routers_watch_no_function_outside_of_them(monkeypatch):
    model, names = lively(tiny_model("olmoe")), []
    watched = emulate_room._ProductRounding.__torch_function__
    monkeypatch.setattr(
        emulate_room._ProductRounding,
        "__torch_function__",
        lambda self, *call: names.append(self._scope.running) or watched(self, *call),
    )
    with torch.inference_mode(), emulate(model, "bf16", region="router"):
        model(input_ids=batch())
    assert set(names) == set(emulate_room.modular_routers(model))


def test_what_was_rounded_and_moved_is_not_rounded_again(roundings):
    x = torch.randn(6, 4)
    model = lively(tiny_model("olmoe"))
    with torch.inference_mode(), rounded_products(model, "bf16", "all"):
        sums = x + x
        first, second = sums.view(2, 3, 4).transpose(0, 1).chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        roundings.clear()
        turned * turned
        assert roundings == [(3, 2, 4)]
        half = torch.cat((first, x[:, :2].view(3, 2, 2)), dim=-1)  # only one of them was rounded
        roundings.clear()
        half * half
        assert roundings == [(3, 2, 4)] * 3
        roundings.clear()
        sums.double() * 1.0
        assert roundings == [(6, 4)] * 2  # of another type


TENSOR, FUNCTIONAL = torch.Tensor, torch.nn.functional


@pytest.mark.parametrize(
    "function",
    [
        TENSOR.add_,
        TENSOR.__iadd__,
        TENSOR.__setitem__,
        TENSOR.copy_,
        TENSOR.data.__set__,
        TENSOR.__ior__,
        TENSOR.index_add_,
        torch.relu_,
        FUNCTIONAL.relu,
        FUNCTIONAL.dropout,
    ],
)
def test_functions_that_may_write_are_known(function):
    assert emulate_room._may_write(function)


@pytest.mark.parametrize(
    "function",
    [
        TENSOR.add,
        TENSOR.__radd__,
        TENSOR.__invert__,
        TENSOR.__getitem__,
        TENSOR.shape.__get__,
        TENSOR.__pow__,
        torch.cat,
        FUNCTIONAL.linear,
        FUNCTIONAL.silu,
        FUNCTIONAL.softmax,
    ],
)
def test_functions_that_only_read_are_known(function):
    assert not emulate_room._may_write(function)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_rounding_what_was_rounded_changes_no_bit_of_a_model(family, name, monkeypatch):
    model, ids = lively(tiny_model(family)), batch()
    with torch.inference_mode(), emulate(model, name, region="all"):
        logits = model(input_ids=ids).logits
        monkeypatch.setattr(emulate_room, "_may_write", lambda function: True)  # no tag survives
        assert torch.equal(logits, model(input_ids=ids).logits)
