"""What a transfer will take, from measured rates.

One executor exists so far (direct), so there is nothing to choose yet; the numbers serve the explanations of
`mooncake-hetero-tp plan`.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Positive = Annotated[float, msgspec.Meta(gt=0)]


class Rates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rates of one path between two machines.

    The defaults are Mooncake Transfer Engine 0.3.13 over TCP loopback on 2 cores: pieces of 32 MiB pass at
    1.6 GB/s, and no descriptor, however short, takes less than about 25 us.
    """

    descriptor_s: Positive = 25e-6
    bytes_per_s: Positive = 1.6e9

    def __str__(self) -> str:
        return f"{self.descriptor_s * 1e6:g} us a descriptor, {self.bytes_per_s / 1e9:g} GB/s"

    def direct_s(self, descriptors: int, length_bytes: int) -> float:
        """Seconds to read `length_bytes` with so many descriptors: whichever bound is the slower.

        The two overlap: measured, 32 KiB descriptors take 27 us, 16 KiB ones 25, not the sum of both.
        """
        return max(descriptors * self.descriptor_s, length_bytes / self.bytes_per_s)
