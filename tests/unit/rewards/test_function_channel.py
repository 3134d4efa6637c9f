import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from ullim.records import Completion, FinishReason, Message, Prompt, Score
from ullim.rewards.function import MAX_STUCK, FunctionChannel, Sample

PROMPT = Prompt("p", 0, (Message("user", "hi"),), np.array([1], np.int32))
FOREVER_S = 60.0  # a limit that is never meant to be reached


def answers(*texts: str, finish: FinishReason = "stop") -> list[Completion]:
    return [
        Completion(np.array([7], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), finish, text)
        for text in texts
    ]


def channel(function: Any, *, timeout_s: float = FOREVER_S, retries: int = 0) -> FunctionChannel:
    return FunctionChannel("mine", function, timeout_s=timeout_s, retries=retries)


def score(channel: FunctionChannel, completions: list[Completion]) -> list[Score]:
    return asyncio.run(channel.score(PROMPT, completions))


def test_a_function_sees_the_samples_and_its_numbers_come_back_in_order() -> None:
    seen: list[Sample] = []

    def lengths(samples: list[Sample]) -> list[float]:
        seen.extend(samples)
        return [len(sample.text) for sample in samples]

    assert [s.value for s in score(channel(lengths), answers("a", "bbb"))] == [1.0, 3.0]
    assert seen[0].messages == PROMPT.messages
    assert (seen[1].text, seen[1].finish, seen[1].token_ids.tolist()) == ("bbb", "stop", [7])


def test_an_async_function_may_serve_groups_side_by_side() -> None:
    async def together() -> list[list[Score]]:
        both_inside = asyncio.Event()
        inside = 0

        async def judge(samples: list[Sample]) -> list[float]:
            nonlocal inside
            inside += 1
            if inside == 2:
                both_inside.set()
            await both_inside.wait()
            return [float(sample.text) for sample in samples]

        mine = channel(judge)
        scores = await asyncio.gather(mine.score(PROMPT, answers("1")), mine.score(PROMPT, answers("2", "3")))
        await mine.close()
        return list(scores)

    assert [[s.value for s in group] for group in asyncio.run(together())] == [[1.0], [2.0, 3.0]]


def test_a_plain_function_is_never_inside_twice_and_never_on_the_loop() -> None:
    inside = threading.Lock()
    threads: set[int] = set()

    def exclusive(samples: list[Sample]) -> list[float]:
        assert inside.acquire(blocking=False), "called twice at once"
        threads.add(threading.get_ident())
        time.sleep(0.01)
        inside.release()
        return [1.0]

    async def together() -> list[list[Score]]:
        mine = channel(exclusive)
        return list(await asyncio.gather(*(mine.score(PROMPT, answers("x")) for _ in range(5))))

    assert [group[0].value for group in asyncio.run(together())] == [1.0] * 5
    assert threading.get_ident() not in threads


@pytest.mark.parametrize(
    ("value", "number"),
    [(1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (torch.tensor(2.0), 2.0), (np.int64(3), 3.0)],
)
def test_what_counts_as_a_number(value: object, number: float) -> None:
    assert score(channel(lambda samples: [value]), answers("x")) == [Score(number)]


@pytest.mark.parametrize("container", [np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]), (1.0, 2.0)])
def test_what_counts_as_a_list(container: object) -> None:
    assert [s.value for s in score(channel(lambda samples: container), answers("x", "y"))] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "gave no score"),
        (float("nan"), "gave nan"),
        (float("inf"), "gave inf"),
        ("0.5", "gave str '0.5', not a number"),
        ([0.5], "not a number"),
        (1j, "not a number"),
    ],
)
def test_one_bad_value_leaves_one_answer_unscored_with_the_reason(value: object, reason: str) -> None:
    mine = channel(lambda samples: [1.0, value])
    good, bad = score(mine, answers("x", "y"))
    assert good.value == 1.0
    assert bad.value is None
    assert bad.reason is not None
    assert reason in bad.reason
    assert mine.counts["unscored"] == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([1.0], "1 values for 2 samples"),
        ([1.0, 2.0, 3.0], "3 values for 2 samples"),
        (None, "NoneType, not a list of 2"),
        (0.5, "float, not a list of 2"),
        ({0: 1.0, 1: 2.0}, "dict, not a list of 2"),
        ("ab", "str, not a list of 2"),
        (np.float64(1.0), "not a list of 2"),
    ],
)
def test_a_wrong_answer_is_not_tried_again(answer: object, reason: str) -> None:
    mine = channel(lambda samples: answer, retries=3)
    scores = score(mine, answers("x", "y"))
    assert all(s.value is None and s.reason is not None and reason in s.reason for s in scores)
    assert mine.counts["calls"] == 1


def test_a_forgotten_async_is_named() -> None:
    async def inner() -> list[float]:
        return [1.0]

    [only] = score(channel(lambda samples: inner()), answers("x"))
    assert only.reason is not None
    assert "async def" in only.reason


@pytest.mark.parametrize("kind", ["plain", "async"])
def test_errors_are_tried_again_and_counted(kind: str) -> None:
    calls = 0

    def flaky(samples: list[Sample]) -> list[float]:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise ConnectionError("the judge is away")
        return [0.25]

    async def flaky_async(samples: list[Sample]) -> list[float]:
        return flaky(samples)

    mine = channel(flaky if kind == "plain" else flaky_async, retries=2)
    assert score(mine, answers("x")) == [Score(0.25)]
    assert mine.counts == {"calls": 3, "retries": 2, "errors": 2, "unscored": 0}


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), TimeoutError("its own"), StopIteration()])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_when_tries_are_used_up_the_group_is_unscored_and_told_why(kind: str, error: BaseException) -> None:
    def failing(samples: list[Sample]) -> list[float]:
        raise error

    async def failing_async(samples: list[Sample]) -> list[float]:
        raise error

    mine = channel(failing if kind == "plain" else failing_async, retries=1)
    scores = score(mine, answers("x", "y"))
    # A StopIteration cannot leave a coroutine as itself.
    expected = "RuntimeError" if kind == "async" and isinstance(error, StopIteration) else type(error).__name__
    assert [s.value for s in scores] == [None, None]
    assert all(s.reason is not None and s.reason.startswith(expected) for s in scores)
    assert mine.counts == {"calls": 2, "retries": 1, "errors": 2, "unscored": 2}


def test_a_call_that_overruns_is_left_behind_and_their_number_is_bounded() -> None:
    release = threading.Event()
    entered = 0

    def hanging(samples: list[Sample]) -> list[float]:
        nonlocal entered
        entered += 1
        release.wait(FOREVER_S)
        return [1.0]

    mine = channel(hanging, timeout_s=0.02)
    try:
        reasons = [score(mine, answers("x"))[0].reason or "" for _ in range(MAX_STUCK + 3)]
    finally:
        release.set()
    assert all("no answer within 0.02 s" in reason for reason in reasons[:MAX_STUCK])
    assert all("still running past their limit" in reason for reason in reasons[MAX_STUCK:])
    assert entered == MAX_STUCK
    assert mine.counts["timeouts"] == MAX_STUCK


def test_the_channel_works_again_once_those_left_behind_have_ended() -> None:
    release = threading.Event()
    mine = FunctionChannel("late", lambda samples: [float(release.wait(FOREVER_S))], timeout_s=0.05, retries=0)
    for _ in range(MAX_STUCK):
        score(mine, answers("x"))
    release.set()
    for thread in threading.enumerate():
        if thread.name == "reward-late":
            thread.join(FOREVER_S)
    mine._timeout_s = FOREVER_S  # the answer is immediate now; only a loaded machine could miss the short limit
    assert score(mine, answers("x")) == [Score(1.0)]


def test_an_async_call_that_swallows_its_cancellation_holds_nobody_up() -> None:
    async def stubborn(samples: list[Sample]) -> list[float]:
        while True:
            try:
                await asyncio.sleep(FOREVER_S)
            except asyncio.CancelledError:
                continue

    async def blocking(samples: list[Sample]) -> list[float]:
        time.sleep(0.3)
        return [1.0]

    for function in (stubborn, blocking):
        [only] = score(channel(function, timeout_s=0.02), answers("x"))
        assert only.reason == "no answer within 0.02 s"


def test_aborted_answers_are_not_shown_to_the_function() -> None:
    shown: list[str] = []

    def note(samples: list[Sample]) -> list[float]:
        shown.extend(sample.text for sample in samples)
        return [float(len(shown))] * len(samples)

    scores = score(channel(note), [*answers("cut", finish="aborted"), *answers("whole")])
    assert shown == ["whole"]
    assert [s.value for s in scores] == [None, 1.0]


def test_a_group_of_aborted_answers_calls_nothing() -> None:
    mine = channel(lambda samples: [])
    assert [s.value for s in score(mine, answers("cut", finish="aborted"))] == [None]
    assert mine.counts.get("calls", 0) == 0


def test_a_closed_channel_refuses() -> None:
    async def scenario() -> None:
        async def judge(samples: list[Sample]) -> list[float]:
            return [1.0]

        mine = channel(judge)
        await mine.close()
        with pytest.raises(RuntimeError, match="closed"):
            await mine.score(PROMPT, answers("x"))

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda samples: [np.array([1.0, 2.0])] * len(samples), "not a number"),
        (lambda samples: [10**400] * len(samples), "not a number"),
        (lambda samples: samples.clear() or [], "0 values for 2 samples"),
    ],
)
def test_whatever_the_function_returns_is_a_reason_and_never_an_error(function: Any, reason: str) -> None:
    scores = score(channel(function), answers("a", "b"))
    assert [s.value for s in scores] == [None, None]
    assert all(reason in str(s.reason) for s in scores)


def test_a_function_cannot_rewrite_the_tokens_that_are_trained_on() -> None:
    def scribble(samples: list[Sample]) -> list[float]:
        samples[0].token_ids[:] = 3
        return [1.0]

    answered = answers("a")
    assert "read-only" in str(score(channel(scribble), answered)[0].reason)
    assert answered[0].token_ids.tolist() == [7]
