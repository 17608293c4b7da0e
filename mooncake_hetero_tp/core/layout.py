"""Physical order of a KV cache, as a name.

The logical dims are L (layer), B (block), H (KV head), N (token in the block) and C (content of one head
and token); a layout's name lists them from the outermost to the innermost, so `LBHNC.index(dim)` is the
physical place of a dim. vLLM's `KVCacheLayout` (vllm/v1/kv_cache_layout.py, RFC vllm#42082) has six of
the 120 orders; here all of them parse, because head order is a question one may ask of any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from mooncake_hetero_tp.errors import ConfigError, LocalUsageError

DIMS = "LBHNC"
VLLM_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
"""The layouts that vLLM 0.32 and 0.33 know, in the order of its enum."""


class KVLayout(msgspec.Struct, frozen=True):
    """One order of the five dims; made by `from_name`, which checks the name."""

    name: str

    @classmethod
    def from_name(cls, name: str) -> KVLayout:
        """The layout called `name`; any of the 120 orders.

        Raises:
            ConfigError: `name` is no order of L, B, H, N and C.
        """
        if sorted(name) != sorted(DIMS):
            raise ConfigError(
                f"KV cache layout {name!r} is not an order of the dims L (layer), B (block), H (KV head), "
                f"N (token) and C (content), each named once; vLLM's layouts are {', '.join(VLLM_LAYOUTS)}"
            )
        return cls(name)

    def __str__(self) -> str:
        return self.name

    @property
    def order(self) -> tuple[str, ...]:
        """The dims from the outermost to the innermost."""
        return tuple(self.name)

    def position(self, dim: str) -> int:
        """Physical place of `dim`: 0 is the outermost.

        Raises:
            LocalUsageError: `dim` is none of the five.
        """
        if len(dim) != 1 or dim not in DIMS:
            raise LocalUsageError(f"KV cache dim {dim!r} is none of {', '.join(DIMS)}")
        return self.name.index(dim)

    @property
    def is_head_major(self) -> bool:
        """A head's tokens lie together: H comes before N."""
        return self.position("H") < self.position("N")

    @property
    def is_content_innermost(self) -> bool:
        """One head's content of one token is contiguous; what a Region needs."""
        return self.name.endswith("C")

    @property
    def is_page_outermost(self) -> bool:
        """A (layer, block) page is one run: L and B come before all else. Only then can a page be padded."""
        return set(self.name[:2]) == {"L", "B"}

    @property
    def is_page_splittable(self) -> bool:
        """A block is one dense page after the other, so it divides into kernel blocks.

        vLLM's `create_kv_cache_views` refuses kernel blocks smaller than the logical block elsewhere: with
        B outside of L another layer's page follows, with H outside of B another head's.
        """
        return self.is_page_outermost and self.position("L") == 0

    def strides(self, counts: Mapping[str, int], item_bytes: int, page_bytes: int | None = None) -> dict[str, int]:
        """Byte stride of each dim in an array with `counts` entries a dim: dense but for the padding of pages.

        Args:
            counts: entries of each of the five dims, C in items.
            item_bytes: bytes of one item of C.
            page_bytes: length each (layer, block) page is padded to (vLLM's `page_size_padded`).

        Raises:
            LocalUsageError: a dim is missing or a size is not positive.
            ConfigError: padding asked for where a page is no single run, or shorter than the page.
        """
        _check_counts(counts, item_bytes)
        strides = {}
        step = item_bytes
        for place in reversed(range(len(DIMS))):
            if place == 1 and page_bytes is not None:
                step = self._padded_page(step, page_bytes)
            strides[self.name[place]] = step
            step *= counts[self.name[place]]
        return {dim: strides[dim] for dim in DIMS}

    def _padded_page(self, dense_bytes: int, page_bytes: int) -> int:
        if not self.is_page_outermost:
            raise ConfigError(
                f"layout {self} cannot pad pages to {page_bytes} bytes: a (layer, block) page is one run only "
                f"where L and B come first; use LBHNC, LBNHC, BLHNC or BLNHC"
            )
        if page_bytes < dense_bytes:
            raise ConfigError(
                f"a page of {dense_bytes} bytes does not fit into a padded page of {page_bytes} bytes; "
                f"expected page_size_padded >= {dense_bytes}"
            )
        return page_bytes


def keep_order_fallback(requested: str, candidates: Sequence[str]) -> str:
    """The candidate to take when `requested` is not among them (vLLM PR 59594).

    The first with the same head/token order; where there is none, the first of all, which is the backends'
    own choice.

    Raises:
        ConfigError: a name is no layout.
        LocalUsageError: there are no candidates.
    """
    if not candidates:
        raise LocalUsageError(f"no candidate KV cache layouts to replace {requested!r}")
    wanted = KVLayout.from_name(requested).is_head_major
    return next((name for name in candidates if _is_head_major(name) == wanted), candidates[0])


def preference_order(requested: str, candidates: Iterable[str]) -> list[str]:
    """`candidates` reordered: `requested` first, then the same head/token order, then the rest; stable.

    Handing vLLM's resolver lists in this order gives the fallback of `keep_order_fallback` without touching
    how it narrows them, and changes nothing once vLLM keeps the order itself.

    Raises:
        ConfigError: a name is no layout.
    """
    wanted = KVLayout.from_name(requested).is_head_major
    return sorted(candidates, key=lambda name: (name != requested, _is_head_major(name) != wanted))


def _is_head_major(name: str) -> bool:
    return KVLayout.from_name(name).is_head_major


def _check_counts(counts: Mapping[str, int], item_bytes: int) -> None:
    if set(counts) != set(DIMS):
        raise LocalUsageError(f"counts name the dims {sorted(counts)}, expected {', '.join(DIMS)}")
    wrong = {dim: count for dim, count in counts.items() if count < 1}
    if wrong or item_bytes < 1:
        raise LocalUsageError(f"sizes must be positive, got {wrong or {'item_bytes': item_bytes}}")
