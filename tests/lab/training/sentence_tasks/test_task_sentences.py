"""GLUE as a task: packing, scores, and a complete smoke run on synthetic and on real sentences."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.lab.training.real_data import shared
from tieline.core.errors import TielineError
from tieline.lab.training import sentence_tasks as task_sentences
from tieline.lab.training.config import SentenceConfig, gate_config
from tieline.lab.training.data_files import DataError
from tieline.lab.training.language_tasks import moe_layers
from tieline.lab.training.recipes import GLUE_GATES, glue_gate, glue_paper, glue_smoke, pacs_small
from tieline.lab.training.sentence_tasks import (
    Sentences,
    SentenceTask,
    answer_scores,
    pack_sentences,
)
from tieline.lab.training.training_run import run_training
from tieline.routing import GShardTopK
from tieline.routing.gates import expert_capacity

MARKS = (97, 98, 99)
tokens = st.lists(st.integers(0, 9), max_size=12)


@given(st.lists(tokens, min_size=1, max_size=2), st.integers(6, 20))
def test_packing_keeps_order_marks_segments_and_length(sentences, length):
    ids, segments, used = pack_sentences(sentences, MARKS, length)
    assert len(ids) == len(segments) == len(used) == length
    n = sum(used)
    assert used == [1] * n + [0] * (length - n)
    assert ids[0] == 97
    assert ids[n - 1] == 98
    assert ids[n:] == [99] * (length - n)
    assert ids.count(98) == len(sentences)
    inside = [(i, s) for i, s in zip(ids[1:n], segments[1:n], strict=True) if i < 97]
    for number, sentence in enumerate(sentences):
        segment = [i for i, s in inside if s == number]
        assert segment == sentence[: len(segment)]
    if sum(map(len, sentences)) + 1 + len(sentences) <= length:
        assert [i for i, _ in inside] == [i for sentence in sentences for i in sentence]


def test_the_longer_sentence_is_cut_first():
    ids, _, _ = pack_sentences([[1, 1], [2] * 9], MARKS, 8)
    assert ids == [97, 1, 1, 98, 2, 2, 2, 98]


def test_scores_of_known_answers():
    answers, truth = torch.tensor([1, 1, 1, 0, 0, 0]), torch.tensor([1, 1, 0, 0, 0, 1])
    scores = answer_scores(answers, truth)
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert scores["f1"] == pytest.approx(4 / 6)
    assert scores["mcc"] == pytest.approx((2 * 2 - 1) / 9)
    same = answer_scores(torch.ones(4).long(), torch.tensor([1, 0, 1, 1]))
    assert (same["accuracy"], same["mcc"]) == (0.75, 0.0)
    assert answer_scores(1 - truth, truth)["mcc"] == -1.0
    assert answer_scores(torch.zeros(2).long(), torch.zeros(2).long())["f1"] == 0.0


def fake_glue(task, split, folder):
    texts = tuple((f"{'good' if i % 2 else 'bad'} sentence {i}", "another") for i in range(30))
    return Sentences(texts, tuple(i % 2 for i in range(30)), f"{task} {split}")


@pytest.mark.parametrize("gate", GLUE_GATES)
def test_a_smoke_run_trains_scores_and_saves(gate, tmp_path, monkeypatch):
    monkeypatch.setattr(task_sentences, "load_glue", fake_glue)
    config = glue_smoke("mrpc", gate).replace(optim__steps=3, optim__batch=4)
    result = run_training(config, tmp_path / "run")
    assert result.scores["dev"]["examples"] == 30
    assert result.scores["dev"]["majority"] == 0.5
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_the_noise_of_the_baseline_is_drawn_from_the_seed(tmp_path, monkeypatch):
    monkeypatch.setattr(task_sentences, "load_glue", fake_glue)
    config = glue_smoke("mrpc", "smoe").replace(optim__steps=3, optim__batch=4, log_every=1)
    first, again, other = (
        [
            e["task_loss"]
            for e in run_training(config.replace(seed=seed), tmp_path / name).history[:3]
        ]
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    assert first == again != other


def test_items_are_padded_examples_in_an_order_of_the_seed(monkeypatch):
    monkeypatch.setattr(task_sentences, "load_glue", fake_glue)
    config = glue_smoke("rte", "smoe").replace(optim__steps=10, optim__batch=8)
    data = SentenceTask().data(config)
    assert len(data.train) == 80
    item = data.train[0]
    assert item["input_ids"].shape == item["attention_mask"].shape == (64,)
    assert sorted(data.train.order[:30].tolist()) == list(range(30))
    other = SentenceTask().data(config.replace(seed=1))
    assert not torch.equal(data.train.order, other.train.order)
    assert torch.equal(data.dev.tokens, other.dev.tokens)


def test_the_papers_form_states_its_sizes_and_says_what_is_missing(monkeypatch):
    config = glue_paper("cola", "smooth50", 4)
    shape = config.model
    assert isinstance(shape, SentenceConfig)
    assert (shape.layers, shape.d_model, shape.n_experts) == (24, 1024, 16)
    assert (config.gate.k, config.optim.batch) == (4, 32)
    assert config.optim.steps * 32 == pytest.approx(10 * 8_551, rel=1e-3)

    def absent(name, **options):
        raise OSError("no route")

    monkeypatch.setattr(task_sentences, "load_glue", fake_glue)
    monkeypatch.setattr("tieline.lab.training.data_files.snapshot_download", absent)
    with pytest.raises(DataError, match=r"bert-large-uncased.*no route.*hf download"):
        SentenceTask().data(config)


@pytest.mark.parametrize("k", [2, 4])
def test_the_baseline_has_the_noise_and_capacity_of_the_paper(k):
    config = glue_paper("rte", "smoe", k)
    assert (config.gate.gate, config.gate.k) == ("gshard", k)
    assert config.gate.gate_options == {"noise": 1.0, "capacity_factor": 1.5}
    assert config.losses.balance == 0.01
    for other in ("remoe", "smooth50"):
        assert glue_gate(other, k) == gate_config(other, k)


def test_noise_is_for_training_alone_and_no_expert_holds_more_than_its_capacity(monkeypatch):
    monkeypatch.setattr(task_sentences, "load_glue", fake_glue)
    config = glue_smoke("mrpc", "smoe").replace(optim__steps=1, optim__batch=8)
    model, data = SentenceTask().model(config).eval(), SentenceTask().data(config)
    (layer,) = moe_layers(model).values()
    assert isinstance(layer.gate, GShardTopK)
    layer_inputs = []
    layer.register_forward_pre_hook(lambda module, inputs: layer_inputs.append(inputs[0].detach()))
    items = [data.train[row] for row in range(8)]
    model(**{key: torch.stack([item[key] for item in items]) for key in items[0]})
    tokens = layer_inputs[0].flatten(0, 1)
    still = [layer.eval().route(tokens).weights for _ in range(2)]
    noisy = [layer.train().route(tokens).weights for _ in range(2)]
    assert torch.equal(*still)
    assert not torch.equal(*noisy)
    for weights in (*still, *noisy):
        load = (weights != 0).sum(dim=0)
        assert load.max() <= expert_capacity(len(tokens), 16, 2, 1.5)
        assert load.sum() < 2 * len(tokens)  # padding tokens are equal and overflow their experts


def test_shapes_of_other_tasks_and_blocks_that_are_not_there_are_refused():
    with pytest.raises(TielineError, match="PatchConfig is no shape for sentences"):
        SentenceTask().model(pacs_small("cosine", "photo"))
    with pytest.raises(TielineError, match="block 2 of only 2"):
        SentenceConfig(layers=2, d_model=8, d_hidden=8, heads=1, vocabulary=9, context=8, routed=2)


def test_a_smoke_run_on_real_sentences(tmp_path):
    shared("glue")
    result = run_training(
        glue_smoke("rte", "smoe").replace(optim__steps=5, optim__batch=8), tmp_path / "run"
    )
    assert result.data == "RTE train, 2490 examples, scored on 277"
    assert result.scores["dev"]["examples"] == 277
    task_entries = [entry for entry in result.history if "task_loss" in entry]
    assert all(0.4 < entry["task_loss"] < 1.2 for entry in task_entries)
    assert task_entries


def test_the_real_sentences_become_items():
    shared("glue")
    data = SentenceTask().data(glue_smoke("rte", "smoe"))
    assert data.about == "RTE train, 2490 examples, scored on 277"
    assert data.majority == pytest.approx(0.527, abs=5e-4)
    assert int(data.train[0]["input_ids"].max()) < 512
