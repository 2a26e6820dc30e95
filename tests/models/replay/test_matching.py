"""Which record a document takes: packed rows, shuffled rows, padding, prefixes, none."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from tests.models.replay.test_replay import other_trace, recorded, states
from tests.models.tiny import batch, lively, tiny_model
from tieline.core.errors import TielineError, TraceError
from tieline.models import capture
from tieline.models.replay import ReplayWarning, replay
from tieline.trace import concatenate, select_tokens

IDS = batch(5)
LENGTHS = (12, 9, 12, 5, 7)
ROWS = [row[:length] for row, length in zip(IDS, LENGTHS, strict=True)]


def padded(rows, side):
    """Rows of several lengths as one batch, with its mask."""
    mask = [torch.ones(len(row), dtype=torch.long) for row in rows]
    ids, mask = (pad_sequence(x, batch_first=True, padding_side=side) for x in (rows, mask))
    return {"input_ids": ids, "attention_mask": mask}


def packed(rows, form="position_ids"):
    """Rows one after the other in one row."""
    lengths = torch.tensor([len(row) for row in rows])
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    arguments = {"input_ids": torch.cat(rows)[None], "position_ids": positions, "use_cache": False}
    if form == "cu_seq_lens_q":
        ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)]).int()
        arguments |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return arguments


def routes_of(model, rows):
    """Other routes than the router's own, recorded row by row."""
    numbered = []
    for number, row in enumerate(rows):
        trace = other_trace(model, row[None])
        documents = torch.full_like(trace.documents, number)
        numbered.append(type(trace)(trace.layers, trace.tokens, documents, trace.positions))
    return concatenate(numbered)


def alone(model, rows):
    """Last states of each row under a replay of its own routes."""
    outputs = []
    with torch.no_grad():
        for row in rows:
            with replay(model, other_trace(model, row[None])):
                outputs.append(states(model(input_ids=row[None]))[0])
    return outputs


@pytest.fixture(scope="module")
def model():
    return lively(tiny_model("olmoe"))


@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens_q"])
def test_capture_records_packed_rows_as_documents(model, form):
    with torch.no_grad(), capture(model) as recorder:
        model(**packed(ROWS, form))
    trace = recorder.trace()
    assert trace.documents.bincount().tolist() == list(LENGTHS)
    with torch.no_grad(), capture(model) as recorder:
        model(**padded(ROWS, "right"))
    for ours, expected in zip(trace.layers, recorder.trace().layers, strict=True):
        assert torch.equal(ours.experts[:, :2], expected.experts[:, :2])


@pytest.mark.parametrize("match", ["order", "tokens"])
@pytest.mark.parametrize("form", ["position_ids", "cu_seq_lens_q"])
def test_every_document_of_a_packed_row_is_replayed(model, match, form):
    with torch.no_grad(), replay(model, routes_of(model, ROWS), match=match) as replayed:
        replayed_states = states(model(**packed(ROWS, form)))[0]
    assert (replayed.recorded, replayed.tokens) == (sum(LENGTHS), sum(LENGTHS))
    assert (replayed.documents, replayed.unmatched) == (5, 0)
    for ours, expected in zip(replayed_states.split(LENGTHS), alone(model, ROWS), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_shuffled_rows_find_their_record_as_often_as_they_come(model, side):
    routes, expected = routes_of(model, ROWS), alone(model, ROWS)
    order = [3, 0, 4, 2, 1]
    with torch.no_grad(), replay(model, routes, match="tokens") as replayed:
        for some in (order, order[:2], order[2:]):
            rows = padded([ROWS[i] for i in some], side)
            replayed_states = states(model(**rows))
            for i, ours, mask in zip(
                some, replayed_states, rows["attention_mask"].bool(), strict=True
            ):
                torch.testing.assert_close(ours[mask], expected[i], rtol=1e-4, atol=1e-5)
    assert replayed.recorded == replayed.tokens == 2 * sum(LENGTHS)
    assert (replayed.documents, replayed.unmatched) == (10, 0)


def test_rows_in_another_order_are_refused_with_the_way_out(model):
    routes = routes_of(model, ROWS)
    with pytest.raises(TraceError, match='match="tokens"'), replay(model, routes):
        model(**padded(ROWS[::-1], "right"))


@pytest.mark.parametrize("match", ["order", "tokens"])
def test_documents_without_a_record_are_counted_and_told(model, match):
    routes = routes_of(model, ROWS[:2])
    warned = pytest.warns(ReplayWarning, match=r"3 of 5 documents .* document 2 of 12 tokens")
    with warned, torch.no_grad(), replay(model, routes, match=match) as replayed:
        model(**padded(ROWS, "right"))
    assert (replayed.documents, replayed.unmatched, replayed.recorded) == (5, 3, 21)


def test_a_record_may_end_before_its_document_and_go_on_after_it(model):
    """An engine records no route of the last token; a pass may hold the prompt alone."""
    routes = routes_of(model, ROWS)
    short = select_tokens(routes, routes.positions < 6)
    with torch.no_grad(), replay(model, short, match="tokens") as replayed:
        model(**padded(ROWS[::-1], "left"))
    assert replayed.recorded == sum(min(length, 6) for length in LENGTHS)
    with torch.no_grad(), replay(model, routes, match="tokens") as replayed:
        model(input_ids=torch.stack([row[:4] for row in ROWS[::-1]]))
    assert replayed.recorded == replayed.tokens == 20


def test_the_longest_agreement_is_taken(model):
    """A record of the beginning and one of the whole: each document takes its own."""
    rows = [ROWS[0][:6], ROWS[0], ROWS[0][:9]]
    expected = alone(model, rows)
    routes = routes_of(model, rows)
    with torch.no_grad(), replay(model, routes, match="tokens") as replayed:
        for row, ours in zip(rows, expected, strict=True):
            replayed_states = states(model(input_ids=row[None]))[0]
            torch.testing.assert_close(replayed_states, ours, rtol=1e-4, atol=1e-5)
    assert replayed.recorded == replayed.tokens


def test_a_prompt_of_several_records_with_other_routes_is_refused(model):
    """Two answers to one prompt whose routes differ in the prompt; equal routes are no question."""
    rows = [torch.cat([ROWS[0][:6], ROWS[i][:3]]) for i in (1, 2)]
    same = routes_of(model, rows)
    prompt = ROWS[0][None, :6]
    with torch.no_grad(), replay(model, same, match="tokens") as replayed:
        model(input_ids=prompt)
    assert replayed.recorded == 6
    second, _ = recorded(model, rows[1][None])
    mixed = []
    for layer, live in zip(same.layers, second.layers, strict=True):
        experts = torch.cat([layer.experts[:9], live.experts[:, :2].long()])
        mixed.append(type(layer)(layer.name, layer.facts, experts))
    other = type(same)(mixed, same.tokens, same.documents, same.positions)
    refused = pytest.raises(TraceError, match=r"beginning of 2 documents of the record \(0, 1\)")
    with refused, torch.no_grad(), replay(model, other, match="tokens"):
        model(input_ids=prompt)
    with torch.no_grad(), replay(model, other, match="tokens") as replayed:
        model(input_ids=torch.stack(rows[::-1]))
    assert replayed.recorded == replayed.tokens == 18


def test_generate_matches_its_growing_rows(model):
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with torch.no_grad():
        with capture(model) as recorder:
            plain = model.generate(batch(), **options)
        with replay(model, recorder.trace(), match="tokens") as replayed:
            again = model.generate(batch().flip(0), **options)
    assert torch.equal(plain.flip(0), again)
    assert replayed.recorded == replayed.tokens == 2 * 16
    assert (replayed.documents, replayed.unmatched) == (2, 0)


@pytest.mark.parametrize("match", ["order", "tokens"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_repeats_the_record_of_packed_rows(match, reentrant):
    model = lively(tiny_model("olmoe")).requires_grad_(True).train()
    routes = routes_of(model, ROWS)
    halves = [packed(ROWS[:3]), packed(ROWS[3:])]

    def gradients():
        model.zero_grad()
        some = halves if match == "order" else halves[::-1]
        losses = [states(model(**half)).square().mean() for half in some]
        losses[0].backward()
        losses[1].backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    with replay(model, routes, match=match) as replayed:
        plain = gradients()
    assert replayed.recorded == replayed.tokens == sum(LENGTHS)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with replay(model, routes, match=match) as replayed:
        again = gradients()
    assert sum(replayed.changed.values()) > 0
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(plain, again, strict=True))


def test_what_cannot_be_matched_by_tokens_is_refused(no_axis_checks, model):
    routes = routes_of(model, ROWS)
    holes = select_tokens(routes, routes.positions != 3)
    with pytest.raises(TraceError, match="lacks positions"):
        replay(model, holes, match="tokens").__enter__()
    nameless = type(routes)(
        routes.layers, torch.full_like(routes.tokens, -1), routes.documents, routes.positions
    )
    with pytest.raises(TraceError, match="no token ids to match by"):
        replay(model, nameless, match="tokens").__enter__()
    states_alone = pytest.raises(TielineError, match="given embeddings")
    with states_alone, replay(model, routes, match="tokens"):
        model(inputs_embeds=torch.zeros(1, 3, 32))
    with pytest.raises(TielineError, match='match is "order" or "tokens"'):
        replay(model, routes, match="rows").__enter__()
