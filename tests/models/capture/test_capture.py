"""Capture of whole models: what it records, when, and that it leaves no trace behind."""

import json

import pytest
import torch
from jaxtyping import TypeCheckError
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.models.tiny import batch, lively, tiny_model
from tieline.core.errors import ParameterError, TielineError, TraceError, UnsupportedModelError
from tieline.measure.distance import expert_distances, nearest_tie
from tieline.models import FAMILIES, capture, find_routers
from tieline.trace.summary import SummaryBuilder, summarise

EPSILONS = (0.125, 0.5, 2.0)


@pytest.fixture
def model():
    return lively(tiny_model("mixtral"))


def _captured(model, *calls, **options):
    with torch.no_grad(), capture(model, **options) as recorder:
        for call in calls or ({"input_ids": batch()},):
            model(**call)
    return recorder.trace()


def _router_calls(model, call):
    """Inputs and logits of each router, by ordinary hooks."""
    calls, handles = {}, []
    for name, router in find_routers(model).items():
        note = lambda _, args, out, name=name: calls.update({name: (args[0].cpu(), out[0].cpu())})  # noqa: E731
        handles.append(router.register_forward_hook(note))
    with torch.no_grad():
        model(**call)
    for handle in handles:
        handle.remove()
    return calls


def test_ranks_counts_distances_and_inputs_follow_from_the_logits_of_all_experts(model):
    calls = _router_calls(model, {"input_ids": batch()})
    trace = _captured(model, keep="inputs", ranks=3, epsilons=EPSILONS)
    routers = find_routers(model)
    assert trace.epsilons == EPSILONS
    for layer in trace.layers:
        inputs, logits = calls[layer.name]
        assert torch.equal(layer.inputs, inputs.flatten(0, -2))
        assert torch.equal(layer.scores, logits.sort(dim=1, descending=True).values[:, :5])
        assert torch.equal(logits.gather(1, layer.experts.long()), layer.scores)
        below = layer.scores[:, 1:2].double() - logits.double()
        near = [(below < epsilon).sum(dim=1) for epsilon in EPSILONS]
        assert torch.equal(layer.near.long(), torch.stack(near, dim=1))
        walls = expert_distances(routers[layer.name].weight.cpu())
        assert torch.equal(layer.distance, nearest_tie(logits, 2, walls).distance)


def test_what_is_not_wanted_is_not_kept(model):
    layer = _captured(model, ranks=1, epsilons=(), distances=False).layers[0]
    assert layer.scores.shape == layer.experts.shape == (24, 3)
    assert layer.near is layer.distance is layer.inputs is None


def test_padding_changes_nothing_but_the_tokens_that_are_left_out(model):
    ids = batch()
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    trace = _captured(model, {"input_ids": ids, "attention_mask": mask}, keep="inputs")
    calls = _router_calls(model, {"input_ids": ids, "attention_mask": mask})
    ids, mask = ids.cpu(), mask.cpu()
    assert torch.equal(trace.tokens, ids[mask.bool()])
    assert trace.positions.tolist() == [*range(12), *range(7)]
    for layer in trace.layers:
        inputs, logits = (x.flatten(0, -2)[mask.flatten().bool()] for x in calls[layer.name])
        assert torch.equal(layer.inputs, inputs)
        assert torch.equal(logits.gather(1, layer.experts.long()), layer.scores)


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "gemma4", "mistral4", "zaya"])
def test_where_experts_tie_the_models_own_choice_is_recorded(family):
    """Three experts of each kind: for every token the best tie, and so do the best groups."""
    model = lively(tiny_model(family))
    for router in find_routers(model).values():
        for name, tensor in [*router.named_parameters(), *router.named_buffers()]:
            if "bias" in name and tensor.shape[-1] >= 8:
                tensor.copy_(tensor[..., torch.arange(tensor.shape[-1]) % 3])
            elif tensor.ndim == 2 and len(tensor) >= 8:
                tensor.copy_(tensor[torch.arange(len(tensor)) % 3])
    chosen = {}
    for name, router in find_routers(model).items():
        note = lambda _, args, out, name=name: chosen.update({name: out[1:3]})  # noqa: E731
        router.register_forward_hook(note)
    trace = _captured(model)
    ties = 0
    for layer in trace.layers:
        k = layer.facts.k
        weights, ids = (x.reshape(24, k).cpu() for x in chosen[layer.name])
        ids = ids.masked_fill(weights == 0, 8) if family == "zaya" else ids
        assert torch.equal(layer.experts[:, :k].long().sort().values, ids.sort().values)
        ties += int((layer.gap == 0).sum())
    assert ties > 0


def test_evaluation_and_training_with_and_without_router_logits_record_the_same(model):
    plain = _captured(model)
    for training in (False, True):
        model.train(training)
        trace = _captured(model, {"input_ids": batch(), "output_router_logits": True})
        assert trace.provenance["training"] is training
        for a, b in zip(plain.layers, trace.layers, strict=True):
            assert torch.equal(a.scores, b.scores)


def test_router_logits_and_losses_of_the_model_survive(model):
    call = {"input_ids": batch(), "labels": batch(), "output_router_logits": True}
    plain = model(**call)
    with capture(model):
        captured = model(**call)
    assert torch.equal(plain.aux_loss, captured.aux_loss)
    for a, b in zip(plain.router_logits, captured.router_logits, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_under_checkpointing_is_not_counted(model, use_reentrant):
    plain = _captured(model)
    model.requires_grad_(True).train()
    options = {"use_reentrant": use_reentrant}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    with capture(model) as recorder:
        model(input_ids=batch(), labels=batch(), use_cache=False).loss.backward()
    trace = recorder.trace()
    assert trace.n_tokens == 24
    assert torch.equal(trace.layers[1].scores, plain.layers[1].scores)
    assert all(p.grad is not None for r in find_routers(model).values() for p in r.parameters())


def test_generation_continues_the_documents_and_leaves_out_rows_that_have_ended(model):
    prompt = batch(3, 6)
    mask = torch.ones_like(prompt)
    mask[0, :2] = 0
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, 2
    rows = iter([[7, 2, 7], [2, 0, 8], [0, 0, 2]])

    def script(module, args, output):
        """Force the tokens of the script: row 1 ends first, then row 0, then row 2."""
        for row, token in enumerate(next(rows)):
            output.logits[row, -1, token] = 1e4

    model.register_forward_hook(script)
    with torch.no_grad(), capture(model) as recorder:
        model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=3)
    trace = recorder.trace()
    new_tokens = {0: [7, 2], 1: [2], 2: [7, 8]}
    for document, new in new_tokens.items():
        mine = trace.documents == document
        shown = prompt[document][mask[document].bool()].tolist()
        assert trace.tokens[mine].tolist() == shown + new
        assert trace.positions[mine].tolist() == list(range(len(shown) + len(new)))


def test_a_model_with_eyes_is_captured_as_a_whole():
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
    vision |= {"out_hidden_size": 32, "deepstack_visual_indexes": [0]}
    text = tiny_model("qwen3_vl_moe").config.to_dict()
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    model = Qwen3VLMoeForConditionalGeneration(config).eval()
    with torch.no_grad(), capture(model) as recorder:
        model.generate(batch(), max_new_tokens=3, do_sample=False)
    trace = recorder.trace()
    assert trace.positions.tolist() == [*range(12)] * 2 + [12, 12, 13, 13]
    assert [layer.name.split(".")[1] for layer in trace.layers] == ["language_model"] * 2


def test_batches_follow_each_other_and_embeddings_have_no_ids(model):
    embeddings = model.get_input_embeddings()(batch())
    trace = _captured(model, {"input_ids": batch()}, {"inputs_embeds": embeddings})
    assert trace.documents.unique().tolist() == [0, 1, 2, 3]
    assert trace.tokens[24:].tolist() == [-1] * 24
    assert torch.equal(trace.layers[0].scores[:24], trace.layers[0].scores[24:])


def test_positional_arguments_are_found(model):
    with torch.no_grad(), capture(model) as recorder:
        model(batch())
    assert recorder.n_tokens == 24


def test_chosen_layers_alone_are_recorded(model):
    names = list(find_routers(model))
    assert [layer.name for layer in _captured(model, layers=names[1:]).layers] == names[1:]
    for wrong in (["nothing"], []):
        with pytest.raises(ParameterError), capture(model, layers=wrong):
            pass


def test_a_sink_takes_every_pass_and_gives_the_summary_of_the_trace(model):
    calls = [{"input_ids": batch()}, {"input_ids": batch(1, 5)}]
    builder = SummaryBuilder(EPSILONS)
    with torch.no_grad(), capture(model, epsilons=EPSILONS, sink=builder) as recorder:
        for call in calls:
            model(**call)
    assert recorder.n_tokens == 29
    with pytest.raises(TraceError, match="sink"):
        recorder.trace()
    summary = summarise(_captured(model, *calls, epsilons=EPSILONS))
    for a, b in zip(builder.summary().layers, summary.layers, strict=True):
        assert torch.equal(a.load, b.load)


def test_a_router_whose_forward_was_replaced_on_the_instance_is_seen(model):
    """Device maps put a wrapper of the bound method on each module."""
    plain = _captured(model)
    for router in find_routers(model).values():
        router.forward = (lambda bound: lambda *a, **k: bound(*a, **k))(router.forward)
    assert torch.equal(_captured(model).layers[0].scores, plain.layers[0].scores)


def test_weights_that_are_elsewhere_give_no_distance(model):
    names = list(find_routers(model))
    router = find_routers(model)[names[0]]
    weight = router.weight

    def fetch(module, args):
        module._parameters["weight"] = weight

    def offload(module, args, output):
        module._parameters["weight"] = weight.to("meta")

    router.register_forward_pre_hook(fetch)
    router.register_forward_hook(offload)
    layers = _captured(model).layers
    assert layers[0].distance is None
    assert layers[1].distance is not None


def test_distances_follow_weights_that_are_trained(model):
    router = next(iter(find_routers(model).values()))
    with torch.no_grad(), capture(model) as recorder:
        model(input_ids=batch())
        router.weight *= 2
        model(input_ids=batch())
    first = recorder.trace().layers[0]
    torch.testing.assert_close(first.distance[:24], first.distance[24:])
    torch.testing.assert_close(2 * first.scores[:24], first.scores[24:])


def test_leaving_the_block_by_an_error_restores_everything_and_drops_the_pass(model):
    classes = [type(router) for router in find_routers(model).values()]
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    with pytest.raises(KeyboardInterrupt), capture(model) as recorder:
        raise KeyboardInterrupt
    assert [type(router) for router in find_routers(model).values()] == classes
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == hooks
    with pytest.raises(TraceError, match="no forward pass"):
        recorder.trace()


def test_a_pass_that_fails_is_not_recorded(model):
    last = list(find_routers(model).values())[-1]
    handle = last.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad(), capture(model) as recorder:
        with pytest.raises(ZeroDivisionError):
            model(input_ids=batch())
        handle.remove()
        model(input_ids=batch())
    assert recorder.trace().n_tokens == 24


def test_a_model_is_captured_once_at_a_time(model):
    with capture(model) as recorder:
        with pytest.raises(TielineError, match="captured already"), capture(model):
            pass
        with torch.no_grad():
            model(input_ids=batch())
    assert recorder.n_tokens == 24
    assert _captured(model).n_tokens == 24


def test_routers_that_run_outside_the_model_are_refused(model):
    with torch.no_grad(), capture(model), pytest.raises(TielineError, match="outside"):
        model.model(input_ids=batch())


def test_routers_that_see_other_tokens_are_refused(model):
    router = next(iter(find_routers(model).values()))
    router.register_forward_hook(lambda _, args, out: [x[:22] for x in out])
    with torch.no_grad(), capture(model), pytest.raises(TielineError, match=r"22 tokens .* of 24"):
        model(input_ids=batch())


def test_a_router_that_runs_twice_in_a_pass_is_refused(model):
    first, second = model.model.layers
    second.mlp.gate = first.mlp.gate
    with torch.no_grad(), capture(model), pytest.raises(TielineError, match="ran twice"):
        model(input_ids=batch())


def test_a_layer_that_runs_in_some_passes_only_is_refused(model):
    with torch.no_grad(), capture(model) as recorder:
        model(input_ids=batch())
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        with pytest.raises(TielineError, match="layer 1 ran in some forward passes only"):
            model(input_ids=batch())
    assert recorder.n_tokens == 24


def test_a_batch_of_nothing_but_padding_is_no_pass(model):
    call = {"input_ids": batch(), "attention_mask": torch.zeros(2, 12, dtype=torch.long)}
    with pytest.raises(TraceError, match="no forward pass"):
        _captured(model, call)


def test_a_router_that_names_an_expert_twice_is_refused(model):
    router = next(iter(find_routers(model).values()))
    router.register_forward_hook(lambda _, args, out: (*out[:2], out[2][:, [0, 0]]))
    with torch.no_grad(), capture(model), pytest.raises(UnsupportedModelError, match="twice"):
        model(input_ids=batch())


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "mistral4", "zaya", "ernie4_5_moe"])
def test_capture_holds_under_autocast(family):
    model = lively(tiny_model(family))
    with torch.autocast("cpu", torch.bfloat16):
        assert _captured(model).n_tokens == 24


def test_a_model_made_in_inference_mode_is_captured():
    with torch.inference_mode():
        assert _captured(lively(tiny_model("mixtral"))).layers[0].distance is not None


def test_a_dense_model_is_not_a_mixture_of_experts():
    config = LlamaConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
    with pytest.raises(UnsupportedModelError, match="not a Mixture-of-Experts model"):
        find_routers(LlamaForCausalLM(config))


def test_scores_that_are_not_finite_are_reported_by_layer(model):
    list(find_routers(model).values())[1].weight[3] = torch.nan
    message = r"layer 1: 24 .*token 0 of document 0"
    with torch.no_grad(), capture(model), pytest.raises(TielineError, match=message):
        model(input_ids=batch())


def test_a_record_that_does_not_describe_the_router_is_refused(monkeypatch):
    model = lively(tiny_model("deepseek_v3"))
    right = FAMILIES["DeepseekV3TopkRouter"]
    wrong = type(right)("deepseek_v3", right.routers, ranked="sigmoid", groups=right.groups)
    monkeypatch.setitem(FAMILIES, "DeepseekV3TopkRouter", wrong)
    with torch.no_grad(), capture(model), pytest.raises(UnsupportedModelError, match="does not"):
        model(input_ids=batch())


@pytest.mark.parametrize(
    "wrong", [{"keep": "all"}, {"ranks": 0}, {"ranks": "many"}, {"epsilons": (0.5, 0.1)}]
)
def test_wrong_arguments_are_refused(model, wrong):
    with pytest.raises((TielineError, TypeCheckError)), capture(model, **wrong):
        pass


def test_inputs_of_dbrx_cannot_be_kept():
    model = tiny_model("dbrx")
    with pytest.raises(ParameterError, match="dbrx"), capture(model, keep="inputs"):
        pass


def test_provenance_is_json(model):
    trace = _captured(model)
    provenance = json.loads(json.dumps(trace.provenance))
    assert provenance["model_type"] == "mixtral"
    assert provenance["dtype"] == "float32"
    assert provenance["transformers"].startswith("5.")
