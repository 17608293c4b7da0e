from __future__ import annotations

import threading
import time

import pytest

from mooncake_hetero_tp.errors import LocalUsageError
from mooncake_hetero_tp.io.pool import WorkerPool

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def test_jobs_run_side_by_side_up_to_the_size() -> None:
    pool = WorkerPool("mht-test", 3)
    meeting = threading.Barrier(3, timeout=5)

    def meet() -> None:
        meeting.wait()

    for _ in range(3):
        pool.submit(meet)
    pool.submit(lambda: None)
    assert pool.close(5)
    assert not meeting.broken


def test_a_job_that_raises_is_logged_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool("mht-test", 1)
    ran = threading.Event()

    def fail() -> None:
        raise ZeroDivisionError

    pool.submit(fail)
    pool.submit(ran.set)
    assert pool.close(5)
    assert ran.is_set()
    assert "ZeroDivisionError" in caplog.text


def test_the_end_runs_what_is_queued_or_drops_it() -> None:
    for drop_queued in (False, True):
        pool = WorkerPool("mht-test", 1)
        gate, ran = threading.Event(), threading.Event()
        pool.submit(lambda gate=gate: gate.wait(5))  # type: ignore[misc]
        pool.submit(ran.set)
        time.sleep(0.02)
        assert not pool.close(0.01, drop_queued=drop_queued)
        gate.set()
        assert pool.close(5)
        assert ran.is_set() is not drop_queued


def test_a_key_takes_only_its_share_of_the_threads() -> None:
    pool = WorkerPool("mht-test", 3, per_key=2)
    gate = threading.Event()
    ran: list[str] = []

    def stuck() -> None:
        gate.wait(30)
        ran.append("stuck")

    passed = threading.Event()
    for _ in range(5):
        pool.submit(stuck, key="stuck")
    pool.submit(lambda: ran.append("other"), key="other")
    pool.submit(passed.set)
    assert passed.wait(30)
    assert ran == ["other"]
    gate.set()
    assert pool.close(30)
    assert ran == ["other"] + ["stuck"] * 5
    assert not pool._running


def test_no_job_after_the_end_and_no_thread_without_a_job() -> None:
    pool = WorkerPool("mht-test", 4)
    assert pool.close(5)
    with pytest.raises(LocalUsageError, match="closed"):
        pool.submit(lambda: None)


def test_queued_jobs_of_a_busy_key_run_though_nobody_is_woken_for_them() -> None:
    pool = WorkerPool("mht-test", 8, per_key=2)
    ran = threading.Semaphore(0)
    for number in range(200):
        pool.submit(ran.release, key=number % 3)
    for _ in range(200):
        assert ran.acquire(timeout=30)
    assert pool.close(30)
