"""What every worker shares: runs timed in turns, and errors told in one short line."""

from tieline.engines.workers import main as worker


def test_ways_take_turns_and_the_first_round_only_warms_up():
    order = []
    ways = {name: lambda name=name: order.append(name) for name in ("plain", "captured")}
    found = worker.measure_runs(ways, 2)
    assert order == ["captured", "plain", "plain", "captured", "captured", "plain"]
    assert {name: len(seconds) for name, seconds in found.items()} == {"plain": 2, "captured": 2}
    assert all((seconds >= 0).all() for seconds in found.values())


def test_an_error_is_one_line_of_a_few_hundred_letters():
    words = worker.error_message(ValueError("heads of 24\n\n  are not taken\n" + "x" * 1000))
    assert words.startswith("ValueError: heads of 24 are not taken xxx")
    assert "\n" not in words
    assert len(words) < 450
