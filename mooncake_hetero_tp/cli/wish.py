"""`--as tp=2,pp=1,block_size=64,kernel_block_size=32,layout=BLHNC,dtype=bfloat16`: how a decoder would differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from mooncake_hetero_tp.cli.limits import DTYPE_BYTES, MAX_PAGE_PLACES, MAX_RANKS
from mooncake_hetero_tp.core.layout import KVLayout
from mooncake_hetero_tp.errors import ConfigError

_ALIASES: Final[Mapping[str, str]] = {"half": "float16", "float": "float32"}
_MAX_GROUPS: Final = 1024
_MAX_DIGITS: Final = 20


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked; None: as the producer has it. Sizes in tokens, one for all groups or one for each."""

    tp: int | None = None
    pp: int | None = None
    block_size: tuple[int, ...] | None = None
    kernel_block_size: tuple[int, ...] | None = None
    layout: str | None = None
    dtype: str | None = None


def read_wish(text: str, option: str = "--as") -> Wish:
    """Any of the settings, separated by commas; sizes of several KV cache groups by slashes (`block_size=16/32`).

    Raises:
        ConfigError: names the `option`, the setting, what is legal and what was given.
    """
    try:
        return _read(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _read(text: str) -> Wish:
    found: dict[str, Any] = {}
    for setting in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (part.strip() for part in setting.partition("="))
        if name not in _READERS or name in found:
            why = "is named twice" if name in found else "is unknown"
            raise ConfigError(f"{name!r} {why}; settings: {', '.join(_READERS)}, as in tp=2,block_size=64")
        found[name] = _READERS[name](name, value)
    wish = Wish(**found)
    if (wish.tp or 1) * (wish.pp or 1) > MAX_RANKS:
        raise ConfigError(f"tp={wish.tp} x pp={wish.pp}: expected at most {MAX_RANKS} ranks")
    return wish


def _ranks(name: str, value: str) -> int:
    return _number(name, value, MAX_RANKS)


def _sizes(name: str, value: str) -> tuple[int, ...]:
    given = value.split("/")
    if len(given) > _MAX_GROUPS:
        raise ConfigError(f"{name} lists {len(given)} groups; expected at most {_MAX_GROUPS}")
    return tuple(_number(name, one, MAX_PAGE_PLACES) for one in given)


def _number(name: str, value: str, most: int) -> int:
    if not (value.isascii() and value.isdecimal() and len(value) <= _MAX_DIGITS and 1 <= int(value) <= most):
        raise ConfigError(f"{name}={value}: expected a number from 1 to {most}")
    return int(value)


def _layout(name: str, value: str) -> str:
    try:
        return str(KVLayout.from_name(value))
    except ConfigError as error:
        raise ConfigError(f"{name}={value}: {error}") from error


def _dtype(name: str, value: str) -> str:
    if value not in DTYPE_BYTES:
        raise ConfigError(f"{name}={value} is unknown; known: {', '.join(DTYPE_BYTES)}")
    return _ALIASES.get(value, value)


_READERS: Final[Mapping[str, Callable[[str, str], object]]] = {
    "tp": _ranks,
    "pp": _ranks,
    "block_size": _sizes,
    "kernel_block_size": _sizes,
    "layout": _layout,
    "dtype": _dtype,
}
