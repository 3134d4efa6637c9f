"""Changes: how the controller's loops wait for each other without polling."""

import asyncio
from collections.abc import Callable


class Changes:
    """Somebody changed something; whoever waits looks again. For one asyncio loop."""

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def notify(self) -> None:
        """Wake every waiter to look at its condition once more."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return as soon as `condition()` holds. The run's watchdog bounds the wait."""
        while not condition():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
