"""The running loop on the terminal: one screenful that keeps itself up to date, or one plain line a step."""

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.live import Live

from ullim.monitor.frame import frame, plain_line
from ullim.monitor.progress import Progress
from ullim.monitor.sparkline import one_line
from ullim.monitor.step_view import StepView

_REFRESH_PER_SECOND = 2
_STATUS_EVERY_S = 30.0


class LiveView:
    """Shows a run while it goes on. A context manager; its last frame stays on the screen.

    On a UTF-8 terminal it draws one frame and redraws it in place. Where stdout is a file, a pipe or a terminal that
    cannot, it prints one line a step, every note, and a status line when nothing was printed for half a minute; no
    control codes.
    """

    def __init__(
        self,
        total_steps: int,
        channels: Sequence[str],
        *,
        title: str = "ullim",
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`first_step`: steps that a resumed run has behind it. `clock` gives seconds."""
        self._console = console or Console()
        self._clock = clock
        self._progress = Progress(title, total_steps, channels, first_step=first_step, began=clock())
        self._drawing = threading.Lock()  # rich draws from a thread of its own
        draws = self._console.is_terminal and not self._console.is_dumb_terminal
        self._plain = not (draws and self._console.encoding.startswith("utf"))
        self._printed_at = clock()
        self._live = Live(
            get_renderable=self.render,
            console=self._console,
            refresh_per_second=_REFRESH_PER_SECOND,
            vertical_overflow="crop",
        )

    def update(self, view: StepView) -> None:
        """A step is done."""
        now = self._clock()
        with self._drawing:
            self._progress.add(view, now)
        if self._plain:
            self._print(plain_line(self._progress, now))

    def note(self, text: str) -> None:
        """Something worth knowing has happened: a node was restarted, a step was skipped."""
        with self._drawing:
            self._progress.note(text)
        if self._plain:
            self._print(f"note: {one_line(text)}")

    def status(self, text: str) -> None:
        """What the run is doing just now, between steps."""
        with self._drawing:
            self._progress.status = text
        if self._plain and self._clock() - self._printed_at >= _STATUS_EVERY_S:
            self._print(one_line(text))

    def render(self) -> RenderableType:
        """The frame as it is now."""
        with self._drawing:
            return frame(self._progress, self._clock(), self._console)

    def __enter__(self) -> Self:
        if not self._plain:
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._plain:
            self._live.stop()

    def _print(self, line: str) -> None:
        """Past rich, which would wrap the line, and colour it where FORCE_COLOR is set.

        What the output's encoding lacks becomes "?": Korean text in an ASCII log must not end a run.
        """
        encoding = self._console.encoding
        print(line.encode(encoding, "replace").decode(encoding), file=self._console.file, flush=True)
        self._printed_at = self._clock()
