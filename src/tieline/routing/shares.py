"""Independent work split over threads once, instead of every operator split over all cores.

A kernel of many small operators meets all cores after each of them, thousands of times a call, and
whatever else runs on the machine then holds up every core (measured at load 8: five times the
processor time). Here each thread takes one share of the whole work and runs its operators alone,
so the threads meet once.
"""

import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["in_shares"]


def in_shares(n_items: int, work: Callable[[slice], None]) -> None:
    """Call `work` on slices that cover 0..n_items, one per thread; all at once if items are few.

    With fewer items than threads the caller does everything, its operators on all cores.

    Args:
        n_items: number of independent items.
        work: computes the items of a slice without gradients and writes the results itself.
    """
    threads = torch.get_num_threads()
    if threads == 1 or n_items < threads:
        work(slice(0, n_items))
        return
    edges = [n_items * i // threads for i in range(threads + 1)]
    shares = [slice(*pair) for pair in itertools.pairwise(edges)]
    inference = torch.is_inference_mode_enabled()  # like the gradient mode, a matter of the thread

    def run(share: slice) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            work(share)

    for _ in _workers(threads).map(run, shares):
        pass


_lock = threading.Lock()
_pool: tuple[int, int, ThreadPoolExecutor] | None = None  # process, number of threads, threads


def _workers(n: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked child inherits the record but not the threads."""
    global _pool
    with _lock:
        if _pool is None or _pool[:2] != (os.getpid(), n):
            _pool = os.getpid(), n, _start(n)
        return _pool[2]


def _start(n: int) -> ThreadPoolExecutor:
    """`n` threads whose operators use one core each.

    The number of cores is a property of each thread, but setting it also sets what threads yet to
    come start from; a passing thread puts that back, so that no other thread is changed.
    """
    ready = threading.Barrier(n + 1)

    def use_one_core() -> None:
        torch.get_num_threads()  # takes the default now, or it would overwrite the next line later
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(n, "tieline", initializer=use_one_core)
    for _ in range(n):
        pool.submit(int)
    ready.wait()
    restore = threading.Thread(target=torch.set_num_threads, args=(n,))
    restore.start()
    restore.join()
    return pool
