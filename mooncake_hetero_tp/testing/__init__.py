"""Doubles that behave: an engine that really copies bytes, a clock that only moves when told, a wired pair.

For this package's tests and for those of who builds on it; nothing in the package imports this module.
"""

from mooncake_hetero_tp.testing.clock import FakeClock
from mooncake_hetero_tp.testing.linked import Ended, LinkedPair, Load
from mooncake_hetero_tp.testing.loopback import LoopbackEngine, LoopbackFabric

__all__ = ["Ended", "FakeClock", "LinkedPair", "Load", "LoopbackEngine", "LoopbackFabric"]
