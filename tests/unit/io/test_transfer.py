from __future__ import annotations

from mooncake_hetero_tp.errors import TransferError
from mooncake_hetero_tp.io.transfer import Deadline, ReadFailed, ReadTally
from tests.unit.io.foreign import descriptors


def test_a_deadline_moves_and_stops() -> None:
    deadline = Deadline(5.0)
    assert (deadline.at, deadline.stopped) == (5.0, False)
    deadline.extend(9.0)
    deadline.stop()
    assert (deadline.at, deadline.stopped) == (9.0, True)


def test_a_tally_adds_batches() -> None:
    tally = ReadTally()
    tally.count(descriptors(3), retries=0)
    tally.count(descriptors(2), retries=2)
    assert (tally.batches, tally.descriptors, tally.bytes, tally.retries) == (2, 5, 80, 2)


def test_a_failed_read_is_the_transports_fault() -> None:
    assert issubclass(ReadFailed, TransferError)
    assert not ReadFailed("why").may_still_write
