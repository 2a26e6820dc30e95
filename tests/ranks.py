"""Gloo processes for tests: started quickly, met without a port, never left behind.

They are forked from a server that has imported torch and the analyses once, meet through a file (no
port to lose a race for), and are killed by their own handles when they are no longer needed.
"""

import multiprocessing
import os
import pickle
import shutil
import tempfile
import traceback
from pathlib import Path

import torch

LIMIT = 240.0  # seconds; only a hang takes so long, also on a busy machine
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.lab.training.runs", "tests.run.on_ranks"])


class Ranks:
    """A process group that runs one task after the other, each on all ranks at once.

    Args:
        count: how many.
        patience: seconds after which a message that is not answered is an error.
    """

    def __init__(self, count, patience=60.0):
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.pipes, self.processes = [], []
        for rank in range(count):
            here, there = SERVER.Pipe()
            arguments = (rank, count, f"file://{self.folder}/meeting", patience)
            process = SERVER.Process(target=_serve, args=(*arguments, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, task, *args):
        """Have every rank begin `task(*args)`."""
        for pipe in self.pipes:
            pipe.send_bytes(pickle.dumps((task, args)))

    def outcome(self, rank):
        """(whether it went well, result or traceback) of the task of one rank."""
        if not self.pipes[rank].poll(LIMIT):
            return False, "no answer"
        try:
            # plain bytes: torch's own way of sending shares memory with a process that may be gone
            return pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionError):
            return False, "died"

    def run(self, task, *args):
        """Run `task(*args)` on every rank and return the results; raises if any rank fails."""
        self.start(task, *args)
        outcomes = [self.outcome(rank) for rank in range(len(self.pipes))]
        failed = [f"rank {r}:\n{message}" for r, (fine, message) in enumerate(outcomes) if not fine]
        assert not failed, "\n".join(failed)
        return [result for _, result in outcomes]

    def close(self):
        """Kill the processes that still run."""
        for process in self.processes:
            process.kill()
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(rank, count, meeting, patience, pipe):
    from tieline.core.collectives import join_processes

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    os.environ.update(WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    with join_processes(timeout=patience, backend="gloo", init_method=meeting):
        while True:
            try:
                task, args = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            try:
                outcome = (True, task(*args))
            except Exception:
                outcome = (False, traceback.format_exc())
            pipe.send_bytes(pickle.dumps(outcome))
