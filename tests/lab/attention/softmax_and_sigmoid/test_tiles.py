"""Shares of work: each item runs once, each share on one core, and other threads are unaffected."""

import os
import signal
import threading

import pytest
import torch

from tieline.lab.attention.softmax_and_sigmoid import in_shares, sigmoid_attention


@pytest.fixture
def threads():
    """Use three operator threads, whatever the machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.mark.parametrize("items", [0, 1, 2, 3, 4, 7, 30])
def test_every_item_is_done_once_in_fair_shares(items, threads):
    done = []
    in_shares(items, lambda share: done.append(range(items)[share]))
    assert sorted(i for share in done for i in share) == list(range(items))
    assert len(done) == (threads if items >= threads else 1)
    assert max(map(len, done)) - min(map(len, done)) <= 1


def test_few_items_stay_with_the_caller(threads):
    calls = []
    in_shares(2, lambda _: calls.append((threading.get_ident(), torch.get_num_threads())))
    assert calls == [(threading.get_ident(), threads)]


def test_workers_use_one_core_and_nobody_else_is_changed(threads):
    calls, fresh = [], []
    in_shares(6, lambda _: calls.append((threading.get_ident(), torch.get_num_threads())))
    assert threading.get_ident() not in {thread for thread, _ in calls}
    assert {cores for _, cores in calls} == {1}
    assert torch.get_num_threads() == threads
    newcomer = threading.Thread(target=lambda: fresh.append(torch.get_num_threads()))
    newcomer.start()
    newcomer.join()
    assert fresh == [threads]


def test_a_new_number_of_threads_is_followed(threads):
    for n in (2, threads, 1):
        torch.set_num_threads(n)
        shares = []
        in_shares(6, shares.append)
        assert len(shares) == n


def test_an_error_in_a_share_reaches_the_caller(threads):
    def fail(share):
        raise RuntimeError(f"share {share.start}")

    with pytest.raises(RuntimeError, match="share 0"):
        in_shares(threads, fail)


def test_workers_compute_without_gradients_and_in_the_callers_inference_mode(threads):
    modes = []
    in_shares(
        3, lambda _: modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
    )
    assert set(modes) == {(False, False)}
    with torch.inference_mode():
        out = torch.zeros(3)
        in_shares(3, lambda share: out[share].add_(1))
    assert out.tolist() == [1, 1, 1]


def test_a_forked_child_starts_threads_of_its_own(threads):
    in_shares(threads, lambda _: None)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # waiting for threads that were not inherited would never end
        done = []
        in_shares(threads, done.append)
        os._exit(len(done))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == threads


@pytest.mark.parametrize("causal", [False, True])
def test_attention_on_threads_is_attention(causal, threads):
    q, k, v = (torch.randn(7, 260, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    results = []
    for n in (threads, 1):
        torch.set_num_threads(n)
        out = sigmoid_attention(q, k, v, causal=causal)
        results.append((out, *torch.autograd.grad(out.sin().sum(), (q, k, v))))
    for threaded, alone in zip(*results, strict=True):
        torch.testing.assert_close(threaded, alone, rtol=1e-13, atol=1e-13)
    torch.set_num_threads(threads)
    with torch.inference_mode():
        inferred = sigmoid_attention(q, k, v, causal=causal)
    assert torch.equal(inferred, results[0][0])
