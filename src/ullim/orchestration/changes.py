"""Waiting: for a change somewhere in the controller without polling, and for a peer with a deadline."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ullim.errors import RunFailed

T = TypeVar("T")


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


async def within(deadline_s: float, awaited: Awaitable[T], trouble: str) -> T:
    """The result of `awaited`, or RunFailed saying `trouble` after `deadline_s` seconds."""
    try:
        return await asyncio.wait_for(awaited, deadline_s)
    except TimeoutError:
        raise RunFailed(f"{trouble} within {deadline_s:g} s") from None
