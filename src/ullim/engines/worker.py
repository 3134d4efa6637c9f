"""The one thread that runs torch, and how the asyncio side talks to it.

The loop: run the commands that have come in, then one step of work if there is any; sleep on a condition when there is
neither. Commands therefore run between forward passes, never during one, and need no locks of their own. An exception
from the step ends the thread and reaches everyone who waits: no caller is left hanging.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from ullim.errors import RunFailed

T = TypeVar("T")


class Worker:
    """Runs `step` whenever it reports work, and commands in between, all within `session`.

    `on_failure` hears of a step that raised, and of the regular end.
    """

    def __init__(
        self,
        name: str,
        *,
        session: Callable[[], AbstractContextManager[None]],
        step: Callable[[], bool],
        on_failure: Callable[[BaseException], None],
        deadline_s: float,
    ) -> None:
        self._session = session
        self._step = step
        self._on_failure = on_failure
        self._deadline_s = deadline_s
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], T]) -> Future[T]:
        """Have `command` run on the thread. Its exception is the future's, and does not end the thread."""
        future: Future[T] = Future()
        with self._wake:
            self._refuse_if_ended()
            self._commands.append((command, future))
            self._wake.notify()
        return future

    async def call(self, command: Callable[[], T], what: str, *, bounded: bool = True) -> T:
        """`post`, awaited. `bounded=False` is for commands that keep deadlines of their own."""
        waiting = asyncio.wrap_future(self.post(command))
        if not bounded:
            return await waiting
        try:
            return await asyncio.wait_for(waiting, self._deadline_s)
        except TimeoutError as error:
            raise RunFailed(f"embedded engine: {what} got no answer within {self._deadline_s:g} s") from error

    async def close(self) -> None:
        """Stop after the present step and wait for the thread's end. Doing it twice does no harm."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, self._deadline_s)
        if self._thread.is_alive():
            raise RunFailed(f"embedded engine: the worker did not stop within {self._deadline_s:g} s")

    @property
    def ended(self) -> bool:
        """Whether it was closed or has died, so that nothing may be posted any more."""
        return self._closing or self.failure is not None

    def _refuse_if_ended(self) -> None:
        if self.failure is not None:
            raise RunFailed(f"embedded engine: the worker died of {self.failure!r}") from self.failure
        if self._closing:
            raise RuntimeError("embedded engine: closed")

    def _run(self) -> None:
        try:
            with self._session():
                idle = False
                while self._take_commands(idle):
                    idle = not self._step()
            self._end(RuntimeError("embedded engine: closed"))
        except BaseException as error:  # not swallowed: every waiting caller gets it
            with self._wake:
                self.failure = error
            self._end(error)

    def _take_commands(self, idle: bool) -> bool:
        """Run what has come in, waiting for something first if `idle`. False when it is time to end."""
        with self._wake:
            while idle and not self._commands and not self._closing:
                self._wake.wait()
            commands = list(self._commands)
            self._commands.clear()
            if self._closing:
                self._commands.extend(commands)
                return False
        for command, future in commands:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(command())
                except BaseException as error:  # the caller's, who awaits the future
                    future.set_exception(error)
        return True

    def _end(self, error: BaseException) -> None:
        with self._wake:
            left = list(self._commands)
            self._commands.clear()
        for _, future in left:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)
        self._on_failure(error)
