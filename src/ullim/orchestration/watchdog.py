"""Watchdog: a run that makes no progress ends with a table of who waits for whom."""

import asyncio
import time
from collections.abc import Callable

from ullim.errors import RunFailed


class Watchdog:
    """`touch()` at every finished group, step and publication; `watch()` raises once that stops for `limit_s`."""

    def __init__(
        self, limit_s: float, describe: Callable[[], str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit_s = limit_s
        self._describe = describe
        self._clock = clock
        self._last = clock()

    def touch(self) -> None:
        self._last = self._clock()

    def check(self) -> None:
        """Raise RunFailed if nothing has happened for `limit_s` seconds."""
        silent = self._clock() - self._last
        if silent > self._limit_s:
            raise RunFailed(
                f"no group finished, no step was taken and no weights arrived for {silent:.0f} s "
                f"(loop.watchdog_s = {self._limit_s:g}). Who waits for whom:\n{self._describe()}"
            )

    async def watch(self) -> None:
        """Check until cancelled."""
        self.touch()
        while True:
            await asyncio.sleep(min(1.0, self._limit_s / 4))
            self.check()
