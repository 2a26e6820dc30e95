"""Passes in lockstep: their order, the settings active in each, and what neighbours share."""

from contextlib import contextmanager

from tieline.run.streamed_passes import Lockstep, PassJob, current_pass


def test_neighbours_share_what_is_made_ready_and_nothing_is_before_the_first_place():
    events = []

    @contextmanager
    def ready():
        events.append("ready")
        yield
        events.append("over")

    @contextmanager
    def inside():
        events.append("in")
        yield
        events.append("out")

    def job(name):
        here = current_pass()
        assert here is not None
        events.append(name)
        here.park("place")
        events.append(name.upper())
        return name

    together = Lockstep(
        [
            PassJob(lambda: job("a"), setting=ready),
            PassJob(lambda: job("b"), inside, ready),
            PassJob(lambda: job("c")),
        ]
    )
    together.go_all()
    assert events == ["a", "in", "b", "out", "c"]
    events.clear()
    together.go_all("place")
    assert events == ["ready", "A", "in", "B", "out", "over", "C"]
    assert together.results == ["a", "b", "c"]
