from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.errors import ConfigError, LocalUsageError, MissingLibraryError, TransferError
from mooncake_hetero_tp.io.engine import (
    TIMEOUT_SETTING,
    Deadline,
    MooncakeEngine,
    TransferEngine,
    explain_import_error,
    load_mooncake,
    set_transfer_timeout,
)
from tests.unit.io.foreign import FakeForeign, descriptors

pytestmark = pytest.mark.usefixtures("quick_burial", "clean_setting")


@pytest.fixture
def clean_setting() -> Iterator[None]:
    before = os.environ.pop(TIMEOUT_SETTING, None)
    yield
    os.environ.pop(TIMEOUT_SETTING, None)
    if before is not None:
        os.environ[TIMEOUT_SETTING] = before


def engine(made: list[FakeForeign], **options: Any) -> MooncakeEngine:
    def make() -> FakeForeign:
        made.append(FakeForeign(fail_registration_of=options.get("fail_registration_of")))
        return made[-1]

    roles = {key: value for key, value in options.items() if key in {"serves", "reads", "protocol"}}
    return MooncakeEngine("127.0.0.1", lease_s=30, make_foreign=make, **roles)


# --- the engine ----------------------------------------------------------------------------------


def test_it_is_a_transfer_engine() -> None:
    made: list[FakeForeign] = []
    one: TransferEngine = engine(made, protocol="tcp")
    one.register([Buffer(0x1000, 64)])
    assert one.read("peer", descriptors(3), deadline=Deadline(float("inf"))).descriptors == 3
    one.close()


def test_peers_read_from_an_engine_that_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mooncake_hetero_tp.io.sessions.handshake_answers", lambda *_: True)
    made: list[FakeForeign] = []
    both = engine(made, protocol="tcp")
    both.register([Buffer(0x1000, 64), Buffer(0x1020, 64)])
    served = both.transport_session
    assert [foreign.registered for foreign in made] == [[0x1000], [0x1000]]
    made[1].codes = [-1, -1]
    both.read("peer", descriptors(3), deadline=Deadline(float("inf")))
    assert both.transport_session == served
    assert made[0].reads == []
    both.close()
    assert all(foreign.unregistered == foreign.registered for foreign in made)


@pytest.mark.parametrize("protocol,peers,engines", [("tcp", 3, 3), ("rdma", 3, 1)])
def test_over_rdma_all_peers_share_one_registration(protocol: str, peers: int, engines: int) -> None:
    made: list[FakeForeign] = []
    reader = engine(made, protocol=protocol, serves=False)
    reader.register([Buffer(0x1000, 64)])
    for peer in range(peers):
        reader.read(f"peer-{peer}", descriptors(1), deadline=Deadline(float("inf")))
    assert len(made) == engines
    reader.close()


def test_closing_twice_or_before_the_start_is_legal() -> None:
    made: list[FakeForeign] = []
    one = engine(made)
    one.close()
    one.close()
    assert made == []


def test_a_registration_that_fails_leaves_nothing_registered() -> None:
    made: list[FakeForeign] = []
    one = engine(made, fail_registration_of=1)
    with pytest.raises(TransferError, match="buffer 2 of 2"):
        one.register([Buffer(0x1000, 64), Buffer(0x2000, 64)])
    assert [foreign.unregistered for foreign in made] == [[0x1000]]


def test_misuse_is_named() -> None:
    made: list[FakeForeign] = []
    serving = engine(made, reads=False)
    with pytest.raises(LocalUsageError, match="after `register`"):
        _ = serving.transport_session
    serving.register([Buffer(0x1000, 64)])
    with pytest.raises(LocalUsageError, match="called twice"):
        serving.register([Buffer(0x1000, 64)])
    with pytest.raises(LocalUsageError, match="only serves"):
        serving.read("peer", descriptors(1), deadline=Deadline(float("inf")))
    serving.close()


def test_a_read_after_the_end_fails() -> None:
    made: list[FakeForeign] = []
    reader = engine(made, serves=False)
    reader.register([Buffer(0x1000, 64)])
    reader.close()
    with pytest.raises(TransferError, match="closed"):
        reader.read("peer", descriptors(1), deadline=Deadline(float("inf")))


# --- loading Mooncake ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words,missing,remedy",
    [
        ("libcudart.so.12: cannot open shared object file: No such file or directory", "libcudart.so.12", "[cuda13]"),
        ("libibverbs.so.1: cannot open shared object file", "libibverbs.so.1", "apt-get install libibverbs1"),
        ("No module named 'mooncake'", "mooncake", "Install exactly one build"),
    ],
)
def test_the_loaders_own_words_come_through(
    monkeypatch: pytest.MonkeyPatch, words: str, missing: str, remedy: str
) -> None:
    """Mooncake#1298, vllm#42511: "please install mooncake" where it was installed all along."""

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.partition(".")[0] == "mooncake":
                raise ImportError(words)

    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    with pytest.raises(MissingLibraryError) as caught:
        MooncakeEngine("127.0.0.1", lease_s=30)
    text = str(caught.value)
    assert words in text
    assert f"Missing: {missing}." in text
    assert remedy in text
    assert isinstance(caught.value.__cause__, ImportError)


def test_what_is_installed_is_named() -> None:
    text = explain_import_error(ImportError("libcudart.so.13: no"), ["mooncake-transfer-engine-cuda13 0.3.13"])
    assert "Installed: mooncake-transfer-engine-cuda13 0.3.13." in text
    assert "no build of Mooncake" in explain_import_error(ImportError("x"), [])


def test_an_engine_that_does_not_start_names_host_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Dead:
        def initialize(self, *_: object) -> int:
            return -1

    module = ModuleType("mooncake.engine")
    module.TransferEngine = Dead  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mooncake", ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.engine", module)
    assert load_mooncake() is Dead
    one = MooncakeEngine("192.0.2.7", lease_s=30, protocol="rdma", device_name="mlx5_9")
    with pytest.raises(ConfigError, match=r"returned -1 for address '192\.0\.2\.7'.*'rdma'.*'mlx5_9'.*VLLM_HOST_IP"):
        one.register([Buffer(0x1000, 64)])


# --- the transport's timeout ---------------------------------------------------------------------


@pytest.mark.parametrize("lease_s,expected", [(30.0, 20), (12.0, 8), (7.0, 5)])
def test_the_timeout_is_set_below_the_lease(lease_s: float, expected: int) -> None:
    assert set_transfer_timeout(lease_s) == expected < lease_s
    assert os.environ[TIMEOUT_SETTING] == str(expected)


def test_a_lease_below_mooncakes_shortest_timeout_is_said(caplog: pytest.LogCaptureFixture) -> None:
    assert set_transfer_timeout(3.0) == 5
    assert "shorter than Mooncake's shortest timeout" in caplog.text


def test_another_engine_with_another_lease_may_set_it_again() -> None:
    assert [set_transfer_timeout(lease_s) for lease_s in (30.0, 9.0, 60.0)] == [20, 6, 40]


def test_an_operators_timeout_stands_if_it_fits() -> None:
    os.environ[TIMEOUT_SETTING] = "12"
    assert set_transfer_timeout(30.0) == 12
    os.environ[TIMEOUT_SETTING] = "2"
    assert set_transfer_timeout(30.0) == 5


@pytest.mark.parametrize("given", ["30", "31", "soon", "-1", ""])
def test_an_operators_timeout_that_does_not_fit_is_an_error(given: str) -> None:
    os.environ[TIMEOUT_SETTING] = given
    with pytest.raises(ConfigError, match=rf"{TIMEOUT_SETTING}=.*lease of 30 s"):
        MooncakeEngine("127.0.0.1", lease_s=30, make_foreign=FakeForeign)
