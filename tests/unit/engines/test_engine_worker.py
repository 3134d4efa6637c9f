"""The worker thread: commands between steps, failures that reach everyone, an end that is an end."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from ullim.engines.worker import Worker
from ullim.errors import RunFailed


def make(step: Callable[[], bool], deadline_s: float = 20.0) -> tuple[Worker, list[BaseException]]:
    heard: list[BaseException] = []
    return Worker("test", session=nullcontext, step=step, on_failure=heard.append, deadline_s=deadline_s), heard


def test_commands_run_on_the_thread_in_order_and_give_back_their_result() -> None:
    async def body() -> None:
        worker, _ = make(lambda: False)
        names: list[str] = []
        futures = [worker.post(lambda i=i: names.append(f"{i}@{threading.current_thread().name}")) for i in range(3)]
        assert await worker.call(lambda: 42, "a sum") == 42
        assert all(future.done() for future in futures)
        assert names == ["0@test", "1@test", "2@test"]
        await worker.close()

    asyncio.run(body())


def test_a_failing_command_is_its_callers_alone() -> None:
    async def body() -> None:
        worker, heard = make(lambda: False)
        with pytest.raises(KeyError):
            await worker.call(lambda: {}["x"], "a look-up")
        assert await worker.call(lambda: 1, "the next") == 1
        assert worker.failure is None
        assert heard == []
        await worker.close()

    asyncio.run(body())


def test_a_failing_step_ends_the_thread_and_fails_what_waits() -> None:
    async def body() -> None:
        entered, go = threading.Event(), threading.Event()

        def step() -> bool:
            entered.set()
            assert go.wait(20)
            raise ArithmeticError("step broke")

        worker, heard = make(step)
        assert entered.wait(20)
        waiting = worker.post(lambda: 1)
        go.set()
        with pytest.raises(ArithmeticError):
            await asyncio.wrap_future(waiting)
        await asyncio.to_thread(worker._thread.join, 20)
        assert isinstance(worker.failure, ArithmeticError)
        assert [type(e) for e in heard] == [ArithmeticError]
        with pytest.raises(RunFailed, match="step broke"):
            worker.post(lambda: 1)
        await worker.close()

    asyncio.run(body())


def test_a_session_that_cannot_begin_is_a_failure_too() -> None:
    @contextmanager
    def session() -> Iterator[None]:
        raise OSError("no such device")
        yield

    async def body() -> None:
        heard: list[BaseException] = []
        worker = Worker("test", session=session, step=lambda: False, on_failure=heard.append, deadline_s=20)
        await asyncio.to_thread(worker._thread.join, 20)
        assert isinstance(worker.failure, OSError)

    asyncio.run(body())


def test_no_answer_within_the_deadline_names_what_was_asked() -> None:
    async def body() -> None:
        go = threading.Event()
        worker, _ = make(lambda: not go.wait(20), deadline_s=0.05)
        with pytest.raises(RunFailed, match="pause got no answer"):
            await worker.call(lambda: None, "pause")
        with pytest.raises(RunFailed, match="did not stop"):
            await worker.close()
        go.set()
        await asyncio.to_thread(worker._thread.join, 20)

    asyncio.run(body())


def test_an_idle_worker_does_not_step_until_something_happens() -> None:
    async def body() -> None:
        steps: list[int] = []

        def step() -> bool:
            steps.append(1)
            return False

        worker, _ = make(step)
        await worker.call(lambda: None, "a nudge")
        await worker.call(lambda: None, "a nudge")
        assert len(steps) <= 3
        await worker.close()
        with pytest.raises(RuntimeError, match="closed"):
            worker.post(lambda: 1)

    asyncio.run(body())
