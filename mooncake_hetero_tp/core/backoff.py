"""When an unanswered message is sent again, and since when its addressee has been silent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Doubling intervals from `first_s` to `most_s` between repetitions of one question."""

    first_s: float
    most_s: float
    interval_s: float = 0.0
    next_at: float = 0.0
    silent_since: float | None = None
    """When the oldest question since the last answer was sent; None: all are answered."""

    def sent(self, now: float) -> float:
        """Note that the question was sent; returns when to repeat it."""
        self.interval_s = min(self.interval_s * 2, self.most_s) if self.interval_s else self.first_s
        self.next_at = now + self.interval_s
        if self.silent_since is None:
            self.silent_since = now
        return self.next_at

    def restart(self) -> None:
        """Note that the question has changed: its repetitions start small again, the silence goes on."""
        self.interval_s = 0.0

    def heard(self, next_at: float) -> None:
        """Note an answer; the next question is due at `next_at`, and its repetitions start small again."""
        self.interval_s = 0.0
        self.next_at = next_at
        self.silent_since = None

    def silent_for(self, now: float) -> float:
        return 0.0 if self.silent_since is None else now - self.silent_since
