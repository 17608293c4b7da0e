"""Which address a worker publishes, and why; nothing is chosen silently (vllm#42023, vllm#44919).

An explicit setting wins. Without one, the address that vLLM found is taken, and a warning says so
where it lies on an interface that peers rarely reach or where the machine has several to choose from.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_hetero_tp.errors import ConfigError

_SETTING = "VLLM_HOST_IP"
_VIRTUAL = ("docker", "br-", "veth", "virbr", "cni", "flannel", "cali", "podman", "lxc")
"""Prefixes of interfaces that exist on one machine only."""
_SIOCGIFADDR = 0x8915
"""linux/sockios.h: read the IPv4 address of an interface."""


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of this machine."""

    name: str
    host: str


@dataclass(frozen=True, slots=True)
class HostChoice:
    """The address to publish; `warning` is for the log where a person should know."""

    host: str
    warning: str | None = None


def choose_host(
    explicit: str | None, detected: str | None, interfaces: Sequence[Interface] | None = None
) -> HostChoice:
    """The address that peers shall use for this worker.

    Args:
        explicit: what the operator set (VLLM_HOST_IP); never questioned, only checked to be an address.
        detected: what vLLM's `get_ip` found.
        interfaces: this machine's addresses, for the warning; read from the kernel by default.

    Raises:
        ConfigError: no address at all, or one that no peer can connect to (0.0.0.0, ::).
    """
    if explicit:
        _refuse_wildcard(explicit, f"{_SETTING}={explicit}")
        return HostChoice(explicit)
    if not detected:
        raise ConfigError(f"no address of this machine was found; set {_SETTING} to the one that peers can reach")
    _refuse_wildcard(detected, f"the detected address {detected}")
    found = local_interfaces() if interfaces is None else interfaces
    return HostChoice(detected, _doubt(detected, found))


def local_interfaces() -> list[Interface]:
    """IPv4 addresses of this machine's interfaces; those that cannot be read are left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            host = _address_of(probe, name)
            if host is not None:
                found.append(Interface(name, host))
    return found


def _address_of(probe: socket.socket, name: str) -> str | None:
    import fcntl  # noqa: PLC0415 - absent outside Unix, where this module must still import

    try:
        reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(reply[20:24])


def _refuse_wildcard(host: str, what: str) -> None:
    parsed = _parse(host)
    if parsed is not None and parsed.is_unspecified:
        raise ConfigError(
            f"{what} is the wildcard address, which no peer can connect to; "
            f"set {_SETTING} to the address that peers can reach"
        )


def _doubt(host: str, interfaces: Sequence[Interface]) -> str | None:
    """Why a person might want another address; None: there is nothing to say."""
    remedy = f"set {_SETTING} to the address that peers can reach"
    parsed = _parse(host)
    others = sorted({f"{item.host} ({item.name})" for item in interfaces if _reachable(item, host)})
    choice = f"this machine also has {', '.join(others)}" if others else "this machine has no other address"
    if parsed is not None and parsed.is_link_local:
        return f"publishing the link-local address {host}; {choice}; {remedy}"
    name = next((item.name for item in interfaces if item.host == host), "")
    if name.startswith(_VIRTUAL):
        return f"publishing {host} of the virtual interface {name}; {choice}; {remedy}"
    if parsed is not None and parsed.is_loopback and others:
        return f"publishing the loopback address {host}, which reaches this machine only; {choice}; {remedy}"
    if others:
        return f"publishing {host}{f' ({name})' if name else ''}; {choice}; if peers cannot connect, {remedy}"
    return None


def _reachable(interface: Interface, chosen: str) -> bool:
    parsed = _parse(interface.host)
    if parsed is None or interface.host == chosen or interface.name.startswith(_VIRTUAL):
        return False
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_unspecified)


def _parse(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a host name, which is left to the resolver."""
    try:
        return ipaddress.ip_address(host.strip("[]").split("%")[0])
    except ValueError:
        return None


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
