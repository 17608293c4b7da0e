"""A process that registers a patterned buffer with a real Mooncake engine and serves it until stdin closes.

Prints `session address` and then serves; run as a script.
"""

from __future__ import annotations

import sys

import numpy as np

from mooncake_hetero_tp.core.regions import Buffer
from mooncake_hetero_tp.io.engine import MooncakeEngine

SIZE = 32 * 2**20


def pattern() -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """What the buffer holds; never zero."""
    return np.random.default_rng(7).integers(1, 256, SIZE, np.uint8)


def main() -> None:
    memory = pattern()
    engine = MooncakeEngine("127.0.0.1", lease_s=30, protocol="tcp", reads=False)
    engine.register([Buffer(memory.ctypes.data, memory.nbytes)])
    print(engine.transport_session, memory.ctypes.data, flush=True)
    sys.stdin.read()
    engine.close()


if __name__ == "__main__":
    main()
