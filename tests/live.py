"""Live producers for the probe: the real machine behind a real ROUTER, and everything else that may answer there."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import msgspec

from mooncake_hetero_tp.config import HostPort
from mooncake_hetero_tp.core.codec import decode_from_consumer, encode
from mooncake_hetero_tp.core.effects import Notice, Reply
from mooncake_hetero_tp.core.messages import Offer
from mooncake_hetero_tp.core.producer import ProducerConfig, ProducerMachine
from mooncake_hetero_tp.core.regions import RankTable
from mooncake_hetero_tp.core.shelf import Ring
from mooncake_hetero_tp.io.bootstrap import BootstrapServer, Registration
from mooncake_hetero_tp.io.bootstrap_client import register
from mooncake_hetero_tp.io.control import ControlChannel, FromConsumer
from mooncake_hetero_tp.types import EngineId, Identity, Incarnation, Rank
from tests.tables import Dense

HOST = "127.0.0.1"
ENGINE = EngineId("prefill")
Answer = Callable[[bytes], bytes | None]


def tables(like: Dense, *, dtype: str = "bfloat16") -> dict[Rank, RankTable]:
    """Tables of all tensor ranks, with the model's fields as vLLM's adapter fills them in."""
    model = {"architecture": "Tiny", "layers": str(like.layers), "kv_heads": str(like.heads), "kv_cache_dtype": dtype}
    made = {}
    for tp in range(like.tp):
        table = Dense(**{**vars(like), "rank": tp}).table()
        regions = (msgspec.structs.replace(region, dtype=dtype) for region in table.regions)
        made[Rank(tp=tp)] = msgspec.structs.replace(table, model=model, layout=like.layout, regions=tuple(regions))
    return made


def identity(rank: Rank, engine_id: EngineId = ENGINE) -> Identity:
    return Identity(engine_id, Incarnation(f"{rank.dp:04x}{rank.pp:04x}{rank.tp:08x}"), rank)


class Router:
    """A ROUTER that says what `answer` returns for each frame, or nothing."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._channel = ControlChannel(HOST)
        assert self._channel.address is not None
        self.address = self._channel.address
        self.frames: list[bytes] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="test-router", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ended.is_set():
            for message in self._channel.poll(5.0).from_consumers:
                self._reply(message)

    def _reply(self, message: FromConsumer) -> None:
        self.frames.append(message.frame)
        said = self._answer(message.frame)
        if said is not None:
            self._channel.reply(message.peer, said)

    def close(self) -> None:
        self._ended.set()
        self._channel.wake()
        self._thread.join(5.0)
        assert not self._thread.is_alive()
        self._channel.close()


class Producer:
    """One rank: the real machine. `log` is what it would write."""

    def __init__(self, identity: Identity, table: RankTable) -> None:
        self.identity = identity
        self.table = table
        config = ProducerConfig(keep_s=100.0, lease_s=10.0)
        ring = Ring(Offer(slot_bytes=4096, slots=4), lambda slot: 4096 * (1 + slot))
        self.machine = ProducerMachine(
            identity, table, f"{HOST}:7000", config, draw=iter(range(1, 1000)).__next__, ring=ring
        )
        self.log: list[str] = []

    def answer(self, frame: bytes) -> bytes | None:
        said = None
        for effect in self.machine.receive(b"peer", decode_from_consumer(frame), time.monotonic()):
            if isinstance(effect, Reply):
                said = encode(effect.message)
            elif isinstance(effect, Notice):
                self.log.append(effect.text)
        return said


class Engine:
    """A bootstrap server and whatever registers there; ends with everything that it opened."""

    def __init__(self) -> None:
        self._opened = ExitStack()
        self.server = BootstrapServer(HostPort(HOST, 0))
        self.server.start()
        self._opened.callback(self.server.close)
        self.url = f"http://{self.server.address}"
        self.producers: dict[Rank, Producer] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._opened.close()

    @classmethod
    def of(cls, held: Mapping[Rank, RankTable], ranks: Sequence[Rank] | None = None) -> Self:
        """A producer of which `ranks` (all by default) are up."""
        engine = cls()
        for rank in held if ranks is None else ranks:
            engine.add(rank, held[rank])
        return engine

    def add(self, rank: Rank, table: RankTable, engine_id: EngineId = ENGINE) -> Producer:
        """A live rank."""
        producer = self.producers[rank] = Producer(identity(rank, engine_id), table)
        self.register(rank, self.router(producer.answer).address, producer.identity.incarnation, engine_id)
        return producer

    def router(self, answer: Answer) -> Router:
        router = Router(answer)
        self._opened.callback(router.close)
        return router

    def register(self, rank: Rank, address: str, incarnation: str | None = None, engine_id: EngineId = ENGINE) -> None:
        known = None if incarnation is None else Incarnation(incarnation)
        worker = Registration(engine_id, rank.dp, rank.tp, rank.pp, address, known)
        register(self.server.address, worker, timeout_s=5.0)

    def silent_address(self) -> str:
        """Takes connections, and never says a word."""
        listener = self._opened.enter_context(socket.create_server((HOST, 0)))
        return f"tcp://{HOST}:{listener.getsockname()[1]}"


def dead_address() -> str:
    """Nothing listens there."""
    with socket.create_server((HOST, 0)) as listener:
        return f"tcp://{HOST}:{listener.getsockname()[1]}"


class VllmRequest(msgspec.Struct):
    """The fields that vLLM's `MooncakeXferMetadata` cannot do without."""

    remote_hostname: str
    remote_port: int
    remote_tp_size: int
    remote_tp_rank: int
    req_blocks: dict[str, tuple[str, list[list[int]]]]
    kv_caches_base_addr: list[int]
    block_lens: list[int]
    kv_block_lens: list[int]


class VllmResponse(msgspec.Struct, omit_defaults=True):
    """vLLM's `MooncakeXferResponse`."""

    status: int
    ok_reqs: list[str] | None = None
    err_reqs: list[str] | None = None
    err_msg: str | None = None


def vllm_answer(frame: bytes) -> bytes:
    """What vLLM's own connector says to a request that it cannot read (`_sender_worker`)."""
    try:
        msgspec.msgpack.decode(frame, type=VllmRequest)
    except msgspec.DecodeError as error:
        return msgspec.msgpack.encode(VllmResponse(status=2, err_msg=str(error)))
    raise AssertionError("a hello is no request of vLLM's")
