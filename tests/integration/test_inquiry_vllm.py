"""What vLLM's own Mooncake connector says to our hello: its real sender loop behind a real ROUTER."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest

from mooncake_hetero_tp.core.messages import Welcome
from mooncake_hetero_tp.io.inquiry import Fault, FaultKind, inquire
from mooncake_hetero_tp.types import Rank
from tests.live import Engine, tables, vllm_answer
from tests.tables import Dense

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def real_answer() -> Callable[[bytes], bytes]:
    """The answer of vLLM to a frame, from its own `_sender_worker`."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as own

    async def answer(frame: bytes) -> bytes:
        said: asyncio.Queue[tuple[bytes, bytes]] = asyncio.Queue()
        worker = SimpleNamespace(
            sender_worker_queue=asyncio.Queue(),
            _xfer_meta_decoder=msgspec.msgpack.Decoder(own.MooncakeXferMetadata),
            _encoder=msgspec.msgpack.Encoder(),
        )
        await worker.sender_worker_queue.put((b"peer", frame))
        task = asyncio.create_task(
            own.MooncakeConnectorWorker._sender_worker(worker, SimpleNamespace(send_multipart=said.put))
        )
        _, answered = await asyncio.wait_for(said.get(), 10.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return answered

    return lambda frame: asyncio.run(answer(frame))


def test_vllms_own_connector_is_recognised(real_answer: Callable[[bytes], bytes]) -> None:
    with Engine() as engine:
        engine.register(Rank(), engine.router(real_answer).address)
        engine.add(Rank(tp=1), tables(Dense(8, tp=2))[Rank(tp=1)])
        (report,) = inquire(engine.url, timeout_s=60.0)
    foreign, ours = (one.answer for one in report.ranks)
    assert isinstance(foreign, Fault)
    assert foreign.kind is FaultKind.FOREIGN
    assert isinstance(ours, Welcome)


def test_the_tests_double_of_it_says_the_same(real_answer: Callable[[bytes], bytes]) -> None:
    with Engine() as engine:
        router = engine.router(real_answer)
        engine.register(Rank(), router.address)
        inquire(engine.url, timeout_s=60.0)
        (hello,) = router.frames
    assert vllm_answer(hello) == real_answer(hello)
