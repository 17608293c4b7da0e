"""Questions, stamps and repetitions of one pull."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_hetero_tp.core.asking import Asker, ConsumerConfig
from mooncake_hetero_tp.core.messages import Cancel, Claim, Pull, Renew
from mooncake_hetero_tp.core.pulls import PairPull
from mooncake_hetero_tp.core.timers import Timers
from tests.machines import sends
from tests.unit.core.test_pulls import request

CONFIG = ConsumerConfig(resend_s=0.5, resend_max_s=2.0, heartbeat_s=5.0, silence_s=3.0)


class Bench:
    def __init__(self) -> None:
        self.timers: Timers[Any] = Timers()
        self.out: list[Any] = []
        self.asker = Asker(CONFIG, self.timers, self.out)
        self.pull: PairPull = request().pulls[0]

    @property
    def sent(self) -> list[Any]:
        return sends(self.out)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_pull_names_transfer_request_and_ranges(bench: Bench) -> None:
    bench.asker.ask(bench.pull, 1.0)
    (message,) = bench.sent
    assert isinstance(message, Pull)
    assert (message.transfer_id, message.request_id, message.ranges) == ("xfer-1", "d-1", bench.pull.ranges)
    assert bench.timers.next_due() == 1.5


def test_unanswered_questions_end_in_silence_not_in_ever_longer_waits(bench: Bench) -> None:
    for now in (0.0, 0.5, 1.5):
        bench.asker.ask(bench.pull, now)
    assert bench.timers.next_due() == 3.0


def test_every_claim_and_renewal_has_its_own_nonce_and_send_time(bench: Bench) -> None:
    bench.asker.claim(bench.pull, 1.0)
    bench.asker.claim(bench.pull, 2.0)
    bench.pull.deadline = 9.0
    bench.asker.renew(bench.pull, 4.0)
    claim, again, renew = bench.sent
    assert [type(message) for message in bench.sent] == [Claim, Claim, Renew]
    assert bench.pull.questions == {claim.nonce: 1.0, again.nonce: 2.0, renew.nonce: 4.0}


def test_renewal_comes_back_at_the_end_of_the_lease_at_the_latest(bench: Bench) -> None:
    bench.pull.deadline = 4.2
    bench.asker.renew(bench.pull, 4.0)
    assert bench.timers.next_due() == 4.2


@pytest.mark.parametrize("now,due", [(10.5, 15.0), (16.0, 16.0)], ids=["half of the lease", "at once"])
def test_renewal_starts_at_half_of_the_lease(bench: Bench, now: float, due: float) -> None:
    bench.pull.lease_s = 10.0
    bench.asker.renew_later(bench.pull, 10.0, now)
    assert bench.timers.next_due() == due


def test_what_has_been_answered_is_asked_later(bench: Bench) -> None:
    bench.asker.ask(bench.pull, 0.0)
    bench.asker.ask_later(bench.pull, 5.0)
    assert bench.timers.next_due() == 5.0
    assert bench.pull.backoff.silent_for(4.0) == 0.0


def test_cancel_names_the_pull(bench: Bench) -> None:
    bench.asker.cancel(bench.pull)
    assert bench.sent == [Cancel(bench.pull.session, bench.pull.number)]
