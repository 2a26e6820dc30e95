"""Memory of the machine and of this process, in bytes, and what the process does with freed memory.

with freed_memory_kept():   what is freed inside serves the next allocation, however large
...
"""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

GROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


GROUP_USED = Path("/sys/fs/cgroup/memory.current")


def free_memory() -> int:
    """Bytes that can be allocated here; a very large number where nothing tells."""
    limits = []
    for line in _file_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) << 10)
    limit, used = _file_lines(GROUP_LIMIT), _file_lines(GROUP_USED)
    if limit and used and limit[0].isdigit():
        limits.append(int(limit[0]) - int(used[0]))
    return min(limits, default=1 << 62)


def _file_lines(path: Path) -> list[str]:
    """Lines of a file of the system; none where it cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def resident_memory(peak: bool = False) -> int:
    """Bytes of memory that this process takes, or has taken at most; 0 where nothing tells."""
    for line in _file_lines(Path("/proc/self/status")):
        if line.startswith("VmHWM:" if peak else "VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -3, -4, -8
"""Numbers of the settings of glibc's `mallopt`."""

USUAL = {MMAP_MAX: 1 << 16, MMAP_THRESHOLD: 32 << 20, TRIM_THRESHOLD: 64 << 20}
"""Values that glibc has once a process has freed some large tensors."""


def share_one_heap() -> None:
    """Let threads that begin later allocate from the heap of the main thread, where it is glibc's.

    Other heaps hold no block of more than 64 MB: `freed_memory_kept` keeps nothing larger there.
    """
    heap = _glibc()
    if heap is not None:
        heap.mallopt(ARENA_MAX, 1)


@contextmanager
def freed_memory_kept() -> Iterator[None]:
    """Inside the block, memory that is freed stays with the process for the next allocation.

    Otherwise a tensor of more than 32 MB goes back to the system when it is freed, and the next one
    takes pages that the system must find and clear: 2.4 GB of them in a layer of Qwen3-30B-A3B for
    4,096 tokens, a fifth of the CPU time of streaming it on a virtual machine. Afterwards free
    memory is given back. Without effect where the heap is not glibc's.
    """
    heap = _glibc()
    if heap is None:
        yield
        return
    share_one_heap()
    heap.mallopt(MMAP_MAX, 0)
    heap.mallopt(TRIM_THRESHOLD, -1)
    try:
        yield
    finally:
        for setting, value in USUAL.items():
            heap.mallopt(setting, value)
        heap.malloc_trim(0)


def _glibc() -> Any:
    """The C library if it is glibc; None otherwise."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") else None
