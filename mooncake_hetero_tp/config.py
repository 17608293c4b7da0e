"""`kv_connector_extra_config` and three environment variables -> one frozen, validated record.

vLLM's setting names keep their meaning, so changing the connector's name is the whole migration.
This module does not import vLLM: `vllm_adapter/environment.py` reads the variables.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mooncake_hetero_tp.errors import ConfigError
from mooncake_hetero_tp.types import Encoding

MAX_DECLARED = 16
"""Backends whose encoding an engine may declare; its peers are told all of them."""
_WHERE = "kv_transfer_config.kv_connector_extra_config"


class HostPort(NamedTuple):
    """An address an operator wrote as `host:port` or `[ipv6]:port`."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The environment variables of vLLM's own Mooncake connector, in seconds and with its defaults."""

    keep_s: float = 480.0
    """VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT: how long a producer keeps blocks that nobody claims."""
    connector_timeout_s: float = 30.0
    """VLLM_MOONCAKE_CONNECTOR_TIMEOUT: bound of one bootstrap request."""
    bootstrap_port: int = 8998
    """VLLM_MOONCAKE_BOOTSTRAP_PORT."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """One key of `kv_connector_extra_config`: its type, range and meaning."""

    name: str
    kind: type
    default: object
    meaning: str
    low: float = -math.inf
    high: float = math.inf
    choices: tuple[str, ...] = ()

    @property
    def wanted(self) -> str:
        """What a legal value looks like, for an error message."""
        if self.choices:
            return " or ".join(repr(choice) for choice in self.choices)
        words = {str: "a string", int: "an integer", float: "a number", dict: "a mapping"}[self.kind]
        if math.isinf(self.low) and math.isinf(self.high):
            return words
        return f"{words} from {self.low:.10g} to {self.high:.10g}"  # not 1.04858e+06


SETTINGS: tuple[_Setting, ...] = (
    _Setting(name="mooncake_protocol", kind=str, default="rdma", meaning="Mooncake transport, e.g. rdma or tcp"),
    _Setting(
        name="device_name", kind=str, default="", meaning="RDMA devices for Mooncake, comma separated; empty: all"
    ),
    _Setting(
        name="num_workers", kind=int, default=10, low=1, high=256, meaning="threads that run transfers in a worker"
    ),
    _Setting(
        name="bootstrap_server_address",
        kind=str,
        default=None,
        meaning="host:port of an external bootstrap server; absent: the producer starts its own",
    ),
    _Setting(
        name="lease_s",
        kind=float,
        default=30.0,
        low=6,
        high=3600,
        meaning="seconds for which a consumer may read granted blocks before it must renew",
    ),
    _Setting(
        name="load_deadline_s",
        kind=float,
        default=None,
        low=1,
        high=86400,
        meaning="seconds after which a consumer gives a load up; absent: 7/8 of the producer's keep time",
    ),
    _Setting(
        name="transfer_mode",
        kind=str,
        default="auto",
        choices=("auto", "direct", "staged"),
        meaning="read pages directly, or through packed staging slots, or whichever is measured to be faster",
    ),
    _Setting(
        name="staging_mib",
        kind=int,
        default=64,
        low=0,
        high=1 << 20,
        meaning="MiB of staging memory in each worker and role; 0: none, every read is direct",
    ),
    _Setting(
        name="staging_slot_mib",
        kind=int,
        default=16,
        low=1,
        high=1 << 20,
        meaning="MiB of one staging slot, the largest piece that is packed and read at once",
    ),
    _Setting(
        name="staging_max_sms",
        kind=int,
        default=16,
        low=0,
        high=1024,
        meaning="GPU multiprocessors that one packing or unpacking kernel may occupy; 0: all",
    ),
    _Setting(
        name="backend_encodings",
        kind=dict,
        default={},
        meaning="page formats of attention backends that this package does not know, by the backends' names",
    ),
)
"""Every setting that exists; anything else is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeteroTPConfig:
    """All settings of one engine, validated; see `SETTINGS` for their meaning."""

    mooncake_protocol: str
    device_name: str
    num_workers: int
    bootstrap_server_address: HostPort | None
    lease_s: float
    load_deadline_s: float
    transfer_mode: str
    staging_mib: int
    staging_slot_mib: int
    staging_max_sms: int
    backend_encodings: Mapping[str, Encoding]
    environment: Environment

    @classmethod
    def from_extra_config(
        cls, extra: Mapping[str, object] | None, environment: Environment | None = None
    ) -> HeteroTPConfig:
        """Validate what the operator wrote.

        Raises:
            ConfigError: an unknown key, a value of the wrong type or out of range; names the key,
                what was expected, what was seen and what to do.
        """
        given = {key: value for key, value in (extra or {}).items() if value is not None}
        _refuse_unknown(given)
        environment = environment or Environment()
        _check_environment(environment)
        values = {setting.name: _checked(setting, given) for setting in SETTINGS}
        values["bootstrap_server_address"] = _address(values["bootstrap_server_address"])
        values["backend_encodings"] = _encodings(values["backend_encodings"])
        values["load_deadline_s"] = _deadline(values["load_deadline_s"], environment)
        return _build(values, environment)


def _build(values: Mapping[str, object], environment: Environment) -> HeteroTPConfig:
    names = {field.name for field in dataclasses.fields(HeteroTPConfig)} - {"environment"}
    chosen: dict[str, object] = {name: values[name] for name in names}
    config = HeteroTPConfig(**chosen, environment=environment)  # type: ignore[arg-type]
    _check_protocol(config.mooncake_protocol)
    _check_staging(config)
    return config


def _refuse_unknown(given: Mapping[str, object]) -> None:
    known = [setting.name for setting in SETTINGS]
    unknown = [key for key in given if key not in known]
    if not unknown:
        return
    near = difflib.get_close_matches(str(unknown[0]), known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(
        f"{_WHERE}: unknown setting {', '.join(repr(key) for key in unknown)}; "
        f"known settings: {', '.join(known)}.{hint} Remove or rename it."
    )


def _checked(setting: _Setting, given: Mapping[str, object]) -> object:
    if setting.name not in given:
        return setting.default
    value = given[setting.name]
    wrong = isinstance(value, bool) or not isinstance(value, _accepted(setting.kind))
    wrong = wrong or (isinstance(value, int | float) and not setting.low <= value <= setting.high)
    if wrong or (setting.choices and value not in setting.choices):
        raise ConfigError(
            f"{_WHERE}.{setting.name}: expected {setting.wanted}, got {value!r} "
            f"({type(value).__name__}); {setting.meaning}. "
            f"Correct the value or remove it for the default, {setting.default!r}."
        )
    return float(value) if setting.kind is float and isinstance(value, int | float) else value


def _accepted(kind: type) -> tuple[type, ...]:
    return (int, float) if kind is float else (kind,)


def _check_protocol(protocol: str) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", protocol):
        raise ConfigError(
            f"{_WHERE}.mooncake_protocol: expected the lower-case name of a Mooncake transport such as "
            f"'rdma' or 'tcp', got {protocol!r}. Correct the value or remove it for the default, 'rdma'."
        )


def _check_staging(config: HeteroTPConfig) -> None:
    if config.transfer_mode == "staged" and not config.staging_mib:
        raise ConfigError(
            f"{_WHERE}: transfer_mode 'staged' needs staging memory, but staging_mib is 0. "
            "Give some, or choose transfer_mode 'direct'."
        )
    if config.staging_mib and config.staging_slot_mib > config.staging_mib:
        raise ConfigError(
            f"{_WHERE}.staging_slot_mib: expected at most staging_mib, {config.staging_mib}, got "
            f"{config.staging_slot_mib}. Lower the one or raise the other."
        )


def _check_environment(environment: Environment) -> None:
    rows = (
        ("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT", environment.keep_s, 1, 86400),
        ("VLLM_MOONCAKE_CONNECTOR_TIMEOUT", environment.connector_timeout_s, 0.1, 86400),
        ("VLLM_MOONCAKE_BOOTSTRAP_PORT", environment.bootstrap_port, 1, 65535),
    )
    for name, value, low, high in rows:
        if not low <= value <= high:
            raise ConfigError(f"{name}: expected {low} to {high}, got {value!r}. Correct or unset the variable.")


def _deadline(value: object, environment: Environment) -> float:
    keep_s = environment.keep_s
    deadline_s = keep_s * 7 / 8 if value is None else float(str(value))
    if deadline_s >= keep_s:
        raise ConfigError(
            f"{_WHERE}.load_deadline_s: expected less than the producer's keep time, {keep_s:g} s "
            f"(VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT), got {deadline_s:g} s: a consumer must give up before "
            "the producer frees the blocks. Lower the one or raise the other on both sides."
        )
    return deadline_s


def _encodings(value: object) -> Mapping[str, Encoding]:
    given = value if isinstance(value, Mapping) else {}
    if len(given) > MAX_DECLARED:
        raise ConfigError(
            f"{_WHERE}.backend_encodings: expected at most {MAX_DECLARED} backends, got {len(given)}. "
            "Name only those that this engine or its peers use."
        )
    return {_backend_name(backend): _encoding(backend, name) for backend, name in given.items()}


def _backend_name(backend: object) -> str:
    if not isinstance(backend, str) or not re.fullmatch(r"[!-~]{1,128}", backend):
        raise ConfigError(
            f"{_WHERE}.backend_encodings: expected an attention backend's name (its get_name()), got {backend!r}. "
            "vLLM logs the name, and so does a refused handshake, as opaque:<name>."
        )
    return backend


def _encoding(backend: object, name: object) -> Encoding:
    known = [encoding.value for encoding in Encoding]
    if name not in known:
        raise ConfigError(
            f"{_WHERE}.backend_encodings.{backend}: expected {' or '.join(map(repr, known))}, got {name!r}. Declare "
            "the order in which the backend writes a page, or remove the entry: whole pages then move between equal "
            "backends only."
        )
    return Encoding(str(name))


def _address(value: object) -> HostPort | None:
    if value is None:
        return None
    match = re.fullmatch(r"(?:https?://)?(?:\[([^\]]+)\]|([^:/\[\]]+)):(\d{1,5})/?", str(value))
    port = int(match[3]) if match else 0
    if match is None or not 1 <= port <= 65535:
        raise ConfigError(
            f"{_WHERE}.bootstrap_server_address: expected host:port (or [ipv6]:port) with a port from 1 to "
            f"65535, got {value!r}. Correct the value, or remove it to let the producer start its own server."
        )
    return HostPort(match[1] or match[2], port)
