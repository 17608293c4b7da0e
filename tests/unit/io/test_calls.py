"""One engine call: split so that it can be waited for, its codes, its timeout."""

from __future__ import annotations

import time

import pytest

from mooncake_hetero_tp.io.calls import read_batch
from tests.unit.io.foreign import descriptors


class Scripted:
    """An engine whose batches answer as they are told; batch n is the n-th that was submitted."""

    def __init__(self, looks: list[int], *, rest: int = 0, refuse: int | None = None) -> None:
        self.looks, self.rest, self.refuse = looks, rest, refuse
        self.submitted: list[tuple[list[int], list[int], list[int]]] = []
        self.asked: list[int] = []

    def batch_transfer_async_read(self, _target: str, dst: list[int], src: list[int], length: list[int]) -> int:
        self.submitted.append((dst, src, length))
        return 0 if len(self.submitted) == self.refuse else len(self.submitted)

    def transfer_check_status(self, batch: int) -> int:
        assert batch == len(self.submitted)
        return self.looks.pop(0) if self.looks else 0

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        self.asked += batches
        return self.rest


def test_the_last_descriptor_is_a_batch_of_its_own() -> None:
    engine = Scripted([0, 0, 1])
    batch = descriptors(3)
    assert read_batch(engine, "peer", batch, 5.0) == 0
    assert engine.submitted == [
        (batch.dst[:2].tolist(), batch.src[:2].tolist(), [16, 16]),
        (batch.dst[2:].tolist(), batch.src[2:].tolist(), [16]),
    ]
    assert engine.asked == [1], "the others are asked about when the last is done"


def test_a_single_descriptor_needs_no_second_batch() -> None:
    engine = Scripted([1])
    assert read_batch(engine, "peer", descriptors(1), 5.0) == 0
    assert (len(engine.submitted), engine.asked) == (1, [])


@pytest.mark.parametrize("looks,rest", [([-1], 0), ([-2], 0), ([1], -1), ([-1], -1)])
def test_a_failure_of_either_part_is_one_of_the_whole(looks: list[int], rest: int) -> None:
    engine = Scripted(looks, rest=rest)
    assert read_batch(engine, "peer", descriptors(2), 5.0) == -1
    assert engine.asked == [1], "and the call ends only when nothing is under way that can be waited for"


@pytest.mark.parametrize("refuse,asked", [(1, []), (2, [1])])
def test_a_batch_that_is_not_taken_fails(refuse: int, asked: list[int]) -> None:
    engine = Scripted([1], refuse=refuse)
    assert read_batch(engine, "peer", descriptors(2), 5.0) == -1
    assert engine.asked == asked


def test_waiting_ends_with_the_timeout() -> None:
    engine = Scripted([], rest=-1)
    began = time.monotonic()
    assert read_batch(engine, "peer", descriptors(2), 0.05) == -1
    assert time.monotonic() - began >= 0.05
