"""consumer_side: the token rule, single use, and exactly one Release per transfer."""

from __future__ import annotations

import logging

import pytest
from vllm.v1.request import Request, RequestStatus

from mooncake_hetero_tp.types import TokenRange
from mooncake_hetero_tp.vllm_adapter import consumer_side
from mooncake_hetero_tp.vllm_adapter.consumer_side import ConsumerSide
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata
from mooncake_hetero_tp.vllm_adapter.params import RemotePrefill, parse
from tests.unit.vllm_adapter.requests import DECODE, Blocks, NotedReleases, finish, make_request

RELEASE = ("t1", "P", "http://p0:8998")


class Bench:
    """A consumer side with one group of 64-token blocks, and all that it says."""

    def __init__(self) -> None:
        self.releases = NotedReleases()
        self.step = StepMetadata()
        self.side = ConsumerSide(lambda start, end: (TokenRange(start, end),), lambda ids: ids, self.releases)

    def arrive(self, request: Request) -> Request:
        order = parse(request.kv_transfer_params)
        assert isinstance(order, RemotePrefill)
        self.side.arrived(request, order)
        return request

    def start(self, request: Request, local: int = 0) -> int:
        """What vLLM's scheduler does on admission; returns the external tokens."""
        count = self.side.matched_tokens(request, local)
        self.side.allocated(request, Blocks([5, 2]), count, self.step)
        return count

    def abort(self, request: Request) -> None:
        self.side.finished(finish(request, RequestStatus.FINISHED_ABORTED), self.step)

    @property
    def quiet(self) -> bool:
        return not (self.side._loads or self.side._users)


def test_a_load_leaves_the_last_token_to_run_here() -> None:
    bench = Bench()
    request = bench.arrive(make_request("r", 70, DECODE))
    assert bench.start(request) == 69
    (pull,) = bench.step.pulls
    assert (pull.request_id, pull.transfer_id, pull.engine_id, pull.bootstrap) == ("r", *RELEASE)
    assert pull.ranges == (TokenRange(0, 69),)
    assert pull.blocks[0].tolist() == [5, 2]
    assert bench.releases.sent == [], "not before all ranks have reported"
    bench.side.loaded("r", bench.step)
    assert bench.releases.sent == [RELEASE]
    bench.abort(request)
    assert bench.releases.sent == [RELEASE]
    assert bench.quiet


def test_asking_is_free_of_side_effects() -> None:
    bench = Bench()
    request = bench.arrive(make_request("r", 70, DECODE))
    assert [bench.side.matched_tokens(request, local) for local in (0, 64, 0)] == [69, 5, 69]
    assert bench.step.is_empty


def test_a_prefix_hit_is_skipped() -> None:
    bench = Bench()
    assert bench.start(bench.arrive(make_request("r", 70, DECODE)), local=64) == 5
    assert bench.step.pulls[0].ranges == (TokenRange(64, 69),)


def test_vllm_may_allocate_in_a_later_step() -> None:
    """In 0.33 the scheduler defers `update_state_after_alloc` of async loads."""
    bench = Bench()
    request = bench.arrive(make_request("r", 70, DECODE))
    count = bench.side.matched_tokens(request, 64)
    request.num_computed_tokens = 69
    bench.step = StepMetadata()
    bench.side.allocated(request, Blocks([5, 2]), count, bench.step)
    assert bench.step.pulls[0].ranges == (TokenRange(64, 69),)


@pytest.mark.parametrize("tokens,local", [(1, 0), (65, 64), (64, 64)])
def test_nothing_to_load_releases_at_once(tokens: int, local: int) -> None:
    """One-token prompts and full local hits; vllm#50425 held the producer's blocks for 480 s."""
    bench = Bench()
    request = bench.arrive(make_request("r", tokens, DECODE))
    assert bench.start(request, local) == 0
    assert bench.releases.sent == [RELEASE]
    assert bench.step.is_empty
    bench.abort(request)
    assert bench.quiet


def test_the_second_call_after_a_load_changes_nothing() -> None:
    bench = Bench()
    request = bench.arrive(make_request("r", 70, DECODE))
    bench.start(request)
    bench.side.loaded("r", bench.step)
    bench.side.allocated(request, Blocks([5, 2, 8]), 0, bench.step)
    assert bench.releases.sent == [RELEASE]
    assert len(bench.step.pulls) == 1


def test_a_remote_load_is_single_use() -> None:
    """Preempted, or failed under `recompute`: local answers only (vllm#53250)."""
    bench = Bench()
    request = bench.arrive(make_request("r", 70, DECODE))
    bench.start(request)
    bench.side.loaded("r", bench.step)
    bench.arrive(request)
    assert bench.side.matched_tokens(request, 0) == 0
    bench.side.allocated(request, Blocks([1, 2]), 0, bench.step)
    assert bench.releases.sent == [RELEASE]


def test_abort_before_scheduling_releases() -> None:
    bench = Bench()
    bench.abort(bench.arrive(make_request("r", 70, DECODE)))
    assert bench.releases.sent == [RELEASE]
    assert bench.step.is_empty
    assert bench.quiet


def test_abort_while_loading_frees_the_producer_and_waits_for_the_workers() -> None:
    """Nothing that arrives counts any more, but our pages stay until every rank has reported (sglang#24527)."""
    bench = Bench()
    request = bench.arrive(make_request("r", 70, DECODE))
    bench.start(request)
    bench.step = StepMetadata()
    bench.abort(request)
    assert bench.step.cancelled == ["r"]
    assert bench.releases.sent == [RELEASE]
    assert not bench.quiet
    bench.step = StepMetadata()
    bench.side.loaded("r", bench.step)
    assert bench.releases.sent == [RELEASE]
    assert bench.quiet


def test_a_failed_load_is_not_cancelled_afterwards() -> None:
    """Under `fail` vLLM finishes the request first and reports the load in the same step."""
    bench = Bench()
    request = bench.arrive(make_request("r", 70, DECODE))
    bench.start(request)
    bench.side.finished(finish(request, RequestStatus.FINISHED_ERROR), bench.step)
    bench.side.loaded("r", bench.step)
    assert bench.step.cancelled == []
    assert bench.releases.sent == [RELEASE]
    assert bench.quiet


def test_children_release_after_the_last_of_them() -> None:
    bench = Bench()
    children = [bench.arrive(make_request(f"{index}_r", 70, DECODE)) for index in range(3)]
    for child in children[:2]:
        bench.start(child)
    bench.side.loaded("0_r", bench.step)
    bench.side.loaded("1_r", bench.step)
    assert bench.releases.sent == []
    bench.abort(children[2])
    assert bench.releases.sent == [RELEASE]
    assert [pull.request_id for pull in bench.step.pulls] == ["0_r", "1_r"]


def test_a_child_that_is_aborted_while_loading_leaves_the_blocks_to_the_others() -> None:
    bench = Bench()
    children = [bench.arrive(make_request(f"{index}_r", 70, DECODE)) for index in range(2)]
    for child in children:
        bench.start(child)
    bench.abort(children[0])
    assert bench.releases.sent == []
    bench.side.loaded("1_r", bench.step)
    assert bench.releases.sent == [RELEASE]
    bench.side.loaded("0_r", bench.step)
    assert bench.releases.sent == [RELEASE]


def test_a_child_that_comes_after_the_release_computes_here(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.start(bench.arrive(make_request("0_r", 70, DECODE)))
    bench.side.loaded("0_r", bench.step)
    with caplog.at_level(logging.INFO):
        late = bench.arrive(make_request("1_r", 70, DECODE))
    assert "1_r" in caplog.text
    assert bench.start(late) == 0
    assert bench.releases.sent == [RELEASE, RELEASE], "idempotent; the producer may have been asked again"


def test_another_prompt_under_a_live_id_computes_here(caplog: pytest.LogCaptureFixture) -> None:
    """It would otherwise answer from the first one's KV, with HTTP 200 (vllm#52234)."""
    bench = Bench()
    first = bench.arrive(make_request("first", 70, DECODE))
    with caplog.at_level(logging.ERROR):
        second = bench.arrive(make_request("second", 71, DECODE))
    assert "request second: transfer id t1 is in use by request first" in caplog.text
    assert bench.start(second) == 0
    bench.abort(second)
    assert bench.releases.sent == []
    assert bench.start(first) == 69


def test_a_stand_in_for_a_refused_request_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The API server sends one when a request fails, too: its transfer may be in use or released by then."""
    bench = Bench()
    first = bench.arrive(make_request("first", 70, DECODE))
    stand_in = make_request("stand-in", [0], DECODE)
    stand_in.abort_immediately = True
    with caplog.at_level(logging.WARNING):
        bench.abort(bench.arrive(stand_in))
    assert caplog.text == ""
    assert bench.releases.sent == []
    bench.abort(first)
    assert bench.releases.sent == [RELEASE]
    alone = make_request("alone", [0], DECODE | {"transfer_id": "t2"})
    alone.abort_immediately = True
    bench.abort(bench.arrive(alone))
    assert [sent[0] for sent in bench.releases.sent] == ["t1", "t2"]
    assert bench.quiet


def test_a_storm_of_aborts_leaves_nothing_behind() -> None:
    bench = Bench()
    for index in range(200):
        bench.abort(bench.arrive(make_request(f"r{index}", 70, DECODE | {"transfer_id": f"t{index}"})))
    assert len(bench.releases.sent) == 200
    assert bench.quiet


def test_memory_of_released_transfers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer_side, "MAX_RELEASED", 3)
    bench = Bench()
    for index in range(5):
        bench.abort(bench.arrive(make_request(f"r{index}", 70, DECODE | {"transfer_id": f"t{index}"})))
    assert list(bench.side._released) == ["t2", "t3", "t4"]


def test_reports_of_unknown_requests_are_ignored() -> None:
    bench = Bench()
    bench.side.loaded("nobody", bench.step)
    bench.side.finished(finish(make_request("r", 5), RequestStatus.FINISHED_STOPPED), bench.step)
    assert bench.releases.sent == []
