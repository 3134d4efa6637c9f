"""Where wall time goes: busy shares of learner and nodes, and seconds by stage."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Clock = Callable[[], float]


class BusyClock:
    """Busy share of wall time of one worker that marks its own work with `busy()`.

    Work that overlaps or nests counts once. Not for several threads at once.
    """

    def __init__(self, *, history_s: float = 600.0, clock: Clock = time.monotonic) -> None:
        """`history_s`: the longest window that `share` can be asked for; older intervals are forgotten."""
        self._clock = clock
        self._history_s = history_s
        self._began = clock()
        self._intervals: deque[tuple[float, float]] = deque()
        self._depth = 0
        self._busy_since = 0.0
        self._taken_at = self._began
        self._worked = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of finished work since the start; what a `BusyCounter` elsewhere takes."""
        return self._worked

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Mark the time within the block as work."""
        if self._depth == 0:
            self._busy_since = self._clock()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                now = self._clock()
                self._intervals.append((self._busy_since, now))
                self._worked += now - self._busy_since
                while self._intervals[0][1] < now - self._history_s:
                    self._intervals.popleft()

    def share(self, window_s: float) -> float:
        """Busy share in [0, 1] of the last `window_s` seconds, or of the time since the start where that is less."""
        if not 0 < window_s <= self._history_s:
            raise ValueError(f"window_s must be above 0 and at most history_s ({self._history_s:g}), got {window_s:g}")
        now = self._clock()
        return self._share_since(max(self._began, now - window_s), now)

    def take(self) -> float:
        """Busy share since the last call (or the start), at most `history_s` back: for one number a step."""
        now = self._clock()
        since = max(self._taken_at, now - self._history_s)
        self._taken_at = now
        return self._share_since(since, now)

    def _share_since(self, since: float, now: float) -> float:
        if now <= since:
            return 1.0 if self._depth else 0.0
        busy = sum(max(0.0, end - max(begin, since)) for begin, end in self._intervals)
        if self._depth:
            busy += now - max(self._busy_since, since)
        return busy / (now - since)


class BusyCounter:
    """Busy share of a worker elsewhere, from the cumulative busy seconds that it reports."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._at = clock()
        self._total = 0.0

    def take(self, busy_s: float) -> float:
        """Share in [0, 1] since the last call, given the worker's total `busy_s`.

        A total below the last one means the worker was started anew and counts from 0 again.
        """
        now = self._clock()
        worked = busy_s - self._total if busy_s >= self._total else busy_s
        passed = now - self._at
        self._at, self._total = now, busy_s
        # The two clocks are read at different moments, so the quotient may pass 1 by a hair.
        return min(1.0, worked / passed) if passed > 0 else 0.0


class StageTimes:
    """Seconds by stage within one step, for `timing/<stage>`."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the time within the block to stage `name`, also when the block raises."""
        began = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - began)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """`{"timing/<stage>": seconds}` since the last call, and start again from nothing."""
        taken = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        self._seconds = {}
        return taken
