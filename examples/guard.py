"""Run one command and see to it that nothing of it outlives whoever started it (Linux).

    python examples/guard.py STARTER_PID GRACE_SECONDS COMMAND...

A vLLM engine is a tree of processes, and `kill -9` of its starter leaves the tree running. The guard
is the tree's root: it becomes the parent of every orphan below it (PR_SET_CHILD_SUBREAPER), is told
by the kernel when its starter dies (PR_SET_PDEATHSIG), asks the command to end (SIGTERM), waits
`GRACE_SECONDS` and then kills what is left. It only ever signals its own descendants, by id.
Exit status: the command's own, or 128 + signal number.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1


def set_process_option(option: int, value: int) -> None:
    """Call prctl(2) for this process; raise OSError when the kernel refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl option {option}")


def parents() -> dict[int, int]:
    """Parent of every process there is, from /proc."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:  # it has ended meanwhile
                continue
            # The command's name may hold spaces and brackets; the fields after it do not.
            found[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return found


def descendants(root: int) -> list[int]:
    """All processes below `root`, nearest first."""
    by_child = parents()
    below: list[int] = []
    generation = [root]
    while generation:
        generation = [child for child, parent in by_child.items() if parent in generation]
        below += generation
    return below


def reap() -> None:
    """Collect every child that has ended, adopted ones too."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def kill_descendants(deadline: float) -> None:
    """SIGKILL all descendants until there are none; new ones may appear while we look."""
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(POLL_S / 2)
        reap()


class Guard:
    """One command and its tree."""

    def __init__(self, command: list[str], grace_s: float) -> None:
        self.asked_to_end = False
        self.grace_s = grace_s
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.ask_to_end)
        # Its own session: a Ctrl-C at the terminal reaches the starter only, which then ends us in order.
        self.process = subprocess.Popen(command, start_new_session=True)

    def ask_to_end(self, *_signal: object) -> None:
        self.asked_to_end = True

    def run(self) -> int:
        """Wait for the command or for the order to end; return the exit status."""
        deadline = float("inf")
        while self.process.poll() is None and time.monotonic() < deadline:
            if self.asked_to_end and deadline == float("inf"):
                self.process.terminate()
                deadline = time.monotonic() + self.grace_s
            time.sleep(POLL_S)
        kill_descendants(time.monotonic() + 10)
        status = self.process.returncode
        if status is None:  # the kill above ended it, and reap() may have taken its status
            return 128 + signal.SIGKILL
        return status if status >= 0 else 128 - status


def main() -> int:
    """Read the command line, tie this process to its starter and run the command."""
    starter, grace_s, command = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
    set_process_option(PR_SET_CHILD_SUBREAPER, 1)
    set_process_option(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != starter:  # it died before the kernel knew that we care
        return 128 + signal.SIGTERM
    return Guard(command, grace_s).run()


if __name__ == "__main__":
    sys.exit(main())
