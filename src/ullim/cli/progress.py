"""Progress while `builtin:` models and data are being made: a bar on a terminal, a few lines elsewhere."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

LINE_EVERY = 0.25  # of the work, where there is no terminal to draw on


class PreparationProgress:
    """Called with (what is being done, share done from 0 to 1), as `assets.resolve` does."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=console, transient=True) if console.is_terminal else None
        self._text: str | None = None
        self._task: int | None = None
        self._told_at = 0.0

    def __call__(self, text: str, share: float | None) -> None:
        if self._bar is not None:
            if text != self._text or self._task is None:
                if self._task is not None:
                    self._bar.remove_task(self._task)  # type: ignore[arg-type]
                self._task = self._bar.add_task(text, total=1.0)
            self._bar.update(self._task, completed=share or 0.0)  # type: ignore[arg-type]
        elif text != self._text or (share is not None and share >= self._told_at + LINE_EVERY):
            percent = f" {share:.0%}" if share else ""
            self._console.print(f"{text}{percent}", highlight=False)
            self._told_at = share or 0.0
        self._text = text

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
