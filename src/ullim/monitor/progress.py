"""What the live view remembers of a run: series to draw, pace, notes."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ullim.monitor.step_view import StepView

_PACE_STEPS = 20  # recent steps that the ETA is reckoned from
_MOVE_STEPS = 5  # most steps averaged at either end of a series, for its change
_NOTES = 3


@dataclass(slots=True)
class Series:
    """One number a step, None where it was not measured."""

    values: list[float | None] = field(default_factory=list)

    @property
    def last(self) -> float | None:
        """The newest known value."""
        return next((value for value in reversed(self.values) if value is not None), None)

    @property
    def change(self) -> float | None:
        """How far the series has come: mean of its newest values minus mean of its first ones.

        A quarter of the known values at either end, five at most, so that one noisy step does not decide the sign.
        """
        known = [value for value in self.values if value is not None]
        if len(known) < 2:
            return None
        count = max(1, min(_MOVE_STEPS, len(known) // 4))
        return math.fsum(known[-count:]) / count - math.fsum(known[:count]) / count


class Progress:
    """Everything that the frame draws. Times are readings of one monotonic clock, in seconds."""

    def __init__(self, title: str, total_steps: int, channels: Sequence[str], *, first_step: int, began: float) -> None:
        self.title = title
        self.total_steps = total_steps
        self.step = first_step
        self.rewards = {channel: Series() for channel in channels}
        self.length = Series()
        self.entropy = Series()
        self.view: StepView | None = None
        self.status = ""
        self.notes: deque[str] = deque(maxlen=_NOTES)
        self.notes_total = 0
        self.began = began
        self._ends: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)

    def add(self, view: StepView, now: float) -> None:
        """Take in a finished step."""
        self.view = view
        self.step = view.step
        for channel, series in self.rewards.items():
            series.values.append(_finite(view.rewards.get(channel)))
        self.length.values.append(_finite(view.length_mean))
        self.entropy.values.append(_finite(view.entropy))
        self._ends.append((view.step, now))

    def note(self, text: str) -> None:
        """Remember a warning; the frame shows the newest ones and says how many there were."""
        self.notes.append(text)
        self.notes_total += 1

    def eta_s(self, now: float) -> float | None:
        """Seconds to the last step at the pace of the recent steps; None until a step has been timed.

        Time from the start to the first step holds loading and first compilation, so it is not taken for a step.
        """
        if len(self._ends) < 2:
            return None
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        pace = (ended - began) / (last - first)
        # The running step has used some of its time already, but never more than a step's worth.
        return max(0.0, (self.total_steps - last) * pace - min(pace, now - ended))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
