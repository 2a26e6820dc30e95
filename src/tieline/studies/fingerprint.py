"""Which code a result belongs to.

A stored result counts as long as nothing changed that could change it: the sources of the package
but for the rooms that only show results, of the ledger's own files, of the claim's paper, and the
versions of the libraries that compute.
"""

import hashlib
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import tieline.studies.registry as registry

__all__ = ["fingerprint"]

SHOWING = {"cli", "report"}
LIBRARIES = ("torch", "numpy", "scipy")


@lru_cache
def fingerprint(paper: int) -> str:
    """Sixteen hexadecimal digits of a SHA-256 over sources and versions."""
    root = Path(registry.__file__).parents[1]
    package = registry.PAPERS[paper].package
    digest = hashlib.sha256()
    for name in LIBRARIES:
        digest.update(f"{name} {version(name)}\n".encode())
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _counts(parts, package):
            digest.update("/".join(parts).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _counts(parts: tuple[str, ...], package: str) -> bool:
    if parts[0] in SHOWING:
        return False
    papers = {paper.package for paper in registry.PAPERS.values()} - {package}
    return not (parts[0] == "studies" and papers.intersection(parts))
