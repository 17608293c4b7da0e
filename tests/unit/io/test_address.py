from __future__ import annotations

import pytest

from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.io.address import Interface, choose_host, join_host_port, local_interfaces

LO, ETH, IB = Interface("lo", "127.0.0.1"), Interface("eth0", "10.1.2.3"), Interface("ib0", "172.16.0.9")
DOCKER, LINK = Interface("docker0", "172.17.0.1"), Interface("eth1", "169.254.7.7")


def test_an_explicit_address_wins_without_a_word() -> None:
    choice = choose_host("192.0.2.1", "10.1.2.3", [LO, ETH, IB])
    assert (choice.host, choice.warning) == ("192.0.2.1", None)


def test_the_only_address_needs_no_warning() -> None:
    choice = choose_host(None, "10.1.2.3", [LO, ETH, DOCKER])
    assert (choice.host, choice.warning) == ("10.1.2.3", None)


def test_several_addresses_are_named() -> None:
    choice = choose_host("", "10.1.2.3", [LO, ETH, IB, DOCKER, LINK])
    assert choice.host == "10.1.2.3"
    assert choice.warning is not None
    assert "172.16.0.9 (ib0)" in choice.warning
    assert "docker0" not in choice.warning
    assert "169.254" not in choice.warning
    assert "VLLM_HOST_IP" in choice.warning


@pytest.mark.parametrize(
    "detected,word",
    [
        ("172.17.0.1", "virtual interface docker0"),
        ("169.254.7.7", "link-local"),
        ("fe80::1%eth0", "link-local"),
        ("127.0.0.1", "loopback"),
    ],
)
def test_an_address_peers_rarely_reach_is_never_published_silently(detected: str, word: str) -> None:
    warning = choose_host(None, detected, [LO, ETH, DOCKER, LINK]).warning
    assert warning is not None
    assert word in warning
    assert "10.1.2.3 (eth0)" in warning
    assert "VLLM_HOST_IP" in warning


@pytest.mark.parametrize("explicit,detected", [("0.0.0.0", None), (None, "0.0.0.0"), (None, "::"), (None, None)])
def test_no_usable_address_is_an_error(explicit: str | None, detected: str | None) -> None:
    with pytest.raises(ConfigError, match="VLLM_HOST_IP"):
        choose_host(explicit, detected, [])


def test_a_host_name_is_left_alone() -> None:
    assert choose_host(None, "prefill-0.cluster", []).warning is None


def test_this_machine_has_a_loopback_interface() -> None:
    assert "127.0.0.1" in [interface.host for interface in local_interfaces()]


@pytest.mark.parametrize("host,joined", [("10.0.0.1", "10.0.0.1:5"), ("::1", "[::1]:5"), ("[::1]", "[::1]:5")])
def test_ipv6_is_bracketed(host: str, joined: str) -> None:
    assert join_host_port(host, 5) == joined
