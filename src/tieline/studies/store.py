"""Results on disk, one file per claim, whole or not at all.

A run that is killed loses only the claims that were being tested; the next one reads the rest.
"""

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tieline.errors import require
from tieline.studies.claim import Claim, Outcome, Run
from tieline.studies.fingerprint import fingerprint

__all__ = ["ResultStore", "result_key"]

FORMAT, VERSION = "tieline-claim", 1


def result_key(claim: Claim, run: Run) -> dict[str, Any]:
    """What a result depends on: the claim, the mode, the seed and the code."""
    mode = "fast" if run.fast else "full"
    return {"claim": claim.id, "mode": mode, "seed": run.seed, "code": fingerprint(claim.paper)}


@dataclass(frozen=True)
class ResultStore:
    """A folder of results.

    Attributes:
        folder: made when the first result is saved.
    """

    folder: Path

    def check(self) -> None:
        """Refuse a place that is no folder, or that cannot be written to, before any work."""
        known = next(p for p in (self.folder, *self.folder.absolute().parents) if p.exists())
        require(known.is_dir(), f"cannot keep results in {self.folder}: {known} is no folder")
        require(os.access(known, os.W_OK), f"cannot keep results in {known}: it is read-only")

    def load(self, claim: Claim, run: Run) -> Outcome | None:
        """The result of this very claim, mode, seed and code; None if there is none."""
        try:
            record = json.loads(self._path(claim, run).read_bytes())
            if record["key"] != result_key(claim, run) or record["version"] != VERSION:
                return None
            return Outcome.from_dict(record["outcome"])
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return None

    def save(self, claim: Claim, run: Run, outcome: Outcome) -> None:
        """Write the result beside its place, then move it there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        head = {"format": FORMAT, "version": VERSION, "key": result_key(claim, run)}
        text = json.dumps(head | {"outcome": outcome.to_dict()}, allow_nan=False, indent=1)
        path = self._path(claim, run)
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        try:
            partial.write_text(text + "\n", encoding="utf-8")
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def _path(self, claim: Claim, run: Run) -> Path:
        mode = "fast" if run.fast else "full"
        return self.folder / f"{claim.id}.{mode}.seed{run.seed}.json"
