from __future__ import annotations

import threading
import time

import pytest

from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.credits import Cost, Credits


def always() -> bool:
    return True


def test_a_peer_never_holds_more_than_its_credits() -> None:
    credits_ = Credits(calls=3, descriptors=100, bytes_=1000)
    most = Cost(0, 0, 0)
    lock = threading.Lock()

    def use(cost: Cost) -> None:
        nonlocal most
        with credits_.hold("peer", cost, wanted=always) as held:
            assert held
            now = credits_.in_flight("peer")
            with lock:
                most = Cost(
                    max(most.descriptors, now.descriptors), max(most.bytes, now.bytes), max(most.calls, now.calls)
                )
            time.sleep(0.001)

    costs = [Cost(10 * (i % 7 + 1), 100 * (i % 5 + 1)) for i in range(40)]
    threads = [threading.Thread(target=use, args=(cost,)) for cost in costs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert 1 < most.calls <= 3
    assert most.descriptors <= 100
    assert most.bytes <= 1000
    assert credits_.in_flight("peer") == Cost(0, 0, 0)


def test_peers_do_not_wait_for_each_other() -> None:
    credits_ = Credits(1, 10, 10)
    with (
        credits_.hold("a", Cost(10, 10), wanted=always) as first,
        credits_.hold("b", Cost(10, 10), wanted=always) as second,
    ):
        assert first
        assert second


def test_credits_are_served_in_order_of_arrival() -> None:
    """A large batch that waits is not overtaken by small ones for ever."""
    credits_ = Credits(10, 10, 1000)
    order: list[str] = []

    def use(name: str, size: int) -> None:
        with credits_.hold("peer", Cost(size, 1), wanted=always):
            order.append(name)

    with credits_.hold("peer", Cost(5, 1), wanted=always):
        threads = []
        for queued, (name, size) in enumerate((("large", 10), ("small", 1)), start=1):
            threads.append(threading.Thread(target=use, args=(name, size)))
            threads[-1].start()
            while len(credits_._peers["peer"].waiting) < queued:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == ["large", "small"]


def test_waiting_ends_when_it_is_not_wanted_any_more() -> None:
    credits_ = Credits(1, 10, 10)
    with credits_.hold("peer", Cost(1, 1), wanted=always):
        with credits_.hold("peer", Cost(1, 1), wanted=lambda: False) as held:
            assert not held
        assert credits_.in_flight("peer").calls == 1
    with credits_.hold("peer", Cost(1, 1), wanted=always) as held:
        assert held


def test_credits_come_back_after_an_exception() -> None:
    credits_ = Credits(1, 10, 10)
    with pytest.raises(KeyError), credits_.hold("peer", Cost(1, 1), wanted=always):
        raise KeyError
    assert credits_.in_flight("peer") == Cost(0, 0, 0)


@pytest.mark.parametrize("cost", [Cost(11, 1), Cost(1, 11), Cost(1, 1, 2)])
def test_a_cost_that_can_never_be_met_is_refused(cost: Cost) -> None:
    with pytest.raises(LocalUsageError, match="smaller batches"), Credits(1, 10, 10).hold("peer", cost, wanted=always):
        pass


def test_empty_credits_are_refused() -> None:
    with pytest.raises(LocalUsageError, match="must be >= 1"):
        Credits(1, 0, 10)
