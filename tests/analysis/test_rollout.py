"""Planted faults are named within five steps, and sound bfloat16 rollouts are not."""

import warnings
from dataclasses import replace

import pytest
import torch
from torch import multiprocessing

from tests.models.tiny import VOCABULARY, lively, tiny_model
from tieline.analysis.rollout import RolloutLimits, RolloutMismatch, RolloutWarning
from tieline.core.errors import TielineError, TraceError
from tieline.models.capture import capture
from tieline.models.demo import load_demo_model
from tieline.models.emulate import emulate
from tieline.trace.record import RoutingTrace

pytestmark = pytest.mark.filterwarnings("ignore::tieline.analysis.rollout.RolloutWarning")

ROWS, LENGTH = 10, 24


def prompts(seed, rows=ROWS):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (rows, LENGTH), generator=generator)


def routes(model, ids):
    with torch.no_grad(), capture(model, ranks=1, epsilons=(), distances=False) as recorder:
        model(input_ids=ids)
    return recorder.trace()


def with_rows(trace, documents, change):
    """The trace with the experts of some documents replaced by `change` of their rows."""
    layers = []
    for layer in trace.layers:
        experts = layer.experts.clone()
        for document in documents:
            rows = (trace.documents == document).nonzero().squeeze(1)
            experts[rows] = layer.experts[change(rows)]
        layers.append(type(layer)(layer.name, layer.facts, experts))
    return RoutingTrace(layers, trace.tokens, trace.documents, trace.positions)


@pytest.fixture(scope="module")
def model():
    return lively(tiny_model("deepseek_v3"))


def compared(model, ids, record, **options):
    mismatch = RolloutMismatch(model, **options)
    with torch.no_grad(), mismatch.watch(record):
        model(input_ids=ids)
    return mismatch


def test_a_model_agrees_with_its_own_routes(model):
    ids = prompts(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scalars = compared(model, ids, routes(model, ids)).step()
    assert all(isinstance(value, float) for value in scalars.values())
    assert scalars["rollout/flip_rate"] == scalars["rollout/unrecorded"] == 0
    assert scalars["rollout/tokens"] == ROWS * LENGTH
    assert set(scalars) >= {"rollout/flip_rate/layer_0", "rollout/flip_rate/layer_1"}


def test_documents_in_another_order_are_found_by_their_tokens(model):
    ids = prompts(1)
    scalars = compared(model, ids.flip(0), routes(model, ids)).step()
    assert scalars["rollout/flip_rate"] == 0


def test_rounding_flips_near_ties_alone(model):
    ids = prompts(2, rows=40)
    with emulate(model, "bf16", "all"):
        record = routes(model, ids)
    scalars = compared(model, ids, record).step()
    assert scalars["rollout/flip_rate"] > 0
    assert scalars["rollout/near_ties"] == 1
    assert scalars["rollout/unexplained_max"] == 0


def test_rows_that_were_shifted_are_named(model):
    ids = prompts(3)
    record = with_rows(routes(model, ids), [4], lambda rows: rows.roll(1))
    mismatch = compared(model, ids, record)
    with pytest.warns(RolloutWarning, match="rows were shifted.*tieline diff"):
        scalars = mismatch.step()
    assert scalars["rollout/shifted_documents"] == 1 / ROWS
    assert scalars["rollout/exchanged_documents"] == 0


def test_documents_that_were_exchanged_are_named(model):
    ids = prompts(4)
    trace = routes(model, ids)
    record = with_rows(trace, [2], lambda rows: rows + LENGTH)
    record = with_rows_of(record, trace, 3, lambda rows: rows - LENGTH)
    mismatch = compared(model, ids, record)
    with pytest.warns(RolloutWarning, match="routes of another document"):
        scalars = mismatch.step()
    assert scalars["rollout/exchanged_documents"] == 2 / ROWS
    assert scalars["rollout/shifted_documents"] == 0


def with_rows_of(record, trace, document, change):
    """The record with one document taken from another trace."""
    other = with_rows(trace, [document], change)
    mask = (trace.documents == document)[:, None]
    layers = [
        type(a)(a.name, a.facts, torch.where(mask, b.experts, a.experts))
        for a, b in zip(record.layers, other.layers, strict=True)
    ]
    return RoutingTrace(layers, record.tokens, record.documents, record.positions)


def test_tokens_without_a_record_are_counted(model):
    ids = prompts(5)
    mismatch = compared(model, ids, routes(model, ids[:5]))
    with pytest.warns(RolloutWarning, match="no recorded route"):
        assert mismatch.step()["rollout/unrecorded"] == 0.5


def test_steps_begin_anew_and_memory_does_not_grow(model):
    ids = prompts(6)
    mismatch = RolloutMismatch(model, limits=None)
    sizes = set()
    for _ in range(3):
        with torch.no_grad(), mismatch.watch(routes(model, ids)):
            model(input_ids=ids)
        assert mismatch.step()["rollout/tokens"] == ROWS * LENGTH
        sizes.add(mismatch._flips.gaps.numel())
    assert len(sizes) == 1
    assert mismatch.step() == {}


def test_another_number_of_layers_is_refused(model):
    ids = prompts(7)
    trace = routes(model, ids)
    renamed = [type(a)("another", a.facts, a.experts) for a in trace.layers[:1]]
    record = RoutingTrace(renamed, trace.tokens, trace.documents, trace.positions)
    with pytest.raises(TraceError, match="1 layers, the model 2 routers"):
        compared(model, ids, record)


def test_another_number_of_experts_per_token_is_refused(model):
    ids = prompts(7)
    trace = routes(model, ids)
    layers = [
        type(layer)(layer.name, replace(layer.facts, k=1), layer.experts[:, :1])
        for layer in trace.layers
    ]
    record = RoutingTrace(layers, trace.tokens, trace.documents, trace.positions)
    with pytest.raises(TielineError, match=r"record has 1 experts per token .*, the model 2"):
        compared(model, ids, record)


@pytest.mark.parametrize(("shape", "temperature"), [((3, 4), 1.0), ((ROWS, LENGTH), 0.0)])
def test_kl_of_other_numbers_is_refused(model, shape, temperature, no_axis_checks):
    ids = prompts(7)
    with pytest.raises(TielineError, match="need logprobs"):
        RolloutMismatch(model).kl_split(
            {"input_ids": ids}, routes(model, ids), torch.zeros(shape), temperature
        )


def test_the_last_pass_is_saved_for_diff(model, tmp_path):
    ids = prompts(8)
    mismatch = compared(model, ids, routes(model, ids))
    mismatch.save(tmp_path / "mismatch")
    assert {path.name for path in (tmp_path / "mismatch").iterdir()} == {"live", "rollout"}


def sampled_logprobs(model, ids):
    """log p of each token after the first eight, NaN before: prompts are not sampled."""
    with torch.no_grad():
        scores = model(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
    logprobs = torch.full(ids.shape, torch.nan, dtype=torch.float64)
    logprobs[:, 8:] = scores.gather(-1, ids[:, 1:, None])[:, 7:, 0]
    return logprobs


def test_kl_of_a_model_to_itself_is_nothing(model):
    ids = prompts(10)
    kl = RolloutMismatch(model).kl_split(
        {"input_ids": ids}, routes(model, ids), sampled_logprobs(model, ids)
    )
    assert set(kl) == {"rollout/kl", "rollout/kl_ids_replayed", "rollout/kl_weights_replayed"}
    assert all(0 <= value < 1e-12 for value in kl.values())


def test_kl_splits_into_experts_and_weights():
    """If only the routers are in bfloat16, replaying their weights removes the whole distance."""
    model = load_demo_model().train()
    ids = torch.randint(3, 500, (8, 48), generator=torch.Generator().manual_seed(0))
    model.eval()
    with emulate(model, "bf16", "router"):
        record, logprobs = routes(model, ids), sampled_logprobs(model, ids)
    expected = sampled_logprobs(model, ids)
    model.train()
    kl = RolloutMismatch(model).kl_split({"input_ids": ids}, record, logprobs)
    assert model.training
    live, with_ids, with_weights = kl.values()
    assert live > 4 * with_ids > 100 * with_weights
    d = (logprobs - expected)[:, 8:]
    assert live == pytest.approx(float(((-d).exp() - 1 + d).mean()), rel=1e-4)


def test_a_temperature_divides_the_logits(model):
    ids = prompts(12)
    with torch.no_grad():
        scores = (model(input_ids=ids).logits[:, :-1].double() / 0.7).log_softmax(-1)
    logprobs = torch.full(ids.shape, torch.nan, dtype=torch.float64)
    logprobs[:, 1:] = scores.gather(-1, ids[:, 1:, None])[..., 0]
    mismatch, record = RolloutMismatch(model), routes(model, ids)
    warm = mismatch.kl_split({"input_ids": ids}, record, logprobs, temperature=0.7)
    assert (
        warm["rollout/kl"]
        < 1e-12
        < mismatch.kl_split({"input_ids": ids}, record, logprobs)["rollout/kl"]
    )


def test_routes_without_weights_have_no_kl_with_weights(model):
    ids = prompts(13)
    bare = with_rows(routes(model, ids), [], None)
    kl = RolloutMismatch(model).kl_split({"input_ids": ids}, bare, sampled_logprobs(model, ids))
    assert set(kl) == {"rollout/kl", "rollout/kl_ids_replayed"}


FAULTS = ("shifted", "checkpoint", "bias")


def rollout(fault, model, ids, seed):
    """Routes of a bfloat16 rollout with a planted fault."""
    generator = torch.Generator().manual_seed(seed)
    if fault == "checkpoint":
        model = lively(tiny_model("deepseek_v3"))
        for tensor in model.parameters():
            tensor.add_(0.3 * tensor.std() * torch.randn(tensor.shape, generator=generator))
    if fault == "bias":
        model = lively(tiny_model("deepseek_v3"))
        for name, tensor in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                tensor.zero_()
    with emulate(model, "bf16", "all"):
        trace = routes(model, ids)
    if fault == "shifted":
        some = torch.randperm(len(ids), generator=generator)[: len(ids) // 10].tolist()
        trace = with_rows(trace, some, lambda rows: rows.roll(1))
    return trace


def warned_step(fault, model, seed, steps=5):
    """The first step that warns, counted from 1; 0 for none."""
    mismatch = RolloutMismatch(model, limits=RolloutLimits())
    for step in range(steps):
        ids = prompts(10_000 * seed + step, rows=10)
        with torch.no_grad(), mismatch.watch(rollout(fault, model, ids, seed)):
            model(input_ids=ids)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mismatch.step()
        if any(issubclass(w.category, RolloutWarning) for w in caught):
            return step + 1
    return 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_within_five_steps(model, fault):
    assert warned_step(fault, model, seed=1) > 0


def test_sound_rollouts_are_silent(model):
    assert warned_step("sound", model, seed=1) == 0


@pytest.mark.slow
def test_held_out_seeds(model):
    """Seeds from 100 on, which no limit was tuned on: 20 runs with each fault, 40 without."""
    for fault in FAULTS:
        assert all(warned_step(fault, model, seed) for seed in range(100, 120)), fault
    assert not any(warned_step("sound", model, seed) for seed in range(100, 140))


def one_rank(rank, folder, results):
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = lively(tiny_model("deepseek_v3"))
    ids = prompts(9)
    with emulate(model, "bf16", "all"):
        record = routes(model, ids)
    mismatch = RolloutMismatch(model, limits=None)
    with torch.no_grad(), mismatch.watch(record):
        model(input_ids=ids[rank::2])
    results[rank] = mismatch.step()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_give_the_numbers_of_one_process(model, tmp_path):
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        multiprocessing.spawn(one_rank, (str(tmp_path), results), nprocs=2)
        by_rank = dict(results)
    ids = prompts(9)
    with emulate(model, "bf16", "all"):
        record = routes(model, ids)
    expected = compared(model, ids, record, limits=None).step()
    assert by_rank[0] == by_rank[1] == expected
