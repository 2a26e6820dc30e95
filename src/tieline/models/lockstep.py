"""Forward passes that go through a model side by side, one place at a time.

Each pass is a function in a thread of its own, of which one runs at a time: `go` lets a pass run
until it parks, and returns where. Nothing runs at the same time, so that a pass computes what it
would compute alone; the threads only keep where each one stands.

    together = Lockstep([lambda: model(first), lambda: model(second)])
    together.go_all()                  all parked at the first place
    together.close()                   the passes that have not ended are given up
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import groupby
from typing import Any

import torch

Scope = Callable[[], AbstractContextManager[Any]]
"""Makes what is in force while a pass runs, and not while it is parked."""


class _GivenUp(BaseException):
    """Ends the thread of a pass that nobody waits for any more."""


class ParkedPass(threading.Thread):
    """One function on its way.

    Attributes:
        at: the place where it is parked; None before it begins and after it has ended.
        result: what it returned, once it has ended.
        ended: whether it has.
        number: its place among the passes.
    """

    def __init__(self, job: Callable[[], Any], scope: Scope | None = None, number: int = 0) -> None:
        """Run `job`, under `scope` while it runs, as the pass of this number."""
        super().__init__(daemon=True)
        self.number = number
        self._job, self._scope = job, scope or nullcontext
        self._inside: AbstractContextManager[Any] = nullcontext()
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._given_up = False
        self.at: Hashable | None = None
        self.result: Any = None
        self.ended = False

    def run(self) -> None:
        """What the thread does."""
        try:
            with torch.inference_mode():
                self._wait()
                self.result = self._job()
                self._inside.__exit__(None, None, None)
        except _GivenUp:
            pass
        except BaseException as problem:  # raised again where the pass is waited for
            self._error = problem
            self._inside.__exit__(None, None, None)
        self.at, self.ended = None, True
        self._back.release()

    def park(self, place: Hashable) -> None:
        """Stop here until the next turn; called by the pass itself."""
        self._inside.__exit__(None, None, None)
        self.at = place
        self._back.release()
        self._wait()

    def _wait(self) -> None:
        self._turn.acquire()
        if self._given_up:
            raise _GivenUp
        self._inside = self._scope()
        self._inside.__enter__()

    def go(self) -> Hashable | None:
        """Let the pass run until it parks or ends; raises what it raised."""
        if not self.is_alive() and not self.ended:
            self.start()
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error
        return self.at

    def give_up(self) -> None:
        """End the thread if it is parked."""
        if self.is_alive():
            self._given_up = True
            self._turn.release()
            self.join()


def current_pass() -> ParkedPass | None:
    """Return the pass whose thread this is; None outside of all."""
    thread = threading.current_thread()
    return thread if isinstance(thread, ParkedPass) else None


class Lockstep:
    """Passes that are led from place to place together."""

    def __init__(
        self,
        jobs: Sequence[Callable[[], Any]],
        scopes: Sequence[Scope | None] | None = None,
        settings: Sequence[Scope | None] | None = None,
    ) -> None:
        """Make one pass of each job.

        Args:
            jobs: what the passes do.
            scopes: what is in force, in its own thread, while each runs.
            settings: what is made ready, by whoever leads, before each goes on; neighbours with the
                same one share it.
        """
        pairs = zip(jobs, scopes or [None] * len(jobs), strict=True)
        self.passes = [ParkedPass(job, scope, number) for number, (job, scope) in enumerate(pairs)]
        self._settings = [setting or nullcontext for setting in settings or [None] * len(jobs)]

    def go_all(self, place: Hashable | None = None) -> None:
        """Let those that are parked at `place` go on, one after the other, in their order.

        Those that have not begun need nothing made ready: they stop where they need weights.
        """
        ready = [parked for parked in self.passes if parked.at == place and not parked.ended]
        for setting, group in groupby(ready, key=self.setting):
            with setting() if place is not None else nullcontext():
                for parked in group:
                    parked.go()

    def setting(self, waiting: ParkedPass) -> Scope:
        """What is made ready before a pass goes on."""
        return self._settings[waiting.number]

    @property
    def places(self) -> list[Hashable]:
        """Where passes are parked, without repetition, in the order of the passes."""
        return list(dict.fromkeys(waiting.at for waiting in self.passes if not waiting.ended))

    @property
    def results(self) -> list[Any]:
        """What the passes returned."""
        return [finished.result for finished in self.passes]

    def close(self) -> None:
        """Give up what has not ended."""
        for unfinished in self.passes:
            unfinished.give_up()
