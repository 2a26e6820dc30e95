"""Memory of the machine and of this process, in bytes."""

from pathlib import Path

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
