"""A user's own reward function as a channel.

The function gets a list of samples and returns as many numbers (or None for "no score")::

    def politeness(samples):            # or: async def politeness(samples)
        return [1.0 if "please" in s.text.lower() else 0.0 for s in samples]

It never runs on the node's event loop, so nothing it does can hold up generation. A plain function is called one
group at a time, each call in a thread of its own; an `async` function runs on an event loop of the channel's own and
may serve several groups at once, which is what a remote judge wants.

Python cannot end a thread. A plain call that overruns its limit is left behind in a daemon thread (which does not
keep the process alive) and its late answer is thrown away. At most `MAX_STUCK` calls may be left behind at a time;
beyond that the channel gives the reason at once instead of starting more, and tries again when one of them ends.
"""

import asyncio
import inspect
import numbers
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from ullim.records import Completion, FinishReason, IntArray, Message, Prompt, Score

MAX_STUCK = 4


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer as a reward function sees it."""

    messages: tuple[Message, ...]  # the prompt's turns, oldest first; each has .role and .content
    text: str
    token_ids: IntArray  # [L], a sampled stop token included
    finish: FinishReason


RewardFunction = Callable[[list[Sample]], Any]


class FunctionChannel:
    """Calls `function` for each group, with a time limit and retries.

    An error or an overrun is tried again `retries` times, then the whole group is unscored, with the last reason. A
    wrong answer (not a list of as many numbers) is not tried again. A single None, NaN, infinity or non-number
    leaves that answer unscored. Aborted answers are not shown to the function.
    """

    def __init__(self, name: str, function: RewardFunction, *, timeout_s: float, retries: int) -> None:
        self.name = name
        self._timeout_s = timeout_s
        self._retries = retries
        self._counts: Counter[str] = Counter()
        self._runner: _ThreadRunner | _LoopRunner = (
            _LoopRunner(name, function) if _is_async(function) else _ThreadRunner(name, function)
        )
        self._closed = False

    @property
    def counts(self) -> Mapping[str, int]:
        """Since start: `calls`, `retries`, `timeouts`, `errors`, `unscored` (answers)."""
        return dict(self._counts)

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Score]:
        if self._closed:
            raise RuntimeError(f"reward channel {self.name} is closed")
        whole = [completion for completion in completions if completion.finish != "aborted"]
        samples = [Sample(prompt.messages, c.text, _read_only(c.token_ids), c.finish) for c in whole]
        given = iter(await self._score_samples(samples) if samples else [])
        scores = [
            Score(None, "aborted before its end") if completion.finish == "aborted" else next(given)
            for completion in completions
        ]
        self._counts["unscored"] += sum(score.value is None for score in scores)
        return scores

    async def close(self) -> None:
        """Refuse further calls. A call that is running is not waited for."""
        self._closed = True
        self._runner.close()

    async def _score_samples(self, samples: list[Sample]) -> list[Score]:
        reason = ""
        for attempt in range(self._retries + 1):
            self._counts["retries"] += attempt > 0
            self._counts["calls"] += 1
            try:
                # A list of its own for every try: the function may do with it what it likes.
                answer = await self._runner.call(list(samples), self._timeout_s)
            except TimeoutError:
                self._counts["timeouts"] += 1
                reason = f"no answer within {self._timeout_s:g} s"
            except _TooManyStuck as stuck:
                self._counts["errors"] += 1
                reason = str(stuck)
                break  # another try at once would find the same
            except _CallFailed as failed:
                self._counts["errors"] += 1
                reason = str(failed)
            else:
                return _scores(answer, len(samples))
        return [Score(None, reason)] * len(samples)


class _CallFailed(Exception):
    """The function raised; the message names the error."""


class _TooManyStuck(Exception):
    """No thread was started because too many calls are still running past their limit."""


class _ThreadRunner:
    """One call at a time, each in a daemon thread; those that overrun are left behind and counted."""

    def __init__(self, name: str, function: RewardFunction) -> None:
        self._name = name
        self._function = function
        self._turn = asyncio.Lock()
        self._stuck: set[threading.Thread] = set()

    async def call(self, samples: list[Sample], timeout_s: float) -> Any:
        # Waiting for one's turn is outside the limit (a slow neighbour is not this call's fault) and still bounded,
        # as every turn is.
        async with self._turn:
            self._stuck = {thread for thread in self._stuck if thread.is_alive()}
            if len(self._stuck) >= MAX_STUCK:
                raise _TooManyStuck(
                    f"{len(self._stuck)} earlier calls are still running past their limit of {timeout_s:g} s"
                )
            answer: Future[Any] = Future()
            thread = threading.Thread(
                target=_run_into, args=(answer, self._function, samples), name=f"reward-{self._name}", daemon=True
            )
            thread.start()
            try:
                return await _within(answer, timeout_s)
            finally:
                if not answer.done():
                    self._stuck.add(thread)

    def close(self) -> None:
        """Daemon threads end with the process."""


def _run_into(answer: "Future[Any]", function: RewardFunction, samples: list[Sample]) -> None:
    answer.set_running_or_notify_cancel()  # from here on nobody can cancel it, so setting a result cannot fail
    try:
        result = function(samples)
    except BaseException as error:  # the user's code, in a thread whose end nobody would see; told in the reason
        answer.set_exception(_CallFailed(_told(error)))
    else:
        answer.set_result(result)


class _LoopRunner:
    """An event loop in a daemon thread; calls run side by side and an overrun is cancelled."""

    def __init__(self, name: str, function: Callable[[list[Sample]], Awaitable[Any]]) -> None:
        self._function = function
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._serve, name=f"reward-{name}", daemon=True).start()

    async def call(self, samples: list[Sample], timeout_s: float) -> Any:
        answer = asyncio.run_coroutine_threadsafe(self._guarded(samples), self._loop)
        return await _within(answer, timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _serve(self) -> None:
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))  # let the cancelled ones end
        self._loop.close()

    async def _guarded(self, samples: list[Sample]) -> Any:
        try:
            return await self._function(samples)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit would end the loop under the other calls; told in the reason
            raise _CallFailed(_told(error)) from error


async def _within(answer: "Future[Any]", timeout_s: float) -> Any:
    """The answer, or TimeoutError. Not `wait_for`, which waits on for a task that swallows its cancellation."""
    waiter = asyncio.wrap_future(answer)
    try:
        done, _ = await asyncio.wait({waiter}, timeout=timeout_s)
    finally:
        waiter.cancel()  # where it is done this does nothing
    if not done:
        raise TimeoutError
    if waiter.cancelled():  # the function cancelled itself; our own cancellation would have been raised above
        raise _CallFailed("the function was cancelled")
    return waiter.result()


def _read_only(token_ids: IntArray) -> IntArray:
    """A view that cannot be written: what the function changed would be trained on against other tokens' log-probs."""
    view = token_ids.view()
    view.flags.writeable = False
    return view


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _scores(answer: Any, count: int) -> list[Score]:
    """One Score per sample from what the function returned."""
    if inspect.iscoroutine(answer):
        answer.close()
        return [Score(None, "the function returned a coroutine; declare it with `async def`")] * count
    # A dict, set or generator has no order or length to trust; numpy arrays and torch tensors have `tolist`.
    try:
        values = answer.tolist() if hasattr(answer, "tolist") else answer
    except Exception as error:  # the user's object, so anything may come; it becomes the reason
        return [Score(None, f"the function's {type(answer).__name__} cannot be read: {_told(error)}")] * count
    if not isinstance(values, list | tuple):
        return [Score(None, f"the function returned {type(answer).__name__}, not a list of {count} numbers")] * count
    if len(values) != count:
        return [Score(None, f"the function returned {len(values)} values for {count} samples")] * count
    return [_score(value) for value in values]


def _score(value: Any) -> Score:
    if value is None:
        return Score(None, "the function gave no score")
    try:
        if hasattr(value, "item"):  # numpy and torch scalars
            value = value.item()
        if not isinstance(value, numbers.Real):
            return Score(None, f"the function gave {type(value).__name__} {str(value)[:40]!r}, not a number")
        number = float(value)
    except Exception as error:  # an array of several, a number beyond floats, an object with its own ideas
        return Score(None, f"the function gave {type(value).__name__}, not a number ({_told(error)})")
    return Score(number) if np.isfinite(number) else Score(None, f"the function gave {number}")
