"""Rows of batches and decoded tokens, as captures and engines note them."""

import torch

import tieline as tl
from tieline.models.demo import load_demo_model
from tieline.trace.document_runs import batch_rows, decoded_tokens
from tieline.trace.readers import import_trace


def every_token(trace):
    return torch.arange(trace.n_tokens)


def test_a_capture_notes_rows_and_where_decoding_began():
    model = load_demo_model()
    ids = torch.randint(3, 512, (3, 10)).to(model.device)
    with tl.capture(model) as recorder, torch.no_grad():
        cache = model(input_ids=ids[:, :4], use_cache=True).past_key_values
        cache = model(input_ids=ids[:, 4:7], past_key_values=cache).past_key_values
        for step in range(7, 10):
            model(input_ids=ids[:, step : step + 1], past_key_values=cache)
        model(input_ids=ids[:2])
    trace = recorder.trace()
    rows, decoded = (f(trace, every_token(trace)) for f in (batch_rows, decoded_tokens))
    assert rows is not None
    assert decoded is not None
    assert dict(zip(trace.documents.tolist(), rows.tolist(), strict=True)) == {
        0: 0, 1: 1, 2: 2, 3: 0, 4: 1
    }  # fmt: skip
    expected = (trace.documents < 3) & (trace.positions >= 7)
    assert decoded.tolist() == expected.tolist()


def test_single_documents_read_at_once_note_nothing():
    model = load_demo_model()
    with tl.capture(model) as recorder, torch.no_grad():
        for _ in range(2):
            model(input_ids=torch.randint(3, 512, (1, 6)).to(model.device))
    trace = recorder.trace()
    assert batch_rows(trace, every_token(trace)) is None
    assert decoded_tokens(trace, every_token(trace)) is None


def test_the_answer_of_an_engine_begins_after_its_prompt():
    rows = [[[0, 1]], [[1, 2]], [[2, 3]], [[0, 3]]]
    answer = {
        "prompt_token_ids": [5, 6, 7],
        "choices": [{"routed_experts": rows, "token_ids": [8, 9]}],
    }
    trace = import_trace(answer, n_experts=4)
    decoded = decoded_tokens(trace, every_token(trace))
    assert decoded is not None
    assert decoded.tolist() == [False, False, False, True]
