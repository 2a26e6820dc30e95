"""Passes that go side by side: order, what is in force for each, and what neighbours share."""

from contextlib import contextmanager

from tieline.run.streamed_passes import Lockstep, PassJob, current_pass


def test_neighbours_share_what_is_made_ready_and_nothing_is_before_the_first_place():
    seen = []

    @contextmanager
    def ready():
        seen.append("ready")
        yield
        seen.append("over")

    @contextmanager
    def inside():
        seen.append("in")
        yield
        seen.append("out")

    def job(name):
        here = current_pass()
        assert here is not None
        seen.append(name)
        here.park("place")
        seen.append(name.upper())
        return name

    together = Lockstep(
        [
            PassJob(lambda: job("a"), setting=ready),
            PassJob(lambda: job("b"), inside, ready),
            PassJob(lambda: job("c")),
        ]
    )
    together.go_all()
    assert seen == ["a", "in", "b", "out", "c"]
    seen.clear()
    together.go_all("place")
    assert seen == ["ready", "A", "in", "B", "out", "over", "C"]
    assert together.results == ["a", "b", "c"]
