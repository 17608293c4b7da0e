"""producer_side: who is handed over, once, and who is told of an abort."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from vllm.v1.request import Request, RequestStatus

from mooncake_hetero_tp.types import EngineId
from mooncake_hetero_tp.vllm_adapter.metadata import StepMetadata
from mooncake_hetero_tp.vllm_adapter.params import PrefillOrder, parse
from mooncake_hetero_tp.vllm_adapter.producer_side import ProducerSide
from tests.unit.vllm_adapter.requests import PREFILL, finish, make_request

BLOCKS = [[3, 9, 4, 7, 11]]


def side(*, exact_end: bool = False) -> ProducerSide:
    return ProducerSide(EngineId("P"), "http://p0:8998", exact_end=exact_end)


def arrive(producer: ProducerSide, request: Request) -> None:
    order = parse(request.kv_transfer_params)
    assert isinstance(order, PrefillOrder)
    producer.arrived(request, order)


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED])
def test_length_and_stop_hand_over(status: RequestStatus) -> None:
    """EOS as the first token stops with a complete prompt (vllm#46008)."""
    producer, step, request = side(), StepMetadata(), make_request("r", 70, PREFILL)
    arrive(producer, request)
    kept, reply = producer.finished(finish(request, status), BLOCKS, step)
    assert kept
    assert reply == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "t1",
        "remote_engine_id": "P",
        "remote_bootstrap_addr": "http://p0:8998",
    }
    (fact,) = step.kept
    assert (fact.request_id, fact.transfer_id, fact.computed_tokens, fact.ready) == ("r", "t1", 70, True)
    assert [ids.tolist() for ids in fact.blocks] == BLOCKS
    assert fact.blocks[0].dtype == np.int32
    assert step.aborted == []


@pytest.mark.parametrize(
    "status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_ERROR, RequestStatus.FINISHED_IGNORED]
)
def test_everything_else_frees_and_tells_the_consumer(status: RequestStatus) -> None:
    """An abort that is not told to the other side multiplies an outage (sglang#28651)."""
    producer, step, request = side(), StepMetadata(), make_request("r", 70, PREFILL)
    arrive(producer, request)
    assert producer.finished(finish(request, status, computed=32), BLOCKS, step) == (False, None)
    assert (step.kept, step.aborted) == ([], [("t1", "r")])


def test_a_request_without_blocks_is_given_up() -> None:
    producer, step, request = side(), StepMetadata(), make_request("r", 70, PREFILL)
    arrive(producer, request)
    assert producer.finished(finish(request, RequestStatus.FINISHED_STOPPED), [[], []], step) == (False, None)
    assert step.aborted == [("t1", "r")]


def test_an_unknown_request_is_not_ours() -> None:
    step = StepMetadata()
    request = finish(make_request("r", 70), RequestStatus.FINISHED_STOPPED)
    assert side().finished(request, BLOCKS, step) == (False, None)
    assert step.is_empty


def test_computed_tokens_never_exceed_the_prompt() -> None:
    """Tokens in flight and answer tokens are nobody's to pull."""
    producer, step, request = side(), StepMetadata(), make_request("r", 70, PREFILL)
    arrive(producer, request)
    producer.finished(finish(request, RequestStatus.FINISHED_STOPPED, computed=73), BLOCKS, step)
    assert step.kept[0].computed_tokens == 70


def test_an_id_is_minted_where_none_came() -> None:
    producer, step = side(), StepMetadata()
    replies = []
    for request in (make_request("a", 70, {"do_remote_decode": True}), make_request("b", 70, {"do_remote_decode": 1})):
        arrive(producer, request)
        kept, reply = producer.finished(finish(request, RequestStatus.FINISHED_STOPPED), BLOCKS, step)
        assert kept
        assert reply is not None
        replies.append(reply["transfer_id"])
    assert replies == [fact.transfer_id for fact in step.kept]
    assert len(set(replies)) == 2


def test_children_of_one_request_hand_over_once() -> None:
    producer, step = side(), StepMetadata()
    children = [make_request(f"{index}_r", 70, PREFILL) for index in range(3)]
    for child in children:
        arrive(producer, child)
    answers = [producer.finished(finish(c, RequestStatus.FINISHED_LENGTH_CAPPED), BLOCKS, step) for c in children]
    assert [kept for kept, _ in answers] == [True, False, False]
    assert len({str(reply) for _, reply in answers}) == 1
    assert len(step.kept) == 1


def test_an_aborted_sibling_does_not_take_the_others_down() -> None:
    producer, step = side(), StepMetadata()
    first, second, third = (make_request(f"{index}_r", 70, PREFILL) for index in range(3))
    for child in (first, second, third):
        arrive(producer, child)
    producer.finished(finish(first, RequestStatus.FINISHED_ABORTED), BLOCKS, step)
    assert step.aborted == []
    assert producer.finished(finish(second, RequestStatus.FINISHED_STOPPED), BLOCKS, step)[0]
    producer.finished(finish(third, RequestStatus.FINISHED_ABORTED), BLOCKS, step)
    assert step.aborted == [], "the second child's blocks are handed over"


def test_when_all_siblings_abort_the_consumer_hears_it_once() -> None:
    producer, step = side(), StepMetadata()
    children = [make_request(f"{index}_r", 70, PREFILL) for index in range(2)]
    for child in children:
        arrive(producer, child)
    for child in children:
        producer.finished(finish(child, RequestStatus.FINISHED_ABORTED), BLOCKS, step)
    assert step.aborted == [("t1", "1_r")]


def test_another_prompt_under_a_live_id_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """vllm#51236: two live requests with one id overwrote each other."""
    producer, step = side(), StepMetadata()
    first, second = make_request("first", 70, PREFILL), make_request("second", 71, PREFILL)
    arrive(producer, first)
    with caplog.at_level(logging.ERROR):
        arrive(producer, second)
    assert "request second: transfer id t1 is in use by request first" in caplog.text
    assert producer.finished(finish(second, RequestStatus.FINISHED_STOPPED), BLOCKS, step) == (False, None)
    assert step.is_empty, "and no abort notice for the first one's id"
    assert producer.finished(finish(first, RequestStatus.FINISHED_STOPPED), BLOCKS, step)[0]


def test_a_stand_in_for_a_refused_request_tells_the_consumer_unless_another_has_its_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    producer, step = side(), StepMetadata()
    stand_in, request = make_request("stand-in", [0], PREFILL), make_request("r", 70, PREFILL)
    stand_in.abort_immediately = True
    arrive(producer, stand_in)
    producer.finished(finish(stand_in, RequestStatus.FINISHED_ABORTED), [[]], step)
    assert step.aborted == [("t1", "stand-in")]
    arrive(producer, request)
    with caplog.at_level(logging.WARNING):
        arrive(producer, stand_in)
    producer.finished(finish(stand_in, RequestStatus.FINISHED_ABORTED), [[]], step)
    assert caplog.text == ""
    assert len(step.aborted) == 1
    assert producer.finished(finish(request, RequestStatus.FINISHED_STOPPED), BLOCKS, step)[0]


def test_an_id_may_be_used_again_after_hand_off_or_abort() -> None:
    producer, step = side(), StepMetadata()
    for name, status in (("a", RequestStatus.FINISHED_ABORTED), ("b", RequestStatus.FINISHED_STOPPED)):
        request = make_request(name, 70, PREFILL)
        arrive(producer, request)
        producer.finished(finish(request, status), BLOCKS, step)
    producer.sent("b")
    last = make_request("c", 33, PREFILL)
    arrive(producer, last)
    assert producer.finished(finish(last, RequestStatus.FINISHED_STOPPED), BLOCKS, step)[0]
    producer.sent("c")
    producer.sent("never kept")
    assert [producer._holders, producer._kept, producer._running] == [{}, {}, {}]


def test_the_prompt_is_truncated_once_where_old_pages_are_dropped() -> None:
    """vllm#47466: state models start decoding from N-1 tokens; ten become nine, however often the hook runs."""
    producer, request = side(exact_end=True), make_request("r", 10, PREFILL)
    arrive(producer, request)
    arrive(producer, request)
    assert (request.num_prompt_tokens, request.max_tokens) == (9, 1)
    untouched = make_request("s", 10, PREFILL | {"transfer_id": "t2"})
    arrive(side(), untouched)
    assert (untouched.num_prompt_tokens, untouched.max_tokens) == (10, 5)


def test_truncated_siblings_are_still_siblings() -> None:
    """In one process the children share their parameters and their token list."""
    producer, step = side(exact_end=True), StepMetadata()
    params, prompt = dict(PREFILL), list(range(10))
    children = [make_request(f"{index}_r", prompt, params) for index in range(2)]
    for child in children:
        child.prompt_token_ids = prompt
        arrive(producer, child)
    assert [child.num_prompt_tokens for child in children] == [9, 9]
    answers = [producer.finished(finish(c, RequestStatus.FINISHED_STOPPED), BLOCKS, step)[0] for c in children]
    assert answers == [True, False]
    assert params == PREFILL, "the client's parameters are never written to"
