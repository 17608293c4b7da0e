"""What the decode workers say they pulled: their Prometheus counters, and one log line per pull and rank."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

from client import counters

BYTES_PULLED = "vllm:mht_bytes_pulled_total"
DESCRIPTORS = "vllm:mht_descriptors_total"

PULLED = re.compile(r"pulled request=(?P<request>\S+) bytes=(?P<bytes>\d+) descriptors=(?P<descriptors>\d+)")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Bytes and transfer-engine descriptors of a pull, over however many ranks."""

    bytes: int = 0
    descriptors: int = 0

    def __add__(self, other: Transfer) -> Transfer:
        return Transfer(self.bytes + other.bytes, self.descriptors + other.descriptors)

    def __sub__(self, other: Transfer) -> Transfer:
        return Transfer(self.bytes - other.bytes, self.descriptors - other.descriptors)


def logged_transfers(log: Path) -> dict[str, Transfer]:
    """Pulls in a decode engine's log by request id, its ranks added up."""
    found: dict[str, Transfer] = {}
    for match in PULLED.finditer(log.read_text(encoding="utf-8", errors="replace")):
        pull = Transfer(int(match["bytes"]), int(match["descriptors"]))
        found[match["request"]] = found.get(match["request"], Transfer()) + pull
    return found


def counted(url: str) -> Transfer:
    """A decode engine's counters, all its ranks and pulls together."""
    samples = counters(url)
    return Transfer(int(samples.get(BYTES_PULLED, 0)), int(samples.get(DESCRIPTORS, 0)))


def total(transfers: Iterable[Transfer]) -> Transfer:
    """All of them together."""
    return sum(transfers, Transfer())


def of_answer(transfers: dict[str, Transfer], answer_id: str) -> Transfer:
    """The pull behind an answer: the engine's request id is the answer's, `-<index>-<random>` appended."""
    return total(transfer for request, transfer in transfers.items() if request.startswith(f"{answer_id}-"))
