"""What every worker shares: runs timed in turns, and errors reported in one short line."""

from tieline.engines.workers import main as worker


def test_ways_take_turns_and_the_first_round_only_warms_up():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in ("plain", "captured")}
    seconds_by_run = worker.measure_runs(runs, 2)
    assert order == ["captured", "plain", "plain", "captured", "captured", "plain"]
    assert {name: len(seconds) for name, seconds in seconds_by_run.items()} == {
        "plain": 2,
        "captured": 2,
    }
    assert all((seconds >= 0).all() for seconds in seconds_by_run.values())


def test_an_error_is_one_line_of_a_few_hundred_letters():
    message = worker.error_message(ValueError("heads of 24\n\n  are not taken\n" + "x" * 1000))
    assert message.startswith("ValueError: heads of 24 are not taken xxx")
    assert "\n" not in message
    assert len(message) < 450
