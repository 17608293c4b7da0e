"""Lets vLLM's busy-waiting workers sleep instead, on a machine with fewer cores than they keep busy.

A TP worker that waits for its next step calls `sched_yield` in a loop. Linux 6.18 charges a thread for every
yield, so a worker that has yielded often is kept off the core for seconds once it has work to do: 24 answers
through a TP1 -> TP2 pair took 41 s on two cores, and 2.5 s with this. On a GPU machine, where every worker has
a core of its own, it is neither needed nor wanted.
"""

from __future__ import annotations

import os
import time

_NAP_S = 1e-4

os.sched_yield = lambda: time.sleep(_NAP_S)
