"""Freed memory that stays with the process, counted in pages that the system had to provide."""

import subprocess
import sys

import pytest

from tieline.core.memory import _glibc

TENSOR = 64 << 20
TIMES = 12
PAGES = f"""
import resource, threading
import torch
from tieline.core.memory import freed_memory_kept, share_one_heap

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range({TIMES}):
        torch.empty({TENSOR}, dtype=torch.uint8).zero_()
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

def in_a_thread():
    thread = threading.Thread(target=pages)
    thread.start()
    thread.join()

counts = []
share_one_heap()
torch.set_num_threads(1)
in_a_thread()
with freed_memory_kept():
    for _ in range(4):
        in_a_thread()
in_a_thread()
print(*counts)
"""


@pytest.mark.skipif(_glibc() is None, reason="another heap than glibc's")
def test_freed_tensors_serve_the_next_ones_inside_the_block_alone() -> None:
    """Threads of passes too: outside, each large tensor takes pages of its own."""
    done = subprocess.run([sys.executable, "-c", PAGES], capture_output=True, text=True, check=True)
    before, first, *_, inside, after = map(int, done.stdout.split())
    assert inside < before / 4
    assert first < before
    assert after > before / 2
