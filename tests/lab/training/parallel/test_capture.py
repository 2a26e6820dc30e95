"""A record made by two ranks is, bit by bit, the record made by one process."""

import pytest
import torch

from tests.lab.training.parallel.runs import captured
from tieline.core.errors import TraceError
from tieline.trace.record import identical


def sequences(count):
    return list(torch.arange(9 * count).view(count, 9) % 300)


@pytest.mark.parametrize("what", ["trace", "summary"])
@pytest.mark.parametrize("count", [5, 1], ids=["uneven shares", "a rank without tokens"])
def test_two_ranks_record_what_one_process_records(pair, what, count):
    plain = captured(sequences(count), what)
    for found in pair.run(captured, sequences(count), what):
        assert identical(found, plain)


def test_nothing_to_capture_is_refused():
    with pytest.raises(TraceError, match="got no sequences"):
        captured([], "trace")
